"""ONNX translations of ops that torch's exporter does not support or gets wrong."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from onnxscript import ir, opset18

from tsopt.errors import BackendError
from tsopt.runtime.onnx import nearest

op: Any = opset18
FLOAT, INT64 = 1, 7  # as onnx.TensorProto numbers them


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """What the exporter is given: by op, of those whose libraries are imported."""
    found: dict[Callable[..., Any], Callable[..., Any]] = {
        torch.ops.aten._grouped_mm.default: _grouped_mm,
        torch.ops.aten.signbit.default: _signbit,
        torch.ops.aten.atan2.default: _atan2,
        torch.ops.aten.minimum.default: _minimum,
        torch.ops.aten.maximum.default: _maximum,
        torch.ops.aten.clamp.default: _clamp,
        torch.ops.aten.clamp.Tensor: _clamp,
        torch.ops.aten.clamp_min.default: _clamp,
        torch.ops.aten.clamp_min.Tensor: _clamp,
        torch.ops.aten.clamp_max.default: lambda x, high: _clamp(x, None, high),
        torch.ops.aten.clamp_max.Tensor: lambda x, high: _clamp(x, None, high),
        **nearest.translations(),
        operator.floordiv: _floordiv,
        torch.ops.aten.log1p.default: _log1p,
        torch.ops.aten.expm1.default: _expm1,
        torch.ops.aten.log_sigmoid.default: _log_sigmoid,
        torch.ops.aten.logaddexp.default: _logaddexp,
        torch.ops.aten.logaddexp2.default: _logaddexp2,
    }
    if hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        found[torch.ops.transformers.grouped_mm_fallback.default] = _grouped_mm
    return found


def _signbit(x: Any) -> Any:
    """Also True for -0.0, whose reciprocal is negative: the exporter's own translation only compares with 0."""
    if not x.dtype.is_signed():
        return op.Not(op.Equal(x, x))
    zero = op.CastLike(0.0, x)
    negative = op.Less(x, zero)
    return op.Or(negative, op.Less(op.Reciprocal(x), zero)) if x.dtype.is_floating_point() else negative


def _atan2(y: Any, x: Any) -> Any:
    """The exporter's own translation takes no sides where an operand is zero: atan2(1.0, -0.0) became -pi / 2."""
    if not y.dtype.is_floating_point() or y.dtype != x.dtype:
        y, x = op.Cast(y, to=FLOAT), op.Cast(x, to=FLOAT)  # as PyTorch does, of whole numbers
        y.dtype = x.dtype = ir.DataType.FLOAT
    zero, turn = op.CastLike(0.0, y), op.CastLike(math.pi, y)
    angle = op.Where(op.Equal(y, zero), y, op.Atan(op.Div(y, x)))
    return op.Where(_signbit(x), op.Add(angle, op.Where(_signbit(y), op.Neg(turn), turn)), angle)


# ONNX Runtime's Min, Max and Clip compare int64 by its lower half; its Less compares all of it.


def _minimum(x: Any, y: Any, dtype: Any = None) -> Any:
    """Args: dtype: of the tensors, where `x` is a value in between, whose dtype is not known yet."""
    dtype = dtype or x.dtype
    if dtype == ir.DataType.INT64:
        return op.Where(op.Less(x, y), x, y)
    return op.And(x, y) if dtype == ir.DataType.BOOL else op.Min(x, y)


def _maximum(x: Any, y: Any) -> Any:
    if x.dtype == ir.DataType.INT64:
        return op.Where(op.Less(x, y), y, x)
    return op.Or(x, y) if x.dtype == ir.DataType.BOOL else op.Max(x, y)


def _clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    """The upper bound wins where the bounds are out of order."""
    bounded = x if low is None else _maximum(x, op.CastLike(low, x))
    return bounded if high is None else _minimum(bounded, op.CastLike(high, x), x.dtype)


def _floordiv(x: Any, y: Any) -> Any:
    """Of sizes. The exporter's own translation is Div alone, which rounds to zero; Mod has the sign of the divisor."""
    return op.Div(op.Sub(x, op.Mod(x, y)), y)


# Of formulas that overflow or cancel where PyTorch does not. The exporter's own are log(1 + x), exp(x) - 1,
# log(sigmoid(x)) and log(exp(x) + exp(y)): 0 for small x, infinite from 88 in float32.


