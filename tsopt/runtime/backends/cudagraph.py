"""Runs the Program as one CUDA graph: its kernels are captured once and replayed with one call.

A graph reads and writes the memory that it was captured with, so inputs are copied in and outputs are copied out, one
call at a time. It removes the launch overhead between kernels, which dominates at small batch sizes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import cuda, fx

from tsopt.compiler.calls.example import Example
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.origin import origin_of
from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.serialize import write_program
from tsopt.compiler.precision_names import FP32
from tsopt.errors import BackendError
from tsopt.runtime import tensor_float
from tsopt.runtime.backends.backend import Unsupported, check_precision
from tsopt.runtime.backends.eager import laid_out, torch_runner
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.checking.inputs import blank
from tsopt.runtime.racing.timing import seconds_of_calls

WARM_UP = 3  # calls before the recording: libraries choose kernels and allocate in them, which no graph may hold
REPLAYS, SAMPLES = 10, 3  # to tell which of two layouts is the faster one
WORTH_IT = 1.03  # times faster: the other layout is taken
CONVOLUTIONS = (aten.conv2d.default, aten.conv2d.padding, aten.conv_transpose2d.input, aten.convolution.default)


def missing_gpu() -> str | None:
    return None if cuda.is_available() else "needs a GPU and a torch build with CUDA"


@dataclass(frozen=True, slots=True)
class CudaGraphBackend:
    """torch's own kernels for the GPU, recorded.

    precision: `fp32` computes products as the program has them, and as torch is set for TensorFloat-32 when it is
        compiled; `tf32` in TensorFloat-32.
    channels_last: whether convolutions run in the memory format channels_last (NHWC), as the kernels of cuDNN for
        tensor cores do; None compiles both and takes the faster one.
    """

    precision: str = FP32
    channels_last: bool | None = None
    name: str = "cudagraph"

    def __post_init__(self) -> None:
        check_precision(self.name, self.precision)

    def missing(self) -> str | None:
        return missing_gpu()

    def unsupported(self, program: Program) -> list[Unsupported]:
        return unrecordable(program)

    def compile(self, program: Program) -> Executable:
        recorded, channels_last = self._recorded(program)

        def save(directory: Path) -> None:
            write_program(program, directory)  # it is recorded again on load

        return Executable(
            self.name,
            program.signature,
            torch_runner(recorded, program.signature, None),
            state=[program.state[item.name] for item in program.signature.state_inputs],
            save=save,
            options={"precision": self.precision, "channels_last": channels_last},
            notes=["convolutions in channels_last"] if channels_last else [],
            precision=self.precision,
        )

    def _recorded(self, program: Program) -> tuple[Recorded, bool]:
        """The program in the faster memory format that can be recorded, and whether that is channels_last."""
        asked: Sequence[bool] = (False, True) if self.channels_last is None else (self.channels_last,)
        layouts = asked if _has_images(program) else (False,)
        found: dict[bool, Recorded] = {}
        failure = ""
        with tensor_float.turned_on() if self.precision == "tf32" else nullcontext():
            for layout in layouts:
                forward = _in_channels_last(program) if layout else program.module().forward
                try:
                    found[layout] = Recorded(forward, blank(program.signature))
                except RuntimeError as error:  # kernels that wait for the CPU, memory that is not there, views
                    failure = failure or str(error)[:200]  # not the error: its traceback keeps tensors alive
        if not found:
            raise BackendError("the model cannot be captured as a CUDA graph", why=failure)
        if len(found) == 1:
            ((layout, recorded),) = found.items()
            return recorded, layout
        seconds = {layout: _seconds(recorded) for layout, recorded in found.items()}
        layout = seconds[True] * WORTH_IT < seconds[False]
        return found[layout], layout


def _has_images(program: Program) -> bool:
    """Whether there is a convolution whose memory format is free."""
    calls = list(program.calls())
    return any(map(_is_of_images, calls)) and not any(node.target in ops.BY_STRIDES for node in calls)


def _is_of_images(node: fx.Node) -> bool:
    if node.target not in CONVOLUTIONS:
        return False
    weight = ops.bind(node)["weight"]
    return weight.op == "get_attr" and weight.meta["val"].dim() == 4


def _in_channels_last(program: Program) -> Callable[..., Sequence[torch.Tensor]]:
    """The program on weights of convolutions in channels_last, which activations follow."""
    made = program.copy()
    made.weights = dict(program.weights)
    for node in filter(_is_of_images, program.calls()):
        name = str(ops.bind(node)["weight"].target)
        made.weights[name] = program.weights[name].detach().contiguous(memory_format=torch.channels_last)
    forward = made.module().forward
    strides = [None if item.type.contiguous else item.type.stride for item in program.signature.outputs]

    def run(*values: torch.Tensor) -> list[torch.Tensor]:
        return [laid_out(value, stride) for value, stride in zip(forward(*values), strides, strict=True)]

    return run


def _seconds(recorded: Recorded) -> float:
    """About how long a call takes."""
    wait = partial(cuda.synchronize, recorded.device)
    calls = [Example(tuple(recorded.inputs))]
    return min(seconds_of_calls(recorded, calls, REPLAYS, untimed=REPLAYS, samples=SAMPLES, wait=wait)) / REPLAYS


def unrecordable(program: Program) -> list[Unsupported]:
    """The reasons why a program cannot be captured as a CUDA graph."""
    found = [
        Unsupported(name, f"the model is on {device}; a CUDA graph needs it on a GPU")
        for name, device in program.signature.devices
        if not device.startswith("cuda")
    ]
    places = sorted({device for _, device in program.signature.devices})
    if not found and len(places) > 1:
        found.append(Unsupported("", f"the model is on several devices: {' and '.join(places)}"))
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


class Recorded:
    """A function of tensors, recorded on inputs that it keeps. It runs on the stream of its caller."""

    @torch.inference_mode(False)  # what is made in it could not be written to in calls outside of it
    def __init__(self, forward: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> None:
        self.forward = forward  # holds the weights, of which the graph has the addresses only
        self.inputs = [value.clone() if value.is_inference() else value for value in inputs]
        self.device = inputs[0].device if inputs else None
        self.lock = threading.Lock()
        self.graph: Any = cuda.CUDAGraph()
        stream: Any = cuda.Stream(self.device)
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
