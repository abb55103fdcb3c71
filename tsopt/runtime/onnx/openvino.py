"""Program -> ONNX -> OpenVINO, a runtime for CPUs. Needs the package `openvino`.

Can be imported without torch: a bundle needs only OpenVINO.
"""

from __future__ import annotations

import functools
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsopt.compiler import forks
from tsopt.compiler.calls.signature import Signature
from tsopt.compiler.precision_names import FP32
from tsopt.errors import BackendError, BundleError, UsageError
from tsopt.runtime.backends.backend import Unsupported, check_precision, to_install
from tsopt.runtime.calling.executable import Executable, Runner
from tsopt.runtime.calling.value_checks import from_options, guarded, to_options
from tsopt.runtime.onnx import int8_weights
from tsopt.runtime.onnx.onnx_model import FILE
from tsopt.runtime.onnx.openvino_quotients import keep_divisions
from tsopt.runtime.onnx.ort import refusals, tensor_maker
from tsopt.runtime.telemetry import without_telemetry

if TYPE_CHECKING:
    from tsopt.compiler.graph.program import Program
    from tsopt.runtime.onnx.integers.narrow_integers import Examined
    from tsopt.runtime.onnx.onnx_model import OnnxModel
    from tsopt.runtime.profiling.kernels import Timed

HINTS = ("latency", "throughput")
OTHER_OPS = (FP32, "bf16")
PRECISION_HINTS = {FP32: "f32", "bf16": "bf16", "fp16": "f16"}


@dataclass(frozen=True, slots=True)
class OpenVinoBackend:
    """OpenVINO on the CPU.

    threads: inference threads; None uses torch's setting at compile time, so that both race with the same number.
    hint: `latency` or `throughput`.
    pinning: bind each thread to a core, always the first ones: several processes that do so share these, and leave the
        others idle.
    other_ops: of an int8 program, the precision of the ops that are not in int8: `fp32` or `bf16`.
    precision: `fp32` (by default OpenVINO would use bfloat16 if the CPU supports it), `bf16` or `fp16`.
    check_indices: check the indices of each call: OpenVINO reads whatever memory is there for one that is out of range.
        False does so only if it takes less than 1 % of a call.
    """

    threads: int | None = None
    hint: str = "latency"
    pinning: bool = False
    precision: str = FP32
    other_ops: str = FP32
    check_indices: bool = True
    name: str = "openvino"

    def __post_init__(self) -> None:
        check_precision(self.name, self.precision)
        if self.hint not in HINTS:
            raise UsageError(f"unknown hint {self.hint!r} of openvino", fix=f"use one of: {', '.join(HINTS)}")
        if self.other_ops not in OTHER_OPS:
            raise UsageError(f"openvino does not support other_ops {self.other_ops!r}", fix="use fp32 or bf16")

    def missing(self) -> str | None:
        return to_install("openvino", "onnx", "onnxscript")

    def unsupported(self, program: Program) -> list[Unsupported]:
        from tsopt.runtime.onnx.wrong_translations import of_openvino

        found = [*refusals(program, "OpenVINO"), *of_openvino(program)]
        return found or [*self._examined(program).refused, *_imprecise(program)]

    def may_grow(self, program: Program, wider: Program) -> bool:
        return self._examined(program).is_enough_for(self._examined(wider))

    def _examined(self, program: Program) -> Examined:
        from tsopt.runtime.onnx.integers.engine_differences import OPENVINO
        from tsopt.runtime.onnx.integers.narrow_integers import examine

        return examine(program, OPENVINO, self.check_indices, self.threads or 0)

    def compile(self, program: Program) -> Executable:
        model = self._exported(program)
        with tempfile.TemporaryDirectory(prefix="tsopt-") as directory:
            model.save(Path(directory))
            return self._executable(program, model, Path(directory))

    def profile(self, program: Program, inputs: Sequence[Any]) -> Timed:
        from tsopt.runtime.profiling.openvino import COUNTERS, timed

        model = self._exported(program)
        with tempfile.TemporaryDirectory(prefix="tsopt-") as directory:
            model.save(Path(directory))
            compiled = compiled_model(Path(directory), self._options(program), COUNTERS)
        return timed(compiled, inputs, model)

    def reopen(self, program: Program, directory: Path) -> Executable:
        from tsopt.runtime.onnx.onnx_model import OnnxModel

        # Not with the weights of the program: OpenVINO maps those of the file, and both would be held.
        return self._executable(program, OnnxModel.read(directory / FILE), directory)

    def _exported(self, program: Program) -> OnnxModel:
        from tsopt.compiler.sizes.generalize import through
        from tsopt.runtime.onnx.export import to_onnx
        from tsopt.runtime.onnx.infinities import POOLING, REDUCTIONS, with_infinities
        from tsopt.runtime.onnx.openvino_int8 import with_fused_activations, with_kept_axes, with_layers_apart
        from tsopt.runtime.onnx.openvino_rounding import with_exact_halves
        from tsopt.runtime.onnx.openvino_sums import with_sums_apart
        from tsopt.runtime.onnx.ort_int8 import with_products_in_four_bits

        def lowered(program: Program) -> Program:
            made = with_sums_apart(with_exact_halves(program))
            made = with_layers_apart(with_kept_axes(with_fused_activations(made)))
            return with_products_in_four_bits(with_infinities(made, {**POOLING, **REDUCTIONS}))

        return to_onnx(through(program, lowered))

    def _options(self, program: Program) -> dict[str, Any]:
        """The options that a bundle keeps."""
        import torch

        options: dict[str, Any] = {"threads": self.threads or torch.get_num_threads()}
        options |= {"hint": self.hint, "precision": self.precision}
        options |= int8_weights.to_options(program)
        if self.pinning:
            options["pinning"] = True
        if self.other_ops != FP32:
            if int8_weights.OPTION not in options:
                raise UsageError(
                    f"other_ops={self.other_ops} needs a program in int8", fix="add precision=int8-weights"
                )
            options["other_ops"] = self.other_ops
        return options

    def _executable(self, program: Program, model: OnnxModel, directory: Path) -> Executable:
        """Args: directory: holds the model as a file, and may go afterwards."""
        from tsopt.runtime.onnx.int8_inputs import float_bounds, without_rounding

        options = self._options(program)

        runner = load_runner(directory, program.signature, options)
        examined = self._examined(program)
        bounds = (*examined.bounds, *float_bounds(program))
        state = [program.state[item.name] for item in program.signature.state_inputs]
        return Executable(
            self.name,
            program.signature,
            guarded(runner, bounds, program.signature, lambda: without_rounding(program)),
            state=state,
            save=model.save,
            options=options | to_options(bounds),
            notes=examined.notes,
            precision=self.precision,
        )

    @staticmethod
    def load_runner(directory: Path, signature: Signature, options: Mapping[str, Any]) -> Runner:
        return load_runner(directory, signature, options)