def _log1p(x: Any) -> Any:
    is_near = op.And(op.Greater(x, op.CastLike(-0.5, x)), op.Less(x, op.CastLike(1.0, x)))
    return op.Where(is_near, _log1p_near(x, x.dtype), op.Log(op.Add(x, op.CastLike(1.0, x))))


def _log1p_near(x: Any, dtype: Any) -> Any:
    """For |x| up to 1: 2 atanh(x / (2 + x)).

    ONNX Runtime's Atanh is for float32 only. In float64: log(u) x / (u - 1) with u = 1 + x, whose rounding cancels out
    (W. Kahan; D. Goldberg, "What every computer scientist should know about floating-point arithmetic", theorem 4).

    Args:
        dtype: of `x`, which may be a value in between.
    """
    if dtype == ir.DataType.DOUBLE:
        one = op.CastLike(1.0, x)
        rounded = op.Add(one, x)
        more = op.Sub(rounded, one)
        return op.Where(op.Equal(rounded, one), x, op.Div(op.Mul(op.Log(rounded), x), more))
    half = op.Atanh(op.Div(x, op.Add(x, op.CastLike(2.0, x))))
    return op.Add(half, half)


def _expm1(x: Any) -> Any:
    """2 t / (1 - t) with t = tanh(x / 2) where exp(x) is near 1."""
    one = op.CastLike(1.0, x)
    half = op.Tanh(op.Mul(x, op.CastLike(0.5, x)))
    near = op.Div(op.Add(half, half), op.Sub(one, half))
    is_near = op.Less(op.Abs(x), op.CastLike(0.5, x))
    return op.Where(is_near, near, op.Sub(op.Exp(x), one))


def _log_sigmoid(x: Any) -> Any:
    return op.Sub(op.Min(x, op.CastLike(0.0, x)), _log1p_near(op.Exp(op.Neg(op.Abs(x))), x.dtype))


def _logaddexp(x: Any, y: Any) -> Any:
    return op.Add(op.Max(x, y), _log1p_near(op.Exp(_minus_distance(x, y)), x.dtype))


def _logaddexp2(x: Any, y: Any) -> Any:
    more = _log1p_near(op.Pow(op.CastLike(2.0, x), _minus_distance(x, y)), x.dtype)
    return op.Add(op.Max(x, y), op.Div(more, op.Log(op.CastLike(2.0, x))))


def _minus_distance(x: Any, y: Any) -> Any:
    """-|x - y|; 0 also for two infinities of one sign."""
    return op.Where(op.Equal(x, y), op.CastLike(0.0, x), op.Neg(op.Abs(op.Sub(x, y))))


def _grouped_mm(rows: Any, matrices: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """Rows in groups, each group times a matrix of its own; `offs` are the ends of the groups.

    Zeros for the rows behind the last group: those of transformers' op, where torch's own leaves anything.
    """
    if offs is None or bias is not None or out_dtype is not None or (len(rows.shape), len(matrices.shape)) != (2, 3):
        # The others are for gradients, or are no groups: `_explain` tells the op, its place and this.
        raise BackendError(
            "_grouped_mm is supported only for grouped 2-D inputs and 3-D weights, without bias or out_dtype"
        )
    count = matrices.shape[0]
    if str(rows.dtype) != "BFLOAT16":
        return _in_groups(rows, matrices, offs, count)
    # Wide, then rounded: runtimes for CPUs have no kernels for it.
    return op.CastLike(_in_groups(op.Cast(rows, to=FLOAT), op.Cast(matrices, to=FLOAT), offs, count), rows)


def _in_groups(rows: Any, matrices: Any, offs: Any, count: int) -> Any:
    axis, end, parts = op.Constant(value_ints=[0]), op.Constant(value_ints=[0]), []
    for number in range(count):
        place, start = op.Constant(value_ints=[number]), end
        end = op.Cast(op.Gather(offs, place), to=INT64)
        parts.append(op.MatMul(op.Slice(rows, start, end, axis), op.Squeeze(op.Gather(matrices, place), axis)))
    left = op.Sub(op.Shape(rows, start=0, end=1), end)
    shape = op.Concat(left, op.Shape(matrices, start=2, end=3), axis=0)
    return op.Concat(*parts, op.Expand(op.CastLike(op.Constant(value_float=0.0), rows), shape), axis=0)
