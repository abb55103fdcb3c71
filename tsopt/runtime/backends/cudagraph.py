"""Runs the Program as one CUDA graph: its kernels are captured once and replayed with one call."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from torch import cuda

from tsopt.compiler.calls.example import Example
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.edit import without_idle_draws
from tsopt.compiler.graph.origin import origin_of
from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.serialize import write_program
from tsopt.compiler.precision_names import FP32
from tsopt.errors import BackendError
from tsopt.runtime import tensor_float
from tsopt.runtime.backends.backend import Unsupported, check_precision
from tsopt.runtime.backends.eager import torch_runner
from tsopt.runtime.backends.gpu_variants import NOTES, TOGETHER, Variant, applicable, combinations, function_of
from tsopt.runtime.backends.recorded import Recorded
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.checking.inputs import blank
from tsopt.runtime.racing.timing import seconds_of_calls

REPLAYS, SAMPLES = 10, 3  # to tell which of two variants is the faster one
WORTH_IT = 1.03  # times faster: the other one is taken


def missing_gpu() -> str | None:
    return None if cuda.is_available() else "needs a GPU and a torch build with CUDA"


@dataclass(frozen=True, slots=True)
class CudaGraphBackend:
    """torch's own kernels for the GPU, recorded.

    precision: `fp32` computes products as the program has them, and as torch is set for TensorFloat-32 when it is
        compiled; `tf32` in TensorFloat-32.
    channels_last, fused, transposed, separate_bias: as in `Variant`; None records both and takes the faster one.
    """

    precision: str = FP32
    channels_last: bool | None = None
    fused: bool | None = None
    transposed: bool | None = None
    separate_bias: bool | None = None
    name: str = "cudagraph"

    def __post_init__(self) -> None:
        check_precision(self.name, self.precision)

    def missing(self) -> str | None:
        return missing_gpu()

    def unsupported(self, program: Program) -> list[Unsupported]:
        return unrecordable(program)

    def compile(self, program: Program) -> Executable:
        program = without_idle_draws(program)
        recorded, variant = self._recorded(program)

        def save(directory: Path) -> None:
            write_program(program, directory)  # it is recorded again on load

        return Executable(
            self.name,
            program.signature,
            torch_runner(recorded, program.signature, None),
            state=[program.state[item.name] for item in program.signature.state_inputs],
            save=save,
            options={"precision": self.precision, **asdict(variant)},
            notes=[note for key, note in NOTES.items() if getattr(variant, key)],
            precision=self.precision,
        )

    def _recorded(self, program: Program) -> tuple[Recorded, Variant]:
        """The program in the fastest variant that can be recorded."""
        applies = applicable(program)
        best = Variant(**{key: applies[key] and bool(getattr(self, key)) for key in applies})
        with tensor_float.turned_on() if self.precision == "tf32" else nullcontext():
            found, failure = _attempt(program, best)
            for group in TOGETHER:
                free = [key for key in group if applies[key] and getattr(self, key) is None]
                for variant in combinations(best, free):
                    made, why = _attempt(program, variant)
                    failure = failure or why
                    if made and (not found or _seconds(found) > _seconds(made) * WORTH_IT):
                        found, best = made, variant
        if not found:
            raise BackendError("the model cannot be captured as a CUDA graph", why=failure)
        return found, best


def _attempt(program: Program, variant: Variant) -> tuple[Recorded | None, str]:
    """The program as it was recorded in a variant, or why that failed."""
    try:
        return Recorded(function_of(program, variant), blank(program.signature)), ""
    except RuntimeError as error:  # kernels that wait for the CPU, memory that is not there, views
        return None, str(error)[:200]  # not the error: its traceback keeps tensors alive


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
    for node in without_idle_draws(program).calls():
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
