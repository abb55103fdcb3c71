"""Program -> ONNX, through torch's own exporter. The file that `tsopt export --format onnx` writes.

Needs onnx and onnxscript, not ONNX Runtime.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tsopt.compiler.program import Program, attribute_name
from tsopt.compiler.quiet import quiet
from tsopt.errors import BackendError

INLINE = 1024  # bytes: shape inference wants to see small constants, sessions get large ones handed over
SINGLE_FILE = (1 << 31) - (1 << 24)  # a protobuf ends at 2 GiB


@dataclass(frozen=True)
class OnnxModel:
    """An exported model, its weights still shared with the program."""

    model: Any

    def save(self, path: Path) -> None:
        """Writes the model; weights beside it in `<name>.data` when one file could not hold them."""
        import onnx_ir

        size = sum(v.const_value.nbytes for v in self.model.graph.initializers.values() if v.const_value is not None)
        data = f"{path.name}.data" if size > SINGLE_FILE else None
        onnx_ir.save(self.model, path, external_data=data)

    def detached(self) -> tuple[bytes, dict[str, Any]]:
        """The model without its large weights, and these as numpy arrays over the program's memory."""
        import onnx_ir

        arrays: dict[str, Any] = {}
        kept: list[tuple[Any, Any]] = []
        for name, value in self.model.graph.initializers.items():
            tensor = value.const_value
            if tensor is None or tensor.nbytes <= INLINE:
                continue
            arrays[name] = tensor.numpy()
            kept.append((value, tensor))
            value.const_value = onnx_ir.ExternalTensor(
                "weights", 0, tensor.nbytes, tensor.dtype, shape=tensor.shape, name=name
            )
        try:
            return onnx_ir.to_proto(self.model).SerializeToString(), arrays
        finally:
            for value, tensor in kept:
                value.const_value = tensor


def to_onnx(program: Program, opset: int | None = None) -> OnnxModel:
    """Exports a program; inputs, outputs and weights keep the names that the user knows.

    Raises:
        BackendError: the exporter has no translation for an op; the message names it and its place.
    """
    types = [item.type for item in program.signature.inputs]
    inputs = tuple(torch.zeros(t.shape, dtype=getattr(torch, t.dtype), device=t.device) for t in types)
    try:
        with quiet(stdout=True), torch.no_grad():
            exported = torch.export.export(program.module(), inputs, strict=False)
            made = torch.onnx.export(
                exported,
                dynamo=True,
                verbose=False,
                optimize=False,  # our passes have run; the exporter's own fold x + 0.0 and integer divisions by zero
                opset_version=opset,
                input_names=[item.name for item in program.signature.inputs],
                output_names=_unique([item.name for item in program.signature.outputs]),
            )
    except Exception as error:
        raise _explain(error, program) from error
    if made is None:
        raise BackendError("the ONNX exporter returned nothing")
    _rename(made.model, program)
    return OnnxModel(made.model)


def _unique(names: list[str]) -> list[str]:
    seen: dict[str, int] = {}
    out = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        out.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return out


def _rename(model: Any, program: Program) -> None:
    """Weights by their path in the user's model; inner values out of the way of the names of inputs and outputs."""
    outside = {value.name for value in (*model.graph.inputs, *model.graph.outputs)}
    ends = {id(value) for value in (*model.graph.inputs, *model.graph.outputs)}
    for node in model.graph:
        for value in node.outputs:
            if value.name in outside and id(value) not in ends:
                value.name = f"{value.name}.inner"
    paths = {attribute_name(name): name for name in program.used_weights()}
    initializers = model.graph.initializers
    for name in [name for name in initializers if name in paths]:
        wanted = paths[name]
        if wanted in initializers or wanted in outside:
            continue
        value = initializers.pop(name)
        value.name = wanted
        if value.const_value is not None:
            value.const_value.name = wanted
        initializers[wanted] = value


_OVERLOAD = re.compile(r"OpOverload\(op='([\w:.]+)', overload='(\w*)'\)|'(aten\.[\w.]+)'|\b(aten\.\w+\.\w+)")


def _explain(error: Exception, program: Program) -> BackendError:
    cause: BaseException | None = error
    text = ""
    while cause is not None:
        text += f"\n{cause}"
        cause = cause.__cause__
    found = _OVERLOAD.search(text)
    op = next((group for group in found.groups() if group), "") if found else ""
    place = next((n for n in program.calls() if op and str(n.target).startswith(op.replace("::", "."))), None)
    where = f"{place.meta.get('module', '')} {place.meta.get('source', '')}".strip() if place is not None else ""
    what = f"the ONNX exporter has no translation for {op}" if op else "the ONNX exporter cannot take this model"
    return BackendError(what, where=where or None, why=f"{type(error).__name__}: {_last_line(text)}")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("  ")]
    return (lines[-1] if lines else "")[:200]
