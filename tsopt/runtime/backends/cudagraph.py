"""Runs the Program as one CUDA graph: its kernels are captured once and replayed with one call.

A graph reads and writes the memory that it was captured with, so inputs are copied in and outputs are copied out, one
call at a time. It removes the launch overhead between kernels, which dominates at small batch sizes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import cuda

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.origin import origin_of
from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.serialize import write_program
from tsopt.compiler.precision_names import FP32
from tsopt.errors import BackendError
from tsopt.runtime.backends.backend import Unsupported, check_precision
from tsopt.runtime.backends.eager import torch_runner
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.checking.inputs import blank

WARM_UP = 3  # calls before the recording: libraries choose kernels and allocate in them, which no graph may hold


def missing_gpu() -> str | None:
    return None if cuda.is_available() else "needs a GPU and a torch build with CUDA"


@dataclass(frozen=True, slots=True)
class CudaGraphBackend:
    """torch's own kernels for the GPU, recorded.

    precision: of products: `fp32` as the program has them, and as torch is set for TensorFloat-32 when it is compiled;
        `tf32`, `bf16`, `fp16`.
    """

    precision: str = FP32
    name: str = "cudagraph"

    def __post_init__(self) -> None:
        check_precision(self.name, self.precision)

    def missing(self) -> str | None:
        return missing_gpu()

    def unsupported(self, program: Program) -> list[Unsupported]:
        return unrecordable(program)

    def compile(self, program: Program) -> Executable:
        try:
            with _tensor_float() if self.precision == "tf32" else nullcontext():
                recorded = Recorded(program.module().forward, blank(program.signature))
        except RuntimeError as error:  # kernels that wait for the CPU, memory that is not there
            raise BackendError("the model cannot be captured as a CUDA graph", why=str(error)[:200]) from error

        def save(directory: Path) -> None:
            write_program(program, directory)  # it is recorded again on load

        return Executable(
            self.name,
            program.signature,
            torch_runner(recorded, program.signature, None),
            state=[program.state[item.name] for item in program.signature.state_inputs],
            save=save,
            precision=self.precision,
        )


def unrecordable(program: Program) -> list[Unsupported]:
    """The reasons why a program cannot be captured as a CUDA graph."""
    found = [
        Unsupported(name, f"the model is on {device}; a CUDA graph needs it on a GPU")
        for name, device in program.signature.devices
        if not device.startswith("cuda")
    ]
    if program.signature.dims:
        found.append(Unsupported("", "a CUDA graph has fixed sizes"))
    for node in program.calls():
        on = {tensor.device.type for tensor in ops.tensors_of(node.meta.get("val"))}
        if ops.blocks_of(node):
            found.append(Unsupported(origin_of(node), f"{ops.name_of(node)} has data-dependent control flow"))
        elif ops.is_random(node):
            found.append(
                Unsupported(origin_of(node), f"{ops.name_of(node)} would not draw the same random numbers as eager")
            )
        elif ops.has_effect(node) and not ops.is_settled_check(node):
            found.append(Unsupported(origin_of(node), f"the check {ops.name_of(node)} cannot be captured"))
        elif on - {"cuda"}:
            found.append(Unsupported(origin_of(node), f"{ops.name_of(node)} runs on the CPU"))
    return found


@contextmanager
def _tensor_float() -> Iterator[None]:
    """Kernels that are chosen inside may round the factors of float32 products to 10 bits of mantissa."""
    flags: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [flag.allow_tf32 for flag in flags]
    try:
        for flag in flags:
            flag.allow_tf32 = True
        yield
    finally:
        for flag, value in zip(flags, before, strict=True):
            flag.allow_tf32 = value


class Recorded:
    """A function of tensors, recorded on inputs that it keeps. It runs on the stream of its caller."""

    def __init__(self, forward: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> None:
        self.forward = forward  # holds the weights, of which the graph has the addresses only
        self.inputs = list(inputs)
        self.device = inputs[0].device if inputs else None
        self.lock = threading.Lock()
        self.graph: Any = cuda.CUDAGraph()
        stream: Any = cuda.Stream(self.device)
        with torch.no_grad(), cuda.device(self.device):
            stream.wait_stream(cuda.current_stream())
            with cuda.stream(stream):
                for _ in range(WARM_UP):
                    forward(*inputs)
            _clear_workspaces()
            with cuda.graph(self.graph, stream=stream):
                self.outputs = list(forward(*inputs))
            _clear_workspaces()
        self.last_stream, self.end_of_last = stream, cuda.Event()
        self.end_of_last.record(stream)

    def __call__(self, *values: torch.Tensor) -> list[torch.Tensor]:
        """What the function returns for these tensors, in memory of its own."""
        stream = cuda.current_stream(self.device)
        with self.lock, cuda.device(self.device):
            if stream != self.last_stream:  # calls on one stream follow each other by themselves
                stream.wait_event(self.end_of_last)
                self.last_stream = stream
            if self.inputs:
                torch._foreach_copy_(self.inputs, values)
            self.graph.replay()
            found = [value.clone() for value in self.outputs]
            self.end_of_last.record(stream)
        return found


def _clear_workspaces() -> None:
    """Makes torch forget the memory that cuBLAS works in, which it keeps for each stream.

    Before a recording: the graph gets memory of its own. What the warm-up has left is given back whenever anybody,
    torch.compile for one, clears it, and the graph would go on writing there. After it: no other call on the stream
    may work in the memory of the graph.
    """
    torch._C._cuda_clearCublasWorkspaces()
