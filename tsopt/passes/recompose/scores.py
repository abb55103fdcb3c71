"""Recognizes handwritten attention: the argument of softmax, and what happens to its result before the values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tsopt.compiler.graph.ops import aten, bind
from tsopt.compiler.rewriting.rewrite import Site
from tsopt.passes.recompose.formulas import OVER, RESHAPES, TIMES, is_float, is_of, literal
from tsopt.passes.recompose.layouts import CASTS, moved, rounds_no_more_than_root
from tsopt.passes.recompose.masks import Mask

MATMULS = (aten.matmul.default, aten.bmm.default)
DEPTH = 16  # steps between softmax and the product of queries and keys; a chain of sums is searched both ways


@dataclass(frozen=True, slots=True)
class Operand:
    """A factor of the scores: number * x, its axes permuted (None: as they are)."""

    x: fx.Node
    number: float
    axes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """What softmax is taken of.

    query, key: [..., rows, width] and [..., columns, width].
    product: the node of query @ key^T.
    scale: every number between them and softmax.
    by_head: what the product is multiplied by, each of them one number for each batch and head.
    masks: outermost first.
    inside: the nodes that are gone with the formula.
    """

    query: Operand
    key: Operand
    product: fx.Node
    scale: float
    masks: tuple[Mask, ...] = ()
    inside: tuple[fx.Node, ...] = ()
    by_head: tuple[fx.Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Weights:
    """Softmax of scores, as it is multiplied with the values; `zeroed` where it is set to 0 after softmax."""

    scores: Scores
    zeroed: fx.Node | None
    inside: tuple[fx.Node, ...]


def read_weights(at: Site, node: Any, dtype: torch.dtype) -> Weights | None:
    """Reads back from what is multiplied with the values; dtype is that of the values."""
    inside: list[fx.Node] = []
    zeroed: Any = None
    while not is_of(node, aten.softmax.int, aten._softmax.default):
        inside.append(node)
        is_cast = node.target in CASTS and is_float(at, node.args[0]) and rounds_no_more_than_root(at, node)
        if is_cast or _splits_leading_axes(at, node):
            node = node.args[0]
        elif zeroed is None and node.target is aten.masked_fill.Scalar and literal(at, node.args[2]) == 0:
            zeroed, node = node.args[1], node.args[0]
        else:
            return None
    x, axis = node.args[:2]
    own = node.meta["val"].dtype
    if axis not in (-1, len(at.type(node).shape) - 1) or own not in (dtype, torch.promote_types(dtype, torch.float32)):
        return None
    found = _scores(at, x, 1.0, DEPTH)
    return None if found is None else Weights(found, zeroed, (*inside, node, *found.inside))


def _splits_leading_axes(at: Site, node: Any) -> bool:
    """Whether a reshape leaves the last two axes alone."""
    if node.target not in RESHAPES:
        return False
    before, after = (at.type(n).shape for n in (node.args[0], node))
    return len(before) >= 2 and len(after) >= 2 and before[-2:] == after[-2:]


def _scores(at: Site, node: Any, scale: float, depth: int) -> Scores | None:
    if not is_float(at, node) or not depth:
        return None
    for inner, by_head in _by_head(at, node):
        found = _scores(at, inner, scale, depth - 1)
        if found is not None and not found.masks and at.type(found.product).shape == at.type(node).shape:
            return replace(found, by_head=(*found.by_head, by_head), inside=(node, *found.inside))
    for inner, factor, mask in _steps(at, node, scale):
        found = _scores(at, inner, scale * factor, depth - 1)
        if found is not None:
            masks = found.masks if mask is None else (mask, *found.masks)
            return replace(found, masks=masks, inside=(node, *found.inside))
    return _product(at, node, scale)


def _steps(at: Site, node: fx.Node, scale: float) -> Iterator[tuple[Any, float, Mask | None]]:
    """(inner scores, factor, mask) for each way in which a node may be scores that were scaled, masked or moved."""
    if (node.target in CASTS and rounds_no_more_than_root(at, node)) or _splits_leading_axes(at, node):
        yield node.args[0], 1.0, None
        return
    for inner, factor, mask in _changes(at, node, scale):
        if at.is_tensor(inner) and at.type(inner).shape == at.type(node).shape:
            yield inner, factor, mask


def _changes(at: Site, node: Any, scale: float) -> Iterator[tuple[Any, float, Mask | None]]:
    shape = at.type(node).shape
    if node.target in (*TIMES, *OVER):
        factor = _factor(at, node)
        if factor is not None:
            yield factor[0], factor[1], None
    elif node.target in (aten.add.Tensor, aten.sub.Tensor) and not node.kwargs:
        sign = 1.0 if node.target is aten.add.Tensor else -1.0
        left, right = node.args
        for inner, added in ((left, right), (right, left))[: 2 if sign > 0 else 1]:
            if at.is_tensor(added) and is_float(at, added) and literal(at, added) is None:
                yield inner, 1.0, Mask(added, shape, sign * scale)
    elif node.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        inner, where, fill = node.args
        yield from _filled(at, inner, where, fill, shape, scale, keeps=False)
    elif node.target in (aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther):
        where, yes, no = node.args
        yield from _filled(at, yes, where, no, shape, scale, keeps=True)
        yield from _filled(at, no, where, yes, shape, scale, keeps=False)


def _by_head(at: Site, node: Any) -> Iterator[tuple[Any, fx.Node]]:
    """(x, c) of x * c, c a constant of one number for each batch and head."""
    if not is_of(node, aten.mul.Tensor):
        return
    for inner, factor in (node.args, node.args[::-1]):
        constant = at.value(factor)
        if constant is not None and constant.numel() > 1 and constant.shape[-2:] == (1, 1):
            yield inner, factor


def _factor(at: Site, node: Any) -> tuple[Any, float] | None:
    """(x, c) of x * c and x / c."""
    if not is_of(node, *TIMES, *OVER):
        return None
    left, right = node.args
    first, second = literal(at, left), literal(at, right)
    if second is not None:
        return left, second if node.target in TIMES else 1 / second if second else math.nan
    return (right, first) if first is not None and node.target in TIMES else None


def _filled(
    at: Site, inner: Any, where: Any, fill: Any, shape: tuple[int, ...], scale: float, *, keeps: bool
) -> Iterator[tuple[Any, float, Mask | None]]:
    number = _uniform(at, fill)
    if number is not None and at.is_tensor(where) and at.type(where).dtype == "bool":
        yield inner, 1.0, Mask(where, shape, fill=number * scale, keeps=keeps)


def _uniform(at: Site, value: Any) -> float | None:
    """The number that every element is."""
    number = literal(at, value)
    if number is not None:
        return number
    if is_of(value, aten.full_like.default, aten.full.default):
        return literal(at, value.args[1])
    constant = at.value(value)
    if constant is None or not constant.numel():
        return None
    first = constant.flatten()[0]
    return float(first) if bool((constant == first).all()) else None


def _product(at: Site, node: Any, scale: float) -> Scores | None:
    if is_of(node, aten.baddbmm.default):
        return _added_product(at, node, scale)
    if is_of(node, aten.linear.default):  # keys that are a constant matrix
        arguments = bind(node)
        if arguments["bias"] is not None:
            return None
        query, key = _operand(at, arguments["input"]), Operand(arguments["weight"], 1.0)
    elif is_of(node, *MATMULS):
        query, key = _operand(at, node.args[0]), _operand(at, node.args[1])
    else:
        return None
    if min(len(at.type(x).shape) for x in (query.x, key.x)) < 2:
        return None
    if is_of(node, *MATMULS):
        key = replace(key, axes=_swapped(at, key))
    return Scores(query, key, node, scale * query.number * key.number, (), (node,))


def _added_product(at: Site, node: fx.Node, scale: float) -> Scores | None:
    arguments = bind(node)
    added, beta, alpha = arguments["self"], literal(at, arguments["beta"]), literal(at, arguments["alpha"])
    if beta is None or alpha is None:
        return None
    query, key = _operand(at, arguments["batch1"]), _operand(at, arguments["batch2"])
    masks = (Mask(added, at.type(node).shape, beta * scale),) if beta else ()
    key = replace(key, axes=_swapped(at, key))
    return Scores(query, key, node, scale * alpha * query.number * key.number, masks, (node,))


def _operand(at: Site, node: Any) -> Operand:
    """Numbers and a permute taken off, the numbers as far as nothing else uses the value."""
    number, axes = 1.0, None
    while True:
        factor, move = _factor(at, node), moved(at, node)
        if factor is not None and len(node.users) == 1 and at.type(node).shape == _shape(at, factor[0]):
            node, number = factor[0], number * factor[1]
        elif move is not None and axes is None:
            node, axes = move[0], tuple(move[1])
        else:
            return Operand(node, number, axes)


def _shape(at: Site, value: Any) -> tuple[int, ...]:
    return at.type(value).shape if at.is_tensor(value) else ()


def _swapped(at: Site, key: Operand) -> tuple[int, ...]:
    """The axes of the transposed key, its last two exchanged back."""
    axes = key.axes or tuple(range(len(at.type(key.x).shape)))
    return (*axes[:-2], axes[-1], axes[-2])
