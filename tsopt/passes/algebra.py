"""Algebraic simplification: identities, signs, bounds, casts, cheaper forms of powers and divisions.

Expects canonicalized programs. The rules for constants are in `constants`, and are part of this pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from tsopt.compiler.analysis.intervals import wraps
from tsopt.compiler.analysis.zero_signs import is_sign_of_zero_read, may_be_negative_zero
from tsopt.compiler.graph.ops import aten, bind
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.rewriting.rewrite import Site, rule
from tsopt.passes import constants

CASTS = "the literal changes the dtype or the shape"
KEEPS_FLOAT = "not a floating-point value"
COMPLEX = "complex arithmetic with a real literal is not exact: inf * 1 has a NaN part"
LOSES = "the first cast is lossy"
FROM_BOOL = "PyTorch supports adding to a boolean, but not subtracting from one"
PROMOTES_SIGN = "the negated value is promoted, so it matters whether it is negated before or after"
CROSSED = "the bounds are out of order"
WRAPS = "a bound is not a value of the dtype"
SIGN_READ = "the sign of a zero is read further on"
SHARED = "the inner value has other users"


@rule(
    lambda x: aten.mul.Tensor(x, 1),
    lambda x: aten.mul.Tensor(x, 1.0),
    lambda x: aten.div.Tensor(x, 1),
    lambda x: aten.div.Tensor(x, 1.0),
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
    lambda x: aten.sub.Tensor(x, 0.0),
    lambda x: aten.add.Tensor(x, -0.0),
)
def minus_zero(at, x, alpha=1):
    """x - 0 -> x, x + -0.0 -> x"""
    if alpha != 1:
        return at.skip("alpha is not 1")
    if at.type(at.root).dtype.startswith("complex"):
        return at.skip(COMPLEX)
    return x if at.same_type(x) else at.skip(CASTS)


@rule(lambda x: aten.add.Tensor(x, 0))
def plus_zero_integer(at, x):
    """x + 0 -> x for integers"""
    if at.type(x).dtype.startswith(("float", "bfloat", "complex")):
        return at.skip("-0.0 + 0 is 0.0")
    return x if at.same_type(x) else at.skip(CASTS)


@rule(
    lambda x: aten.add.Tensor(x, 0),
    lambda x: aten.add.Tensor(x, 0.0),
    numerics=Numerics.ROUNDING,
)
def plus_zero(at, x):
    """x + 0 -> x; keeps the sign of -0.0, which eager loses"""
    if _tells_zeros(at, x):
        return at.skip(SIGN_READ)
    return x if at.same_type(x) else at.skip(CASTS)


def _tells_zeros(at, x):
    """Whether a negative zero in a value shows behind the rewritten call."""
    return may_be_negative_zero(x) and is_sign_of_zero_read(at.program, at.root)


# ---- signs --------------------------------------------------------------------------------------------------


@rule(lambda x: aten.neg.default(aten.neg.default(x)))
def neg_neg(at, x):
    """-(-x) -> x"""
    return x


def _negates_exactly(at: Site, *values: fx.Node) -> bool:
    """Whether negating values before or after promotion gives the same result.

    Not for integers (-(-128) is -128 in int8 and 128 in int32) or for complex results (0j - 0j is not 0j + -0j).
    """
    dtype = at.root.meta["val"].dtype
    found = [value.meta["val"].dtype for value in values]
    return all(own == dtype or (own.is_floating_point and dtype.is_floating_point) for own in found)


@rule(
    lambda x, y: aten.add.Tensor(x, aten.neg.default(y)),
    lambda x, y: aten.add.Tensor(aten.neg.default(y), x),
)
def add_neg(at, x, y):
    """x + -y -> x - y, -y + 2 -> rsub(y, 2)"""
    if not _negates_exactly(at, y):
        return at.skip(PROMOTES_SIGN)
    is_tensor = at.is_tensor(x)
    if isinstance(x, bool) or (is_tensor and at.type(x).dtype == "bool"):
        return at.skip(FROM_BOOL)
    return at.call(aten.sub.Tensor, x, y) if is_tensor else at.call(aten.rsub.Scalar, y, x)


@rule(
    lambda x, y: aten.sub.Tensor(x, aten.neg.default(y)),
    lambda x, y: aten.rsub.Scalar(aten.neg.default(y), x),
)
def sub_neg(at, x, y):
    """x - -y -> x + y, 2 - -y -> y + 2"""
    if not _negates_exactly(at, y):
        return at.skip(PROMOTES_SIGN)
    return at.call(aten.add.Tensor, x, y) if at.is_tensor(x) else at.call(aten.add.Tensor, y, x)


@rule(
    lambda x, y: aten.mul.Tensor(aten.neg.default(x), aten.neg.default(y)),
    lambda x, y: aten.div.Tensor(aten.neg.default(x), aten.neg.default(y)),
)
def neg_times_neg(at, x, y):
    """-x * -y -> x * y, -x / -y -> x / y"""
    if not _negates_exactly(at, x, y):
        return at.skip(PROMOTES_SIGN)
    return at.call(at.root.target, x, y)


@rule(
    lambda x, c: aten.mul.Tensor(aten.neg.default(x), c),
    lambda x, c: aten.div.Tensor(aten.neg.default(x), c),
    lambda x, c: aten.neg.default(aten.mul.Tensor(x, c)),
    lambda x, c: aten.neg.default(aten.div.Tensor(x, c)),
)
def neg_times(at, x, c):
    """-x * 2 -> x * -2, -(x / 2) -> x / -2: rounding to nearest is symmetric"""
    if not isinstance(c, (int, float)) or isinstance(c, bool):
        return None
    dtype = at.root.meta["val"].dtype
    if not at.same_type(x) or not (dtype.is_floating_point or dtype.is_signed) or dtype.is_complex:
        return at.skip(CASTS)
    target = at.root.args[0].target if at.root.target is aten.neg.default else at.root.target
    if dtype.is_floating_point:
        # NOTE: as a float, for there is no integer -0.
        return at.call(target, x, -float(c)) if isinstance(c, float) or abs(c) <= 2**53 else None
    return at.call(target, x, -c) if c > torch.iinfo(dtype).min else None


# ---- bounds -------------------------------------------------------------------------------------------------

# NOTE: sqrt and relu are not here: they keep -0.0, which abs does not.
_POSITIVE = (aten.exp.default, aten.sigmoid.default, aten.softmax.int)


@rule(lambda x: aten.relu.default(x), lambda x: aten.abs.default(x))
def positive_already(at, x):
    """relu(x) -> x, abs(x) -> x where x is the same op already, or abs, exp, sigmoid or softmax"""
    is_float = x.meta["val"].is_floating_point()  # NOTE: abs of the smallest integer is negative
    known = x.target is at.root.target or (is_float and x.target in (*_POSITIVE, aten.abs.default))
    return x if known else None


@rule(lambda x: aten.abs.default(x), numerics=Numerics.ROUNDING)
def abs_relu(at, x):
    """abs(relu(x)) -> relu(x); relu keeps -0.0"""
    if x.target is not aten.relu.default:
        return None
    return at.skip(SIGN_READ) if _tells_zeros(at, x) else x


_BOUNDED = (
    lambda x: aten.relu.default(x),
    lambda x: aten.relu6.default(x),
    lambda x, low, high: aten.hardtanh.default(x, low, high),
    lambda x, low, high: aten.clamp.default(x, low, high),
    lambda x, low: aten.clamp_min.default(x, low),
    lambda x, high: aten.clamp_max.default(x, high),
)


@rule(*_BOUNDED, numerics=Numerics.ROUNDING)
def clamp_clamp(at, x, *_):
    """clamp(clamp(x, a, b), c, d) -> clamp(x, max(a, c), min(b, d)); relu, relu6 and hardtanh are clamps too

    ROUNDING only because of the sign of zero. All of them propagate NaN.
    """
    outer, inner = bounds_of(at.root), bounds_of(x)
    if outer is None or inner is None or not at.same_type(x.args[0]):
        return None
    if any(wraps(bound, at.root.meta["val"].dtype) for bound in (*outer, *inner)):
        return at.skip(WRAPS)
    if not (outer[0] <= outer[1] and inner[0] <= inner[1]):  # nor where a bound is NaN
        return at.skip(CROSSED)
    if at.root.meta["val"].is_floating_point() and _tells_zeros(at, x.args[0]):
        return at.skip(SIGN_READ)
    low, high = (min(max(bound, outer[0]), outer[1]) for bound in inner)
    if (low, high) == inner:
        return x
    if len(x.users) > 1:
        return at.skip(SHARED)
    if (low, high) == outer:
        return at.call(at.root.target, x.args[0], *at.root.args[1:], **at.root.kwargs)
    ends = [None if math.isinf(bound) else bound for bound in (low, high)]
    return at.call(aten.clamp.default, x.args[0], *ends)


def bounds_of(node: fx.Node) -> tuple[float, float] | None:
    """The interval that a clamp, relu, relu6 or hardtanh maps to; None for anything else, or if a call computes it."""
    fixed: dict[Any, tuple[float, float]] = {aten.relu.default: (0, math.inf), aten.relu6.default: (0, 6)}
    if node.target in fixed:
        return fixed[node.target]
    names = {aten.hardtanh.default: ("min_val", "max_val"), aten.clamp.default: ("min", "max")}
    names |= {aten.clamp_min.default: ("min", ""), aten.clamp_max.default: ("", "max")}
    if node.target not in names:
        return None
    bound = bind(node)
    low, high = (bound.get(name) for name in names[node.target])
    if isinstance(low, fx.Node) or isinstance(high, fx.Node):
        return None
    ends = (-math.inf if low is None else low, math.inf if high is None else high)
    truncates = node.target is aten.hardtanh.default and not node.meta["val"].is_floating_point()
    return (int(ends[0]), int(ends[1])) if truncates else ends


# ---- casts, powers, divisions -------------------------------------------------------------------------------


@rule(lambda x, d, e: aten.to.dtype(aten.to.dtype(x, d), e))
def cast_cast(at, x, d, e):
    """x.to(d).to(e) -> x.to(e) where d holds every value of x"""
    if not holds(d, at.type(x).dtype):
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


@rule(lambda x, c: aten.div.Tensor(x, c))
def div_power_of_two(at, x, c):
    """x / 2**k -> x * 2**-k"""
    if not at.is_tensor(x) or not isinstance(c, (int, float)) or isinstance(c, bool):
        return None
    if not getattr(torch, at.type(x).dtype).is_floating_point:
        return at.skip(KEEPS_FLOAT)
    if not 2.0**-8 <= abs(c) <= 2.0**8 or abs(math.frexp(c)[0]) != 0.5:
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
    if n == 0.5 and _tells_zeros(at, x):
        return at.skip(SIGN_READ)
    if n in forms and getattr(torch, at.type(x).dtype).is_floating_point:
        return at.call(forms[n], x)
    return None


@rule(lambda x: aten.reciprocal.default(aten.sqrt.default(x)), numerics=Numerics.ROUNDING)
def reciprocal_sqrt(at, x):
    """1 / sqrt(x) -> rsqrt(x)"""
    return at.call(aten.rsqrt.default, x)


@rule(
    lambda x, k, s, p, ceil, count, by: aten.avg_pool2d.default(x, k, s, p, ceil, count, by), numerics=Numerics.ROUNDING
)
def pool_of_all(at, x, k, s, p, ceil, count, by):
    """avg_pool2d(x, k) -> mean(x, [-2, -1], keepdim=True), k at least the size of x, no padding"""
    size = at.type(x).shape[-2:]
    kernel = list(k) * 2 if len(k) == 1 else list(k)
    if any(p) or any(a < b for a, b in zip(kernel, size, strict=True)):
        return None
    if by is not None:
        return at.skip("divisor_override is set")
    return at.call(aten.mean.dim, x, [-2, -1], True)


RULES = (
    times_one,
    minus_zero,
    plus_zero_integer,
    plus_zero,
    neg_neg,
    add_neg,
    sub_neg,
    neg_times_neg,
    neg_times,
    positive_already,
    abs_relu,
    clamp_clamp,
    cast_cast,
    div_power_of_two,
    small_power,
    reciprocal_sqrt,
    pool_of_all,
    *constants.RULES,
)
