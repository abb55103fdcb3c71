"""float64 in ONNX models, of which the exporter and ONNX itself make float32 in places.

Literals are written with all their digits. What is computed in float32 all the same is found, and refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import fx

from tsopt.compiler import forks
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.control import all_calls
from tsopt.compiler.graph.origin import origin_of
from tsopt.compiler.graph.program import Program
from tsopt.runtime.backends.backend import Unsupported
from tsopt.runtime.onnx.places import called_for, calls_of

CASTS = ("Cast", "CastLike")
NARROWER = (torch.float32, torch.float16, torch.bfloat16)
IN_STAGES = frozenset({"LayerNormalization", "RMSNormalization"})  # they say what the first of their stages rounds to
FORMULAS = frozenset({"Gelu", "HardSwish", "Selu"})  # ONNX defines them by numbers of float32
_CHANGING = forks.Lock()


@contextmanager
def exact_literals() -> Iterator[None]:
    """A block in which this thread's exports write the literals of float64 calls in float64.

    torch makes float32 of a number whose dtype no operand of the same kind says: of `0.1` in `CastLike(0.1, x)`, and in
    the cast that it writes for `x * 0.1`.
    """
    building = _building()
    if building is None:
        yield
        return
    import onnx_ir

    double, float32 = (onnx_ir.DataType[name] for name in ("DOUBLE", "FLOAT"))
    with _CHANGING.held():
        converted, here = building._process_python_constants, threading.get_ident()

        def exact(signature: Any, inputs: Any, types: Any, constants: Any, opset: Any) -> Any:
            known = {kind.dtype for kind in types.values()}
            is_cast = signature.name in CASTS and not known
            if threading.get_ident() == here and (double in known or is_cast):
                for name, value in inputs.items():
                    constraint = getattr(signature.params_map[name], "type_constraint", None)
                    if isinstance(value, float) and not _is_as_written(value) and _takes_any(constraint, types):
                        inputs[name] = opset.Constant(value=onnx_ir.tensor(value, dtype=double))
            return converted(signature, inputs, types, constants, opset)

        def _takes_any(constraint: Any, types: Any) -> bool:
            if constraint is None or constraint in types:
                return False
            return {double, float32} <= {kind.dtype for kind in constraint.allowed_types}

        with patch.object(building, "_process_python_constants", exact):
            yield


def holds_float64(program: Program) -> bool:
    return torch.float64 in _floats((*program.graph.nodes, *all_calls(program)))


def narrowed(model: Any, program: Program) -> Unsupported | None:
    """A call of float64 that a model computes in float32, or gives a number that has been rounded to it.

    Args:
        model: as exported from the program, not optimized: constants that are folded do not show how they were made.
    """
    if not holds_float64(program):
        return None
    from onnx_ir.passes.common import ShapeInferencePass
    from onnxscript import optimizer

    typed = model.clone()
    optimizer.inline(typed)
    ShapeInferencePass(check_type=False, strict_mode=False, data_prop=False)(typed)
    calls, everywhere = calls_of(program), _floats((*program.graph.nodes, *all_calls(program)))
    for node in typed.graph.all_nodes():
        if not _narrows(node):
            continue
        call = called_for(node, calls)
        # What takes or makes float32 may do so as PyTorch does.
        if (everywhere if call is None else _floats([call, *call.all_input_nodes])).isdisjoint(NARROWER):
            if call is None:
                return Unsupported("", "the ONNX model would compute some of this model's float64 in float32")
            why = f"the ONNX model would compute {ops.name_of(call)} of float64 in float32"
            return Unsupported(origin_of(call), why)
    return None


def _narrows(node: Any) -> bool:
    import onnx_ir

    double = onnx_ir.DataType.DOUBLE
    narrower = {onnx_ir.DataType[name] for name in ("FLOAT", "FLOAT16", "BFLOAT16")}
    taken = [value for value in node.inputs if value is not None]
    if node.op_type in CASTS:
        before, after = taken[0].dtype, node.outputs[0].dtype
        if before == double:
            return after in narrower and onnx_ir.convenience.get_const_tensor(taken[0]) is None
        return before in narrower and after == double and not _holds_as_written(taken[0])
    if all(value.dtype != double for value in (*taken, *node.outputs)):
        return False
    if node.op_type in IN_STAGES and node.attributes.get_int("stash_type", 1) in narrower:
        return True
    return node.op_type in FORMULAS or any(map(_is_rounded, _numbers(node)))  # attributes are stored in float32


def _numbers(node: Any) -> Iterator[float]:
    import onnx_ir

    for attribute in node.attributes.values():
        if attribute.is_ref():
            continue
        if attribute.type == onnx_ir.AttributeType.FLOAT:
            yield attribute.value
        elif attribute.type == onnx_ir.AttributeType.FLOATS:
            yield from attribute.value


def _holds_as_written(value: Any) -> bool:
    import onnx_ir

    tensor = onnx_ir.convenience.get_const_tensor(value)
    return tensor is not None and all(map(_is_as_written, tensor.numpy().astype(float).reshape(-1).tolist()))


def _is_as_written(number: float) -> bool:
    """Whether float32 holds a number, and shows that it does: its shortest decimal in float32 is no other number.

    That of what 0.1 is rounded to is 0.1.
    """
    import numpy as np

    return not _is_rounded(number) and (number != number or float(str(np.float32(number))) == number)


def _is_rounded(number: float) -> bool:
    """Whether float32 does not hold a number."""
    return number == number and torch.tensor(number, dtype=torch.float32, device="cpu").item() != number


def _floats(nodes: Iterable[fx.Node]) -> set[torch.dtype]:
    """The dtypes of the floating-point values of nodes."""
    values = (value for node in nodes for value in ops.tensors_of(node.meta.get("val")))
    return {value.dtype for value in values if value.is_floating_point()}


def _building() -> Any:
    """torch's module, or None where a version of torch makes constants in another way."""
    try:
        from torch.onnx._internal.exporter import _building
    except ImportError:
        return None
    return _building if hasattr(_building, "_process_python_constants") else None
