"""Algebraic simplification: identities, chains of moves and casts, cheaper forms of powers and divisions."""

from __future__ import annotations

import math
from typing import Any

import torch

from tsopt.compiler.ops import aten
from tsopt.compiler.program import Numerics
from tsopt.compiler.rewrite import rule

CASTS = "the literal promotes the dtype or the shape"
KEEPS_FLOAT = "not a floating-point value"
COMPLEX = "complex arithmetic with a real literal is not exact: inf * 1 has a NaN part"
LOSES = "the first cast loses values"


@rule(
    lambda x: aten.mul.Tensor(x, 1),
    lambda x: aten.mul.Tensor(x, 1.0),
    lambda x: aten.mul.Scalar(x, 1),
    lambda x: aten.mul.Scalar(x, 1.0),
    lambda x: aten.div.Tensor(x, 1),
    lambda x: aten.div.Tensor(x, 1.0),
    lambda x: aten.div.Scalar(x, 1),
    lambda x: aten.div.Scalar(x, 1.0),
    lambda x: aten.pow.Tensor_Scalar(x, 1),
    lambda x: aten.pow.Tensor_Scalar(x, 1.0),
)
def times_one(at, x):
    """x * 1 -> x, x / 1 -> x, x ** 1 -> x"""
    if at.type(at.root).dtype.startswith("complex") and at.root.target is not aten.pow.Tensor_Scalar:
        return at.skip(COMPLEX)
    return x if at.same_type(x) else at.skip(CASTS)


@rule(
    lambda x, alpha: aten.sub.Tensor(x, 0, alpha=alpha),
    lambda x, alpha: aten.sub.Scalar(x, 0, alpha),
    lambda x: aten.sub.Tensor(x, 0.0),
    lambda x: aten.sub.Scalar(x, 0.0),
    lambda x: aten.add.Tensor(x, -0.0),
    lambda x: aten.add.Scalar(x, -0.0),
)
def minus_zero(at, x, alpha=1):
    """x - 0 -> x, x + -0.0 -> x"""
    if alpha != 1:
        return at.skip("alpha is not 1")
    if at.type(at.root).dtype.startswith("complex"):
        return at.skip(COMPLEX)
    return x if at.same_type(x) else at.skip(CASTS)


@rule(lambda x: aten.add.Tensor(x, 0), lambda x: aten.add.Scalar(x, 0))
def plus_zero_integer(at, x):
    """x + 0 -> x for integers"""
    if at.type(x).dtype.startswith(("float", "bfloat", "complex")):
        return at.skip("-0.0 + 0 is 0.0")
    return x if at.same_type(x) else at.skip(CASTS)


@rule(
    lambda x: aten.add.Tensor(x, 0),
    lambda x: aten.add.Tensor(x, 0.0),
    lambda x: aten.add.Scalar(x, 0),
    lambda x: aten.add.Scalar(x, 0.0),
    numerics=Numerics.ROUNDING,
)
def plus_zero(at, x):
    """x + 0 -> x; the sign of -0.0 is kept where eager loses it"""
    return x if at.same_type(x) else at.skip(CASTS)


@rule(lambda x: aten.neg.default(aten.neg.default(x)))
def neg_neg(at, x):
    """-(-x) -> x"""
    return x


@rule(
    lambda x: aten.relu.default(aten.relu.default(x)),
)
def relu_relu(at, x):
    """relu(relu(x)) -> relu(x)"""
    return at.call(aten.relu.default, x)


@rule(lambda x, p, q: aten.permute.default(aten.permute.default(x, p), q))
def permute_permute(at, x, p, q):
    """permute(permute(x, p), q) -> permute(x, p[q]), or x when they cancel"""
    axes = [p[i] % len(p) for i in q]
    return x if axes == sorted(axes) else at.call(aten.permute.default, x, axes)


@rule(lambda x, a, b, c, d: aten.transpose.int(aten.transpose.int(x, a, b), c, d))
def transpose_transpose(at, x, a, b, c, d):
    """transpose(transpose(x, a, b), a, b) -> x; any other pair becomes one permute"""
    rank = len(at.type(x).shape)
    if not rank:
        return x
    axes = list(range(rank))
    for i, j in ((a, b), (c, d)):
        axes[i], axes[j] = axes[j], axes[i]
    return x if axes == sorted(axes) else at.call(aten.permute.default, x, axes)


@rule(lambda x: aten.t.default(aten.t.default(x)))
def t_t(at, x):
    """x.t().t() -> x"""
    return x


