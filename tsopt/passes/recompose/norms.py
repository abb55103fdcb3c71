"""Recomposes handwritten norms into layer_norm and rms_norm. All ROUNDING.

The norm is found first, and then absorbs the scale, the shift and the casts around it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tsopt.compiler.graph.ops import aten, bind
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.rewriting.rewrite import USED_ELSEWHERE, Site, Skip, rule
from tsopt.passes.constants import OUT_OF_RANGE, product_is_normal
from tsopt.passes.recompose.formulas import (
    PRODUCTS,
    affine,
    averaged,
    is_float,
    is_of,
    product,
    reduced,
    root_of,
    squared,
    used_elsewhere,
)
from tsopt.passes.recompose.layouts import in_layout_of_root, parameter, permuted, rearranged, uncast

EPS_OUTSIDE = "eps is added to the standard deviation, not to the variance"
HALF_SQUARES = (
    "in float16, squares and variances are inf where values are 256 or more, but the op computes them in float32"
)

VARIANCES = (aten.var.dim, aten.var.correction, aten.var_mean.correction)
Reduced = tuple[fx.Node, tuple[int, ...]]


def _centred(at: Site, node: Any) -> Reduced | None:
    """(x, axes) of x - mean(x, axes)."""
    if not is_of(node, aten.sub.Tensor) or node.kwargs:
        return None
    x, mean = node.args
    found = averaged(at, mean) or reduced(at, mean, aten.var_mean.correction, result=1)
    return found if found is not None and found[0] is x else None


def _variance(at: Site, node: Any) -> tuple[Reduced, float] | None:
    """((x, axes), correction) of a variance of x, which takes it from the number of values that it divides by."""
    for target in VARIANCES:
        found = reduced(at, node, target)
        if found is None:
            continue
        call: Any = node
        while call.target is not target:
            call = call.args[0]
        arguments = bind(call)
        given = arguments["unbiased" if target is aten.var.dim else "correction"]
        correction = 1.0 if given is None else float(given) if isinstance(given, (bool, int, float)) else math.nan
        centre = _centred(at, found[0])
        return centre if centre is not None and centre[1] == found[1] else found, correction
    if is_of(node, aten.sub.Tensor) and not node.kwargs:
        return _difference_of_means(at, node)
    found = averaged(at, node)
    if found is None:
        return None
    centre = _centred(at, squared(found[0]))
    return (centre, 0.0) if centre is not None and centre[1] == found[1] else None


def _difference_of_means(at: Site, node: Any) -> tuple[Reduced, float] | None:
    """mean(x ** 2) - mean(x) ** 2."""
    left, right = averaged(at, node.args[0]), averaged(at, squared(node.args[1]))
    if left is None or right is None or left[1] != right[1] or squared(left[0]) is not right[0]:
        return None
    return right, 0.0


def _over_root(at: Site) -> tuple[float, object, list[fx.Node]] | None:
    """(number, y, factors) where the root is number * factors / sqrt(y), however it is written.

    Also over y itself, where that is a deviation plus eps.
    """
    if not is_float(at, at.root):
        return None
    found = product(at, at.root)
    tops = list(found.tops)
    if len(found.bottoms) == 1:
        below = found.bottoms[0]
        root = root_of(below)
        if root is not None and root[1] > 0:
            return found.number, root[0], tops
        return (found.number, below, tops) if _is_deviation(at, below) else None
    for i, node in enumerate(tops if not found.bottoms else ()):
        root = root_of(node)
        if root is not None and root[1] < 0:
            return found.number, root[0], tops[:i] + tops[i + 1 :]
    return None


def _is_deviation(at: Site, node: Any) -> bool:
    """Whether a value is sqrt(variance) + eps, or std + eps."""
    for inner, a, b in affine(at, node):
        root = root_of(inner)
        if a == 1 and b > 0 and (reduced(at, inner, aten.std.dim, aten.std.correction) or (root and root[1] > 0)):
            return True
    return False


@rule(*PRODUCTS, numerics=Numerics.ROUNDING)
def layer_norm_formula(at, *_):
    """(x - mean(x)) / sqrt(var(x) + eps) -> layer_norm(x)"""
    found = _over_root(at)
    if found is None:
        return None
    number, y, factors = found
    centred = next(((i, centre) for i, node in enumerate(factors) if (centre := _centred(at, node))), None)
    if centred is None:
        return None
    if _is_deviation(at, y):
        return at.skip(EPS_OUTSIDE)
    place, (x, axes) = centred
    others = factors[:place] + factors[place + 1 :]
    for variance, a, eps in affine(at, y):
        spread = _variance(at, variance)
        if a != 1 or spread is None or spread[0] != (x, axes):
            continue
        count = math.prod(at.type(x).shape[axis] for axis in axes)
        if count < 2 or not count > spread[1]:
            return None
        if at.type(variance).dtype == "float16":
            return at.skip(HALF_SQUARES)
        share = (count - spread[1]) / count  # of the variance that the biased one is
        return _norm(at, aten.layer_norm.default, x, axes, eps * share, number * math.sqrt(share), others)
    return None


@rule(*PRODUCTS, numerics=Numerics.ROUNDING)
def rms_norm_formula(at, *_):
    """x / sqrt(mean(x ** 2) + eps) -> rms_norm(x)"""
    found = _over_root(at)
    if found is None:
        return None
    number, y, factors = found
    for mean, a, eps in affine(at, y):
        found_mean = averaged(at, mean)
        if a != 1 or found_mean is None:
            continue
        x = squared(found_mean[0])
        if not isinstance(x, fx.Node) or _centred(at, x):
            continue
        place = next((i for i, node in enumerate(factors) if node is x or uncast(at, x) is node), None)
        if place is None:
            return None
        if at.type(mean).dtype == "float16":
            return at.skip(HALF_SQUARES)
        others = factors[:place] + factors[place + 1 :]
        return _norm(at, aten.rms_norm.default, x, found_mean[1], eps, number, others)
    return None


def _norm(
    at: Site, target: Any, x: fx.Node, axes: Sequence[int], eps: float, number: float, factors: list[fx.Node]
) -> fx.Node | Skip | None:
    """The norm, times what else the formula multiplies."""
    shape, rank = at.type(x).shape, len(at.type(x).shape)
    if eps <= 0 or any(not is_float(at, node) for node in factors):
        return None
    if used_elsewhere(at.root, (x, uncast(at, x), *factors)):
        return Skip(USED_ELSEWHERE)
    order = [*(axis for axis in range(rank) if axis not in axes), *axes]
    sizes = [shape[axis] for axis in axes]
    parameters: list[Any] = [None, None] if target is aten.layer_norm.default else [None]
    dtype = x.meta["val"].dtype
    if number != 1 and dtype in (torch.float32, torch.float64):
        parameters[0] = at.constant(torch.full(sizes, number, dtype=dtype, device=at.type(x).device), "norm.scale")
        number = 1.0
    made = at.call(target, permuted(at, x, order), sizes, *parameters, eps)
    made = permuted(at, made, [order.index(axis) for axis in range(rank)])
    for factor in factors:
        made = at.call(aten.mul.Tensor, made, factor)
    if number != 1:
        made = at.call(aten.mul.Tensor, made, number)
    made = in_layout_of_root(at, made)
    return made if at.same_type(made) else None


@dataclass(frozen=True, slots=True)
class Beside:
    """A root that combines a norm, permuted by axes and maybe copied, with another value."""

    norm: fx.Node
    axes: list[int]
    other: fx.Node


def _beside(at: Site, *targets: Any) -> Beside | None:
    for node, other in (at.root.args, at.root.args[::-1]):
        if isinstance(node, fx.Node) and isinstance(other, fx.Node):
            norm, axes = rearranged(at, node)
            if is_of(norm, *targets):
                return Beside(norm, axes, other)
    return None


def _with(at: Site, found: Beside, **changed: fx.Node) -> fx.Node | Skip | None:
    """The norm with other parameters."""
    arguments = bind(found.norm)
    if used_elsewhere(at.root, [node for node in arguments.values() if isinstance(node, fx.Node)]):
        return Skip(USED_ELSEWHERE)
    target: Any = found.norm.target
    made = at.call(target, *(arguments | changed).values())
    made = in_layout_of_root(at, permuted(at, made, found.axes))
    return made if at.same_type(made) else None


NORMS = (aten.layer_norm.default, aten.rms_norm.default)


@rule(lambda x, k: aten.mul.Tensor(x, k), numerics=Numerics.ROUNDING)
def norm_scale(at, *_):
    """layer_norm(x, w) * k -> layer_norm(x, w * k), k a constant; also rms_norm"""
    found = _beside(at, *NORMS)
    arguments = bind(found.norm) if found is not None else {}
    if found is None or arguments.get("bias") is not None:
        return None
    weight = parameter(at, found.other, arguments["normalized_shape"], found.norm, found.axes)
    scaled = _times(at, arguments["weight"], weight)
    return _with(at, found, weight=scaled) if isinstance(scaled, fx.Node) else scaled


def _times(at: Site, w: fx.Node | None, k: fx.Node | None) -> fx.Node | Skip | None:
    """The product of the parameter that a norm has, if any, and another; None where they are not constant."""
    if w is None:
        return k
    left, right = at.value(w), at.value(k)
    if left is None or right is None:
        return None
    first, second = left.double(), right.double()
    product = first * second
    if not product_is_normal(product, first, second, left.dtype):
        return at.skip(OUT_OF_RANGE)
    return at.constant(product.to(left.dtype), f"{w.target}.scaled")


@rule(lambda x, b: aten.add.Tensor(x, b), numerics=Numerics.ROUNDING)
def norm_shift(at, *_):
    """layer_norm(x, w) + b -> layer_norm(x, w, b), b a constant"""
    found = _beside(at, aten.layer_norm.default)
    arguments = bind(found.norm) if found is not None else {}
    if found is None or arguments["bias"] is not None:
        return None
    bias = parameter(at, found.other, arguments["normalized_shape"], found.norm, found.axes)
    return None if bias is None else _with(at, found, bias=bias)


HALVES = ("float16", "bfloat16")


@rule(
    lambda x, d, s, e, c, to: aten.to.dtype(aten.layer_norm.default(aten.to.dtype(x, d), s, None, None, e, c), to),
    lambda x, d, s, e, to: aten.to.dtype(aten.rms_norm.default(aten.to.dtype(x, d), s, None, e), to),
    numerics=Numerics.ROUNDING,
)
def norm_in_half(at, x, *_):
    """norm(x.to(float32)).to(half) -> norm(x): the kernels compute in float32 internally"""
    norm = at.root.args[0]
    if at.type(x).dtype not in HALVES or at.type(norm).dtype != "float32" or not at.same_type(x):
        return None
    target: Any = norm.target
    return at.call(target, x, *norm.args[1:])


RULES = (
    layer_norm_formula,
    rms_norm_formula,
    norm_scale,
    norm_shift,
    norm_in_half,
)
