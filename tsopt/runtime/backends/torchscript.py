"""Program -> TorchScript: traced, or scripted if it computes with sizes; frozen and optimized for inference.

TorchScript is deprecated upstream; it is confined to this file, and its warnings are suppressed.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tsopt.compiler.calls.signature import Signature
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.edit import without_idle_draws
from tsopt.compiler.graph.origin import origin_of
from tsopt.compiler.graph.program import Program, attribute_name
from tsopt.errors import BackendError, BundleError
from tsopt.runtime.backends.backend import Unsupported
from tsopt.runtime.backends.eager import by_torch, torch_runner
from tsopt.runtime.backends.layer_sites import LOSES_NAN
from tsopt.runtime.backends.torchscript_source import source_of
from tsopt.runtime.calling.executable import Executable, Runner
from tsopt.runtime.checking.inputs import blank

log = logging.getLogger("tsopt")
FILE = "model.ts"
LAYER_AND_RELU = {torch.ops.aten.conv2d.default, torch.ops.aten.relu.default}  # what it hands to oneDNN as one


@dataclass(frozen=True, slots=True)
class TorchScriptBackend:
    """threads: intra-op threads during a call; None leaves torch's own setting."""

    threads: int | None = None
    name: str = "torchscript"

    def missing(self) -> str | None:
        return None if hasattr(torch.jit, "trace") else "this version of torch has no TorchScript"

    def unsupported(self, program: Program) -> list[Unsupported]:
        flow = [node for node in program.calls() if ops.blocks_of(node)]
        found = [
            Unsupported(origin_of(node), f"a trace records only one branch of {ops.name_of(node)}") for node in flow
        ]
        why = "TorchScript takes a constant without axes for a Python number, and makes float32 of {} beside integers"
        found += [
            Unsupported(origin_of(node), why.format(ops.name_of(node)))
            for node in program.calls()
            if _is_beside_integers(node)
        ]
        why = "TorchScript leaves out copies and arithmetic without effect, and {} counts from the start of memory"
        found += [
            Unsupported(origin_of(node), why.format(ops.name_of(node)))
            for node in program.calls()
            if node.target in ops.STRIDED and ops.bind(node)["storage_offset"] is not None
        ]
        return found + _lost_draws(program)

    def compile(self, program: Program) -> Executable:
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                plain = _scripted(program) if program.signature.dims else _traced(program)
                # NOTE: on its own, it folds into convolutions what our passes decline: `conv(x) + 1.5 * 2**23` rounds.
                frozen = torch.jit.freeze(plain, optimize_numerics=False)
                script = torch.jit.optimize_for_inference(frozen)
        except Exception as error:  # TorchScript raises whatever its C++ throws
            raise BackendError(
                "TorchScript failed to compile this model", why=f"{type(error).__name__}: {str(error).strip()[:200]}"
            ) from error

        def save(place: Path) -> None:
            # NOTE: what optimize_for_inference made (MKL-DNN constants) cannot be serialized; it is made again on load.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # NOTE: through memory: torch's own writer aborts the process when the disk is full.
                buffer = io.BytesIO()
                torch.jit.save(frozen, buffer)
                (place / FILE if place.is_dir() else place).write_bytes(buffer.getbuffer())

        return Executable(
            self.name,
            program.signature,
            _raising_as_torch(_runner(script, program.signature, self.threads), program),
            state=[program.state[item.name] for item in program.signature.state_inputs],
            save=save,
            options={"threads": self.threads},
            code=True,
            notes=[LOSES_NAN] if {node.target for node in program.calls()} >= LAYER_AND_RELU else [],
        )

    @staticmethod
    def load_runner(directory: Path, signature: Signature, options: Mapping[str, Any]) -> Runner:
        return load_runner(directory, signature, options)


def _lost_draws(program: Program) -> list[Unsupported]:
    """TorchScript erases draws that nothing reads, and those behind them become others."""
    draws, kept = ([*filter(ops.draws, made.calls())] for made in (program, without_idle_draws(program)))
    if not kept or len(kept) == len(draws):
        return []
    why = f"TorchScript does not draw the numbers of {ops.name_of(draws[0])} that nothing reads, and then draws others"
    return [Unsupported(origin_of(draws[0]), why)]


def _is_beside_integers(node: fx.Node) -> bool:
    """Whether a 0-d constant decides the dtype of a call, and a Python number in its place would give another one."""
    call = ops.bind(node) if ops.is_overload(node.target) else {}
    given = [operand for operand in (call.get("self"), call.get("other")) if isinstance(operand, fx.Node)]
    pair = [operand for operand in given if isinstance(operand.meta["val"], torch.Tensor)]
    numbers = [operand for operand in pair if operand.op == "get_attr" and operand.meta["val"].dim() == 0]
    others = [operand.meta["val"].dtype for operand in pair if operand not in numbers]
    return (
        len(numbers) == len(others) == 1
        and numbers[0].meta["val"].dtype in (torch.float64, torch.float16, torch.bfloat16)
        and not (others[0].is_floating_point or others[0].is_complex)
    )


def _raising_as_torch(run: Runner, program: Program) -> Runner:
    """TorchScript makes a RuntimeError of whatever a kernel raises, around a traceback of ours."""

    def run_or_raise(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        try:
            return run(inputs)
        except RuntimeError as error:
            log.info("a TorchScript call failed and is repeated with PyTorch: %s", error)
            return by_torch(program)(inputs)

    return run_or_raise


def _traced(program: Program) -> Any:
    return torch.jit.trace(program.module().eval(), blank(program.signature), check_trace=False, strict=False)


def _scripted(program: Program) -> Any:
    # A class of its own: TorchScript takes modules of one class with the same attributes for one type.
    holder: torch.nn.Module = type("Program", (torch.nn.Module,), {})()
    for name in program.used_weights():
        holder.register_buffer(attribute_name(name), program.weights[name])
    script = torch.jit.script(holder.eval())
    script.define(source_of(program))
    return script


def load_runner(directory: Path, signature: Signature, options: Mapping[str, Any]) -> Runner:
    """Reads a saved module and optimizes it for this machine. Runs code from the file: the caller asked for trust."""
    device = _device(signature)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            script = torch.jit.optimize_for_inference(torch.jit.load(str(directory / FILE), map_location=device))
    except RuntimeError as error:
        raise BundleError("the TorchScript file cannot be read", why=str(error)[:200]) from error
    return _runner(script, signature, options.get("threads"))


def _device(signature: Signature) -> str:
    """Where it runs: on the GPU if any tensor is there."""
    return max((device for _, device in signature.devices), key=lambda device: device != "cpu", default="cpu")


def _runner(script: Any, signature: Signature, threads: int | None) -> Runner:
    def unfused(*values: torch.Tensor) -> Any:
        # NOTE: on GPUs, TorchScript generates kernels in the second call, in time that doubles with each tensor that
        # is concatenated: 19 s for 14 (torch 2.11). With them, it was never the fastest in bench/results/gpu.md.
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            return script(*values)

    called = script if _device(signature) == "cpu" else unfused
    dense = [number for number, item in enumerate(signature.outputs) if item.type.contiguous]

    def packed(*values: torch.Tensor) -> list[torch.Tensor]:
        # NOTE: TorchScript erases `x * 1` and `x + 0`, and returns `x`, which may be a view of a larger tensor.
        found = [*called(*values)]
        for number in dense:
            found[number] = found[number].contiguous()
        return found

    return torch_runner(packed if dense else called, signature, threads)