@rule(lambda x, p: aten.permute.default(x, p), lambda x, a, b: aten.transpose.int(x, a, b))
def permute_nothing(at, x, *axes):
    """permute(x, [0, 1, ...]) -> x, transpose(x, a, a) -> x"""
    rank = len(at.type(x).shape)
    if len(axes) == 2:
        return x if axes[0] % max(rank, 1) == axes[1] % max(rank, 1) else None
    return x if [axis % max(rank, 1) for axis in axes[0]] == list(range(rank)) else None


@rule(
    lambda x, s, t: aten.view.default(aten.view.default(x, s), t),
    lambda x, s, t: aten.reshape.default(aten.view.default(x, s), t),
    lambda x, s, t: aten.reshape.default(aten.reshape.default(x, s), t),
    lambda x, s, t: aten.view.default(aten.reshape.default(x, s), t),
    lambda x, s, t: aten.view.default(aten.unsqueeze.default(x, s), t),
    lambda x, s, t: aten.reshape.default(aten.unsqueeze.default(x, s), t),
)
def reshape_reshape(at, x, s, t):
    """reshape(reshape(x, s), t) -> reshape(x, t)"""
    return x if at.same_type(x) else at.call(aten.reshape.default, x, list(at.type(at.root).shape))


@rule(
    lambda x, d, e: aten.to.dtype(aten.to.dtype(x, d), e),
    lambda x, d, e: aten._to_copy.default(aten._to_copy.default(x, dtype=d), dtype=e),
    lambda x, d, e: aten.to.dtype(aten._to_copy.default(x, dtype=d), e),
)
def cast_cast(at, x, d, e):
    """x.to(d).to(e) -> x.to(e) where d holds every value of x"""
    if d is None or e is None or not holds(d, at.type(x).dtype):
        return at.skip(LOSES)
    return x if at.same_type(x) else at.call(aten.to.dtype, x, e)


def holds(wide: torch.dtype, narrow: str) -> bool:
    """Whether every value of `narrow` is a value of `wide`."""
    source = getattr(torch, narrow)
    if wide.is_complex or source.is_complex:
        return wide == source
    if source == torch.bool:
        return True
    if wide == torch.bool:
        return False
    if source.is_floating_point:
        return (
            wide.is_floating_point
            and torch.finfo(wide).eps <= torch.finfo(source).eps
            and torch.finfo(wide).max >= torch.finfo(source).max
            and torch.finfo(wide).smallest_normal <= torch.finfo(source).smallest_normal
        )
    limits = torch.iinfo(source)
    if wide.is_floating_point:
        return max(abs(limits.min), limits.max) <= 2 / torch.finfo(wide).eps
    return torch.iinfo(wide).min <= limits.min and torch.iinfo(wide).max >= limits.max


@rule(
    lambda x, c: aten.div.Tensor(x, c),
    lambda x, c: aten.div.Scalar(x, c),
)
def div_power_of_two(at, x, c):
    """x / 2**k -> x * 2**-k"""
    if not isinstance(c, (int, float)) or isinstance(c, bool):
        return None
    if not at.same_type(x) or not getattr(torch, at.type(x).dtype).is_floating_point:
        return at.skip(KEEPS_FLOAT)
    if c == 0 or not math.isfinite(c) or abs(math.frexp(c)[0]) != 0.5 or not 2.0**-8 <= abs(c) <= 2.0**8:
        return None
    return at.call(aten.mul.Tensor, x, 1.0 / c)


@rule(
    lambda x, n: aten.pow.Tensor_Scalar(x, n),
    numerics=Numerics.ROUNDING,
)
def small_power(at, x, n):
    """x ** 2 -> x * x, x ** 3 -> x * x * x, x ** 0.5 -> sqrt(x), x ** -0.5 -> rsqrt(x), x ** -1 -> 1 / x"""
    forms: dict[float, Any] = {0.5: aten.sqrt.default, -0.5: aten.rsqrt.default, -1.0: aten.reciprocal.default}
    if not at.same_type(x):
        return at.skip(CASTS)
    if n == 2:
        return at.call(aten.mul.Tensor, x, x)
    if n == 3:
        return at.call(aten.mul.Tensor, at.call(aten.mul.Tensor, x, x), x)
    if n in forms and getattr(torch, at.type(x).dtype).is_floating_point:
        return at.call(forms[n], x)
    return None


@rule(lambda x: aten.reciprocal.default(aten.sqrt.default(x)), numerics=Numerics.ROUNDING)
def reciprocal_sqrt(at, x):
    """1 / sqrt(x) -> rsqrt(x)"""
    return at.call(aten.rsqrt.default, x)


RULES = (
    times_one,
    minus_zero,
    plus_zero_integer,
    plus_zero,
    neg_neg,
    relu_relu,
    permute_permute,
    transpose_transpose,
    t_t,
    permute_nothing,
    reshape_reshape,
    cast_cast,
    div_power_of_two,
    small_power,
    reciprocal_sqrt,
)
