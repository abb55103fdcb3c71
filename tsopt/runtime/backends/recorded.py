"""A function of tensors on a GPU, recorded as a CUDA graph once and replayed with one launch for each call.

A graph reads and writes the memory that it was captured with, so inputs are copied in and outputs are copied out, one
call at a time. It removes the launch overhead between kernels, which dominates at small batch sizes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import cuda

from tsopt.errors import BackendError
from tsopt.runtime.backends.recorded_nodes import use_of_cpu

WARM_UP = 3  # calls before the recording: libraries choose kernels and allocate in them, which no graph may hold


class Recorded:
    """A function of tensors, recorded on inputs that it keeps. It runs on the stream of its caller.

    Args:
        stream: where it is recorded, for functions that use a certain one; None: a new one.
        is_foreign: whether the function belongs to a library that may use memory of the CPU in each call.

    Raises:
        BackendError: it uses memory of the CPU, or that cannot be found out because cuda-bindings is missing.
    """

    @torch.inference_mode(False)  # what is made in it could not be written to in calls outside of it
    def __init__(
        self,
        forward: Callable[..., Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        stream: Any = None,
        *,
        is_foreign: bool = False,
    ) -> None:
        self.forward = forward  # holds the weights, of which the graph has the addresses only
        self.inputs = [value.clone() if value.is_inference() else value for value in inputs]
        self.device = inputs[0].device if inputs else None
        self.lock = threading.Lock()
        self.graph: Any = cuda.CUDAGraph(keep_graph=is_foreign)
        stream = stream or cuda.Stream(self.device)
        with torch.no_grad(), cuda.device(self.device), cuda.stream(cuda.current_stream(self.device)):
            stream.wait_stream(cuda.current_stream())
            with cuda.stream(stream):
                for _ in range(WARM_UP):
                    forward(*self.inputs)
            _clear_workspaces()
            # NOTE: a recording that fails does not restore the stream; the outermost `stream` above does. Other
            # threads may do what they want meanwhile.
            with cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.outputs = list(forward(*self.inputs))
            _clear_workspaces()
            if is_foreign:
                if used := use_of_cpu(self.graph):
                    raise BackendError("a function cannot be recorded as a CUDA graph", why=used)
                self.graph.instantiate()
        self.last_stream, self.end_of_last = stream, cuda.Event()
        self.end_of_last.record(stream)

    def __call__(self, *values: torch.Tensor) -> list[torch.Tensor]:
        """The results of the function for these tensors, in memory of their own."""
        stream = cuda.current_stream(self.device)
        with self.lock, cuda.device(self.device):
            if stream != self.last_stream:  # calls on one stream follow each other by themselves
                stream.wait_event(self.end_of_last)
                self.last_stream = stream
            try:
                if self.inputs:
                    torch._foreach_copy_(self.inputs, values)
                self.graph.replay()
                return [value.clone() for value in self.outputs]
            finally:  # whatever has failed, the graph may be running
                self.end_of_last.record(stream)


def _clear_workspaces() -> None:
    """Makes torch forget the memory that cuBLAS works in, which it keeps for each stream.

    Before a recording: the graph gets memory of its own. What the warm-up has left is given back whenever anybody,
    torch.compile for one, clears it, and the graph would go on writing there. After it: no other call on the stream
    may work in the memory of the graph.

    torch can only clear the memory of all streams: a graph of the user's own that was recorded on the stream of its
    warm-up loses what it works in, as it does to torch.compile.
    """
    torch._C._cuda_clearCublasWorkspaces()
