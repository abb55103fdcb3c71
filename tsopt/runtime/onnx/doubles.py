"""float64 in ONNX models, of which the exporter makes float32 in places: literals are written with all their digits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

CASTS = ("Cast", "CastLike")
_CHANGING = threading.RLock()


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
    with _CHANGING:
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


def _is_as_written(number: float) -> bool:
    """Whether float32 holds a number, and shows that it does: its shortest decimal in float32 is no other number.

    That of what 0.1 is rounded to is 0.1.
    """
    import numpy as np

    return not _is_rounded(number) and (number != number or float(str(np.float32(number))) == number)


def _is_rounded(number: float) -> bool:
    """Whether float32 does not hold a number."""
    return number == number and torch.tensor(number, dtype=torch.float32, device="cpu").item() != number


def _building() -> Any:
    """torch's module, or None where a version of torch makes constants in another way."""
    try:
        from torch.onnx._internal.exporter import _building
    except ImportError:
        return None
    return _building if hasattr(_building, "_process_python_constants") else None
