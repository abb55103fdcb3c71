"""Program -> ONNX Runtime session. Guards against what the exporter and the runtime silently get wrong.

Can be imported without torch: a bundle needs only ONNX Runtime.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsopt.compiler.calls.signature import Signature
from tsopt.errors import BackendError, BundleError
from tsopt.runtime.backends.backend import Unsupported, to_install
from tsopt.runtime.calling.executable import Executable, Runner
from tsopt.runtime.calling.value_checks import from_options, guarded, to_options
from tsopt.runtime.onnx import int8_weights
from tsopt.runtime.onnx.onnx_model import FILE
from tsopt.runtime.racing.environment import is_installed
from tsopt.runtime.telemetry import without_telemetry

if TYPE_CHECKING:
    from tsopt.compiler.graph.program import Program
    from tsopt.runtime.onnx.integers.narrow_integers import Examined
    from tsopt.runtime.onnx.onnx_model import OnnxModel
    from tsopt.runtime.profiling.kernels import Timed

ON_CPU = ("CPUExecutionProvider",)
CANNOT_RUN = "ONNX Runtime failed to run this call"
SESSION = {"spinning": True, "parallel": False, "arena": True}  # options of a session, as they usually are
# Before 1.30, the kernel for a sum and its layer norm computes the variance as E[x^2] - E[x]^2: of numbers around 1000,
# nothing is left of it in float32.
UNSTABLE_FUSIONS, STABLE_SINCE = ("SkipLayerNormFusion",), (1, 30)
# Of its optimizers those that keep a number of float64 in an attribute, which is float32.
ROUNDING = ("MatMulScaleFusion", "LayerNormFusionL1", "LayerNormFusionL2", "SimplifiedLayerNormFusion")
FLOAT64 = "float64"  # option of a session whose model holds float64: it does without these
DTYPES = frozenset(
    {"float64", "float32", "float16", "bool"} | {f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)}
)
# ONNX has no op for these, and a formula of its ops is not stable: the translation of erfc is 1 - erf(x), and that of
# logcumsumexp subtracts the largest of all elements, so that those in front of a larger one become log(0).
UNSTABLE = frozenset({"erfc", "special_erfc", "special_erfcx", "special_log_ndtr", "logcumsumexp"})


@dataclass(frozen=True, slots=True)
class OnnxRuntimeBackend:
    """ONNX Runtime on the CPU, and on the model's GPU if the runtime is built for it.

    threads: intra-op threads; None uses torch's setting at compile time, so that both race with the same number.
    opset: ONNX opset; None uses the exporter's default.
    fused: use the runtime's own operators for attention, RMS norm and SiLU.
    spinning: let threads spin while they wait for work within a call, which takes cores from other processes.
    parallel: run independent parts of the graph concurrently.
    arena: keep memory from call to call.
    check_indices: check the indices of each call, whatever the cost; False does so if it takes less than 1 % of a call.
    cuda_graph: on a GPU, launch all kernels at once; None does so if ONNX Runtime runs every operator there.
    """

    threads: int | None = None
    opset: int | None = None
    fused: bool = True
    spinning: bool = True
    parallel: bool = False
    arena: bool = True
    check_indices: bool = False
    cuda_graph: bool | None = None
    name: str = "onnxruntime"

    def missing(self) -> str | None:
        return to_install("onnxruntime", "onnx", "onnxscript")

    def unsupported(self, program: Program) -> list[Unsupported]:
        import torch

        from tsopt.runtime.onnx.wrong_translations import of_onnx_runtime

        threads = self.threads or torch.get_num_threads()
        found = [*refusals(program, "ONNX Runtime", ("cpu", "cuda")), *of_onnx_runtime(program, threads)]
        found = found or list(self._examined(program).refused)
        if _is_on_gpu(program.signature):
            from tsopt.runtime.onnx.ort_cuda import available_providers, refusals_on_gpu

            found += refusals_on_gpu(program, available_providers())
        elif self.cuda_graph:
            found.append(Unsupported("", "the model is on the CPU; a CUDA graph needs it on a GPU"))
        return found

    def may_grow(self, program: Program, wider: Program) -> bool:
        return self._examined(program).is_enough_for(self._examined(wider))

    def _examined(self, program: Program) -> Examined:
        from tsopt.runtime.onnx.integers.engine_differences import ONNX_RUNTIME
        from tsopt.runtime.onnx.integers.narrow_integers import NEVER, examine

        # A GPU would have to be waited for: there indices are looked at only where that was asked for.
        threads = NEVER if _is_on_gpu(program.signature) else self.threads or 0
        return examine(program, ONNX_RUNTIME, self.check_indices, threads)

    def compile(self, program: Program) -> Executable:
        return self._executable(program, self._exported(program))

    def profile(self, program: Program, inputs: Sequence[Any]) -> Timed:
        from tsopt.runtime.profiling.ort import timed

        model = self._exported(program)
        with tempfile.TemporaryDirectory(prefix="tsopt-") as directory:
            place = Path(directory)
            model.save(place)
            held = open_session(str(place / FILE), self._options(program), profile=place)
            run = session_runner(held, program.signature)
            return timed(held.session, lambda: run(inputs), model, place)

    def _exported(self, program: Program) -> OnnxModel:
        from tsopt.compiler.graph.quantized_attention import with_float_scores
        from tsopt.compiler.sizes.generalize import NotGeneral, through
        from tsopt.runtime.onnx.export import four_axes, to_onnx
        from tsopt.runtime.onnx.infinities import POOLING, with_infinities
        from tsopt.runtime.onnx.ort_bfloat16 import widened
        from tsopt.runtime.onnx.ort_int8 import with_integer_products, with_products_in_four_bits
        from tsopt.runtime.onnx.ort_kernels import with_own_operators

        def standard(program: Program) -> Program:
            if _is_on_gpu(program.signature):
                return program
            return widened(with_float_scores(with_infinities(with_products_in_four_bits(program), POOLING)))

        def lowered(program: Program) -> Program:
            return with_own_operators(four_axes(with_integer_products(standard(program))))

        try:
            made = through(program, lowered if self.fused else standard)
        except NotGeneral:  # attributes of these operators are constants, and sizes are not
            made = through(program, standard)
        return to_onnx(made, self.opset)

    def _options(self, program: Program) -> dict[str, Any]:
        """The options of a session."""
        import torch

        from tsopt.runtime.onnx.doubles import holds_float64

        own = {key: getattr(self, key) for key, usual in SESSION.items() if getattr(self, key) != usual}
        own |= {FLOAT64: True} if holds_float64(program) else {}
        return {"threads": self.threads or torch.get_num_threads(), **own, **int8_weights.to_options(program)}

    def reopen(self, program: Program, directory: Path) -> Executable:
        from tsopt.runtime.onnx.onnx_model import OnnxModel

        return self._executable(program, OnnxModel.read(directory / FILE, program))

    def _executable(self, program: Program, model: OnnxModel) -> Executable:
        from tsopt.runtime.onnx.int8_inputs import float_bounds, without_rounding

        options = self._options(program)
        int8_weights.check(options)
        stored, weights = model.detached()
        run, own = _opened(stored, options, program.signature, weights, self.cuda_graph, model.op_types)
        examined = self._examined(program)
        bounds = (*examined.bounds, *float_bounds(program))
        options |= own | to_options(bounds)

        return Executable(
            self.name,
            program.signature,
            guarded(run, bounds, program.signature, lambda: without_rounding(program)),
            state=[program.state[item.name] for item in program.signature.state_inputs],
            save=model.save,
            options=options,
            notes=[*examined.notes, *(["recorded as a CUDA graph"] if own.get("cuda_graph") else [])],
        )

    @staticmethod
    def load_runner(directory: Path, signature: Signature, options: Mapping[str, Any]) -> Runner:
        return load_session(directory / FILE, signature, options)


def refusals(program: Program, runtime: str, devices: Sequence[str] = ("cpu",)) -> list[Unsupported]:
    """What a runtime of ONNX models on these kinds of devices cannot take as it is."""
    from tsopt.compiler.analysis.integer_sums import length_of_unsafe_sum
    from tsopt.compiler.analysis.ranged_call import base_name
    from tsopt.compiler.graph import ops
    from tsopt.compiler.graph.control import all_calls
    from tsopt.compiler.graph.edit import without_idle_draws
    from tsopt.compiler.graph.origin import origin_of
    from tsopt.runtime.onnx.wrong_translations import of_the_exporter

    found = of_the_exporter(program)
    ends = [(item.name, item.type) for item in program.signature.inputs]
    ends += [(item.name, item.type) for item in program.signature.outputs]
    for name, kind in ends:
        if kind.dtype not in DTYPES:
            found.append(Unsupported(name, f"{runtime} does not support inputs and outputs of {kind.dtype}"))
        if kind.device.partition(":")[0] not in devices:
            where = {"cpu": "the CPU", "cuda": "a GPU"}
            places = " or ".join(where[device] for device in devices)
            found.append(Unsupported(name, f"the model is on {kind.device}, but this backend runs on {places}"))
    for node in all_calls(without_idle_draws(program)):
        if length := length_of_unsafe_sum(program, node):
            why = f"{runtime} adds up {length:,} products of 8-bit integers in 32 bits, which might not hold the sum"
            found.append(Unsupported(origin_of(node), why))
        if base_name(node) in UNSTABLE:
            why = f"the ONNX translation of {ops.name_of(node)} overflows or loses digits where PyTorch does not"
            found.append(Unsupported(origin_of(node), why))
        elif base_name(node) == "cross_entropy_loss" and ops.bind(node)["label_smoothing"]:
            found.append(Unsupported(origin_of(node), "the ONNX exporter leaves out label_smoothing"))
        elif ops.draws(node):
            found.append(
                Unsupported(origin_of(node), f"{ops.name_of(node)} would use a different random number generator")
            )
        elif ops.has_effect(node) and not ops.is_settled_check(node):
            found.append(Unsupported(origin_of(node), f"the check {ops.name_of(node)} would be dropped"))
        elif ops.may_trap(node):
            found.append(
                Unsupported(origin_of(node), f"integer division by a computed value can crash the process in {runtime}")
            )
    return found


def _opened(
    model: bytes | str,
    options: Mapping[str, Any],
    signature: Signature,
    weights: Mapping[str, Any] | None = None,
    cuda_graph: bool | None = None,
    op_types: Mapping[str, int] | None = None,
) -> tuple[Runner, dict[str, bool]]:
    """The runner of a model where its inputs and outputs are, and the options that say how it runs there."""
    if not _is_on_gpu(signature):
        return session_runner(open_session(model, options, weights), signature), {}
    if tensor_maker() is None:
        raise BackendError("PyTorch is required to call a model on a GPU", fix="pip install torch")
    from tsopt.runtime.onnx.ort_cuda import runner_on_gpu

    def opened(providers: Sequence[Any], entries: Mapping[str, str]) -> _Session:
        session = open_session(model, options, weights, providers, entries=entries)
        _check_ends(session.session, signature)
        return session

    run, recorded = runner_on_gpu(opened, signature, cuda_graph, op_types)
    return run, {"cuda_graph": recorded}


def _is_on_gpu(signature: Signature) -> bool:
    return any(device.startswith("cuda") for _, device in signature.devices)


def open_session(
    model: bytes | str,
    options: Mapping[str, Any],
    weights: Mapping[str, Any] | None = None,
    providers: Sequence[Any] = ON_CPU,
    profile: Path | None = None,
    entries: Mapping[str, str] | None = None,
) -> _Session:
    """A session with all graph optimizations.

    Args:
        options: `threads`, FLOAT64, and those of SESSION that are not as usual.
        weights: arrays for the model's external initializers, handed over without a copy.
        providers: execution providers, each a name or a name with options; the first is asked first.
        profile: turns its profiler on, for files in this directory.
        entries: further entries of its configuration.

    Raises:
        BackendError: the runtime refuses the model, or cannot start the first provider.
    """
    with without_telemetry():
        import numpy as np
        import onnxruntime as ort

    wanted = ort.SessionOptions()
    wanted.log_severity_level = 4
    threads = options.get("threads")
    if isinstance(threads, int):
        wanted.intra_op_num_threads = threads
    chosen = SESSION | {key: bool(options[key]) for key in SESSION if key in options}
    wanted.add_session_config_entry("session.intra_op.allow_spinning", str(int(chosen["spinning"])))
    # Only within a call: after it, torch's threads and those of others need the cores.
    wanted.add_session_config_entry("session.force_spinning_stop", "1")
    if int8_weights.GROUP not in options:
        # By default, it would round the inputs of products with integer constants, which are the user's own here:
        # a model that has some has none of ours.
        wanted.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    for key, value in (entries or {}).items():
        wanted.add_session_config_entry(key, value)
    wanted.enable_cpu_mem_arena = chosen["arena"]
    if profile is not None:
        from tsopt.runtime.profiling.ort import configure

        configure(wanted, profile)
    if chosen["parallel"]:
        wanted.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    # NOTE: ONNX Runtime reads this memory for as long as the session lives, and copies what is not contiguous.
    arrays = {name: np.ascontiguousarray(array) for name, array in (weights or {}).items()}
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}
    if values:
        wanted.add_external_initializers(list(values), list(values.values()))
    first = providers[0] if isinstance(providers[0], str) else providers[0][0]
    if first not in ort.get_available_providers():
        raise BackendError(
            f"this build of ONNX Runtime has no {first}",
            fix="pip uninstall onnxruntime, then pip install onnxruntime-gpu",
        )
    try:
        is_stable = _version(ort.__version__) >= STABLE_SINCE
        without = [*(() if is_stable else UNSTABLE_FUSIONS), *(ROUNDING if options.get(FLOAT64) else ())]
        more = {"disabled_optimizers": without} if without else {}
        session = ort.InferenceSession(model, wanted, providers=list(providers), **more)
    except Exception as error:  # onnxruntime raises a class for each status code, all of them its own
        raise _failed("ONNX Runtime rejects the exported model", error) from error
    if first not in session.get_providers():  # it goes on with the next one, and says so in a log alone
        raise BackendError(
            f"ONNX Runtime failed to start {first}",
            why="a library that the execution provider needs is missing",
            fix="install the CUDA and cuDNN versions that this onnxruntime-gpu requires",
        )
    return _Session(session, arrays)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def _failed(what: str, error: Exception) -> BackendError:
    return BackendError(what, why=f"{type(error).__name__}: {str(error)[:300]}")


@dataclass(frozen=True, slots=True)
class _Session:
    """A session and the memory that it reads its weights from."""

    session: Any
    weights: dict[str, Any]


def session_runner(held: Any, signature: Signature) -> Runner:
    """Flat tensors in and out of a session through shared memory; numpy arrays where torch is not installed."""
    session = held.session
    inputs, outputs = _check_ends(session, signature)
    # The session under the Python class: `session.run` checks names that are known to fit, which costs a
    # microsecond a call. Both take (outputs, feed, options); the class is used where there is nothing under it.
    run: Callable[..., Sequence[Any]] = getattr(session, "_sess", session).run
    from_numpy = tensor_maker()
    only = inputs[0] if len(inputs) == 1 else None

    # NOTE: `held` is a default of each, because the session's weights live only as long as it does.
    # Each has its own `try`, which costs nothing; another function around `run` would cost each call.
    def arrays(values: Sequence[Any], held: Any = held) -> Sequence[Any]:
        try:
            return run(outputs, dict(zip(inputs, values, strict=True)), None)
        except Exception as error:
            raise _failed(CANNOT_RUN, error) from error

    if from_numpy is None:
        return arrays

    def tensors(values: Sequence[Any], held: Any = held) -> Sequence[Any]:
        feed = {name: value.numpy(force=True) for name, value in zip(inputs, values, strict=True)}
        try:
            return [from_numpy(value) for value in run(outputs, feed, None)]
        except Exception as error:
            raise _failed(CANNOT_RUN, error) from error

    def tensor(values: Sequence[Any], held: Any = held) -> Sequence[Any]:
        try:
            return (from_numpy(run(outputs, {only: values[0].numpy(force=True)}, None)[0]),)
        except Exception as error:
            raise _failed(CANNOT_RUN, error) from error

    return tensor if len(inputs) == len(outputs) == 1 else tensors


def _check_ends(session: Any, signature: Signature) -> tuple[list[str], list[str]]:
    """The names of the inputs and outputs of a session; raises BundleError if there are others than expected."""
    inputs = [item.name for item in session.get_inputs()]
    outputs = [item.name for item in session.get_outputs()]
    if len(inputs) != len(signature.inputs) or len(outputs) != len(signature.outputs):
        raise BundleError("the ONNX model does not match its signature", why=f"inputs {inputs}, outputs {outputs}")
    return inputs, outputs


def tensor_maker() -> Callable[[Any], Any] | None:
    """What makes a tensor over an array's memory; None where torch is not installed, and arrays are all there is."""
    if not is_installed("torch"):
        return None
    import torch

    return torch.from_numpy


def load_session(path: Path, signature: Signature, options: Mapping[str, Any]) -> Runner:
    """The runner of a stored model."""
    int8_weights.check(options)
    # Another driver may not be able to record what could be recorded where the bundle was written.
    run, _ = _opened(str(path), options, signature, cuda_graph=None if options.get("cuda_graph") else False)
    return guarded(run, from_options(options, signature), signature)
