"""Recomposes handwritten activations and softmax into the op that every backend has a kernel for. All ROUNDING.

Runs before algebra, which would rewrite the powers by which a formula is recognized. Formulas that overflow or
underflow where the op does not are left alone: `log(softmax(x))` is -inf where log_softmax
is finite, `log(1 + exp(x))` is inf where softplus is x, `exp(x) / sum(exp(x))` is NaN where softmax is 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from tsopt.compiler.graph.ops import aten, bind
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.rewriting.rewrite import USED_ELSEWHERE, Site, Skip, rule
from tsopt.passes.recompose.formulas import (
    PRODUCTS,
    affine,
    is_float,
    is_of,
    literal,
    near,
    polynomial,
    product,
    reduced,
    used_elsewhere,
)

OTHER_CONSTANTS = "the constants do not match GELU"

K = math.sqrt(2 / math.pi)


def _as_op(at: Site, target: Any, x: Any, *args: Any, **kwargs: Any) -> fx.Node | Skip | None:
    """The op on x for the root, if it can stand for it."""
    if not is_float(at, x):
        return None
    if used_elsewhere(at.root, (x,)):
        return Skip(USED_ELSEWHERE)
    made = at.call(target, x, *args, **kwargs)
    return made if at.same_type(made) else None


def _gates(at: Site) -> Iterator[tuple[fx.Node, fx.Node, float]]:
    """(x, s, c) for a root that is c * x * s, both ways round."""
    found = product(at, at.root)
    if len(found.tops) == 2 and not found.bottoms and is_float(at, at.root):
        x, s = found.tops
        yield x, s, found.number
        yield s, x, found.number


# ---- GELU -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Share:
    """0.5 * (1 + sign * f(z)), or another way to write it; `is_right` where the numbers are those."""

    inner: fx.Node
    sign: float
    is_right: bool


def _share(at: Site, s: fx.Node, c: float) -> Share | None:
    """What a value c * s is a share by."""
    for inner, a, b in affine(at, s):
        if is_of(inner, aten.erf.default, aten.tanh.default):  # odd: a sign may be inside or outside
            return Share(inner, math.copysign(1, c * a), near(at, abs(c * a), 0.5) and near(at, c * b, 0.5))
        if is_of(inner, aten.erfc.default):
            return Share(inner, 1.0, near(at, c * a, 0.5) and b == 0)
        if is_of(inner, aten.sigmoid.default, aten.special_ndtr.default):
            return Share(inner, 1.0, near(at, c * a, 1) and b == 0)
    return None


@rule(*PRODUCTS, numerics=Numerics.ROUNDING)
def gelu_erf(at, *_):
    """x * 0.5 * (1 + erf(x / sqrt(2))) -> gelu(x); also with erfc or ndtr, and with the factors in other places"""
    half = math.sqrt(0.5)
    slopes: dict[Any, float] = {aten.erf.default: half, aten.erfc.default: -half, aten.special_ndtr.default: 1.0}
    for x, s, c in _gates(at):
        found = _share(at, s, c)
        if found is None or found.inner.target not in slopes:
            continue
        z = polynomial(at, found.inner.args[0], x)
        if z is None:
            continue
        if not found.is_right or set(z) != {1} or not near(at, z[1], slopes[found.inner.target] * found.sign):
            return at.skip(OTHER_CONSTANTS)
        return _as_op(at, aten.gelu.default, x)
    return None


@rule(*PRODUCTS, numerics=Numerics.ROUNDING)
def gelu_tanh(at, *_):
    """0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))) -> gelu(x, approximate="tanh")"""
    slopes: dict[Any, float] = {aten.tanh.default: K, aten.sigmoid.default: 2 * K}  # 1 + tanh(z) = 2 sigmoid(2 z)
    for x, s, c in _gates(at):
        found = _share(at, s, c)
        if found is None or found.inner.target not in slopes:
            continue
        z = polynomial(at, found.inner.args[0], x)
        if z is None or 3 not in z:
            continue  # without a cube it is another function, not a GELU with other constants
        k = slopes[found.inner.target] * found.sign
        if not found.is_right or set(z) != {1, 3} or not near(at, z[1], k) or not near(at, z[3], k * 0.044715):
            return at.skip(OTHER_CONSTANTS)
        return _as_op(at, aten.gelu.default, x, approximate="tanh")
    return None


# ---- sigmoid and its products -----------------------------------------------------------------------------


def _one_plus_exp(at: Site, node: Any) -> tuple[fx.Node, float] | None:
    """(z, sign) of a value 1 + exp(sign * z)."""
    for inner, a, b in affine(at, node):
        if is_of(inner, aten.exp.default) and a == b == 1:
            z: Any = inner.args[0]
            return (z.args[0], -1.0) if is_of(z, aten.neg.default) else (z, 1.0)
    return None


@rule(lambda y: aten.reciprocal.default(y), lambda y: aten.div.Tensor(1, y), numerics=Numerics.ROUNDING)
def sigmoid_formula(at, y):
    """1 / (1 + exp(-x)) -> sigmoid(x)"""
    found = _one_plus_exp(at, y)
    if found is None or found[1] > 0:
        return None
    return _as_op(at, aten.sigmoid.default, found[0])


@rule(*PRODUCTS, numerics=Numerics.ROUNDING)
def silu_formula(at, *_):
    """x * sigmoid(x) -> silu(x); also x / (1 + exp(-x))"""
    for x, s, c in _gates(at):
        if c == 1 and is_of(s, aten.sigmoid.default) and s.args[0] is x:
            return _as_op(at, aten.silu.default, x)
    found = product(at, at.root)
    if found.number != 1 or len(found.tops) != 1 or len(found.bottoms) != 1:
        return None
    x = found.tops[0]
    if _one_plus_exp(at, found.bottoms[0]) != (x, -1.0):
        return None
    return _as_op(at, aten.silu.default, x)


@rule(*PRODUCTS, numerics=Numerics.ROUNDING)
def mish_formula(at, *_):
    """x * tanh(softplus(x)) -> mish(x); also with softplus as log(1 + exp(x))"""
    for x, s, c in _gates(at):
        if c == 1 and is_of(s, aten.tanh.default) and _is_softplus(at, s.args[0], x):
            return _as_op(at, aten.mish.default, x)
    return None


def _is_softplus(at: Site, node: Any, x: fx.Node) -> bool:
    """Where log(1 + exp(x)) overflows, its tanh is 1 as it should be."""
    if is_of(node, aten.softplus.default):
        arguments = bind(node)
        return arguments["self"] is x and arguments["beta"] == 1 and arguments["threshold"] >= 20
    if is_of(node, aten.log.default):
        return _one_plus_exp(at, node.args[0]) == (x, 1.0)
    inner: Any = node.args[0] if is_of(node, aten.log1p.default) else None
    return is_of(inner, aten.exp.default) and inner.args[0] is x


# ---- ramps ------------------------------------------------------------------------------------------------


def _clipped(at: Site, node: Any) -> tuple[object, float] | None:
    """(y, high) of a value clamped to 0 and a number."""
    if is_of(node, aten.relu6.default):
        return node.args[0], 6.0
    if not is_of(node, aten.clamp.default, aten.hardtanh.default, aten.clamp_max.default):
        return None
    y, *limits = bind(node).values()
    low, high = (None, limits[0]) if is_of(node, aten.clamp_max.default) else limits
    if low is None and is_of(y, aten.relu.default):
        y, low = y.args[0], 0.0
    end = literal(at, high)
    return None if literal(at, low) != 0 or end is None else (y, end)


def _ramp(at: Site, node: Any, c: float = 1.0) -> Any:
    """x of a value c * node that is clamp(x / 6 + 1 / 2, 0, 1), however it is scaled inside."""
    for inner, a, b in affine(at, node):
        if is_of(inner, aten.hardsigmoid.default) and near(at, a * c, 1) and b == 0:
            return inner.args[0]
        clipped = _clipped(at, inner)
        if clipped is None:
            continue
        y, high = clipped
        if b != 0 or not near(at, c * a * high, 1):
            return None
        scaled = ((x, c * a * slope, c * a * shift) for x, slope, shift in affine(at, y))
        return next((x for x, slope, shift in scaled if near(at, slope, 1 / 6) and near(at, shift, 0.5)), None)
    return None


@rule(
    *PRODUCTS,
    lambda x, low, high: aten.clamp.default(x, low, high),
    lambda x, low, high: aten.hardtanh.default(x, low, high),
    numerics=Numerics.ROUNDING,
)
def hardsigmoid_formula(at, *_):
    """relu6(x + 3) / 6 -> hardsigmoid(x); also clamp(x / 6 + 0.5, 0, 1)"""
    return _as_op(at, aten.hardsigmoid.default, _ramp(at, at.root))


@rule(*PRODUCTS, numerics=Numerics.ROUNDING)
def hardswish_formula(at, *_):
    """x * relu6(x + 3) / 6 -> hardswish(x)"""
    for x, s, c in _gates(at):
        if _ramp(at, s, c) is x:
            return _as_op(at, aten.hardswish.default, x)
    return None


# ---- softmax ----------------------------------------------------------------------------------------------


def _below_maximum(at: Site, node: Any) -> tuple[fx.Node, int] | None:
    """(x, axis) of x - amax(x, axis, keepdim=True)."""
    if not is_of(node, aten.sub.Tensor) or node.kwargs:
        return None
    x, m = node.args
    found = reduced(at, m, aten.amax.default, aten.max.dim)
    return _on_one_axis(found) if found is not None and found[0] is x else None


def _on_one_axis(found: tuple[fx.Node, tuple[int, ...]] | None) -> tuple[fx.Node, int] | None:
    return (found[0], found[1][0]) if found is not None and len(found[1]) == 1 else None


@rule(lambda e, s: aten.div.Tensor(e, s), numerics=Numerics.ROUNDING)
def softmax_formula(at, e, s):
    """exp(x - amax(x)) / sum(exp(x - amax(x))) -> softmax(x)"""
    summed = _on_one_axis(reduced(at, s, aten.sum.dim_IntList))
    if summed is None or summed[0] is not e or not is_of(e, aten.exp.default):
        return None
    found = _below_maximum(at, e.args[0])
    if found is None or found[1] != summed[1]:
        return None
    return _as_op(at, aten.softmax.int, *found)


@rule(lambda x, y: aten.sub.Tensor(x, y), numerics=Numerics.ROUNDING)
def log_softmax_formula(at, x, y):
    """x - logsumexp(x) -> log_softmax(x); also s - log(sum(exp(s))) with s = x - amax(x)"""
    found = _on_one_axis(reduced(at, y, aten.logsumexp.default))
    if found is None and is_of(y, aten.log.default):
        summed = _on_one_axis(reduced(at, y.args[0], aten.sum.dim_IntList))
        if summed is None or not is_of(summed[0], aten.exp.default) or summed[0].args[0] is not x:
            return None
        found = _below_maximum(at, x)
        return None if found is None or found[1] != summed[1] else _as_op(at, aten.log_softmax.int, *found)
    return None if found is None or found[0] is not x else _as_op(at, aten.log_softmax.int, *found)


RULES = (
    gelu_erf,
    gelu_tanh,
    sigmoid_formula,
    silu_formula,
    mish_formula,
    hardsigmoid_formula,
    hardswish_formula,
    softmax_formula,
    log_softmax_formula,
)