def _imprecise(program: Program) -> list[Unsupported]:
    from tsopt.compiler.graph import ops
    from tsopt.compiler.graph.origin import origin_of
    from tsopt.runtime.onnx.nearest import imprecise

    why = "OpenVINO multiplies by a reciprocal where {} divides sizes, and reads other elements at some sizes"
    return [Unsupported(origin_of(node), why.format(ops.name_of(node))) for node in imprecise(program)]


def load_runner(directory: Path, signature: Signature, options: Mapping[str, Any]) -> Runner:
    """Compiles a stored model for this machine.

    Raises:
        BackendError: OpenVINO refuses it.
        BundleError: it is not the model of this signature.
    """
    compiled = compiled_model(directory, options)
    return guarded(_runner(compiled, signature), from_options(options, signature), signature)


def compiled_model(directory: Path, options: Mapping[str, Any], more: Mapping[str, str] | None = None) -> Any:
    """OpenVINO's own compiled model of a stored one.

    Args:
        more: configuration.

    Raises:
        BackendError: OpenVINO refuses it.
    """
    int8_weights.check(options)
    config: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": PRECISION_HINTS[options.get("other_ops", options.get("precision", FP32))],
        "PERFORMANCE_HINT": str(options["hint"]).upper(),
        "ENABLE_CPU_PINNING": bool(options.get("pinning")),
        # By default, it would round the inputs of every product with an int8 constant, those of a user's own as well.
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(options.get(int8_weights.GROUP, 0)),
    }
    if options.get("threads"):
        config["INFERENCE_NUM_THREADS"] = options["threads"]
    config |= more or {}
    with _MAKING.held():
        core = _core()
    try:
        model = core.read_model(str(directory / FILE))
        keep_divisions(model, rounding=int8_weights.OPTION not in options)
        return core.compile_model(model, "CPU", config)
    except Exception as error:  # openvino raises RuntimeError for whatever its C++ throws
        raise _failed("OpenVINO rejects the exported model", error) from error


_MAKING = forks.Lock()


@functools.cache
def _core() -> Any:
    """OpenVINO's Core, one for the whole life of the process.

    NOTE: when a Core is created, it replaces the stack for signal handlers, and when it is destroyed, it restores the
    previous one, which may be that of a Core already destroyed. The next signal, such as Ctrl-C, then ends the process
    with a segmentation fault (OpenVINO 2026.4).
    """
    with without_telemetry():
        import openvino

    return openvino.Core()


def _failed(what: str, error: Exception) -> BackendError:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return BackendError(what, why=lines[-1][:200] if lines else "")


def _runner(compiled: Any, signature: Signature) -> Runner:
    """Flat values in and out. A request serves one call at a time, so each thread has its own."""
    if len(compiled.inputs) != len(signature.inputs) or len(compiled.outputs) != len(signature.outputs):
        raise BundleError("the ONNX model does not match its signature")
    import numpy as np

    own = threading.local()
    count = len(signature.outputs)
    from_numpy = tensor_maker()

    def run(values: Sequence[Any]) -> Sequence[Any]:
        request = getattr(own, "request", None)
        if request is None:
            request = own.request = compiled.create_infer_request()
        arrays = values if from_numpy is None else [value.numpy(force=True) for value in values]
        # NOTE: the request reads dense inputs where they are, and answers in memory of its own, which the next call
        # writes again: so outputs are copied.
        try:
            request.infer({i: np.asarray(array, order="C") for i, array in enumerate(arrays)}, share_inputs=True)
        except Exception as error:
            raise _failed("OpenVINO failed to run this call", error) from error
        found = [request.get_output_tensor(i).data.copy() for i in range(count)]
        return found if from_numpy is None else [from_numpy(value) for value in found]

    return run
