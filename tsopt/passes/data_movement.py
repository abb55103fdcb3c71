"""Data movement: permutes, reshapes and expands that cancel or combine, and scales that go before them.

Expects canonicalized programs. All EXACT, because values are only moved; the driver compares the memory layout.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from tsopt.compiler.graph.ops import aten, bind
from tsopt.compiler.rewriting.rewrite import Site, rule
from tsopt.passes import slices
from tsopt.passes.constants import rounds_by_place
from tsopt.passes.slices import SHARED


@rule(lambda x, p, q: aten.permute.default(aten.permute.default(x, p), q))
def permute_permute(at, x, p, q):
    """permute(permute(x, p), q) -> permute(x, p[q]), or x when they cancel"""
    axes = [p[i] % len(p) for i in q]
    return x if axes == sorted(axes) else at.call(aten.permute.default, x, axes)


@rule(lambda x, p: aten.permute.default(x, p))
def permute_ones(at, x, p):
    """permute(x, p) -> reshape(x, ...) where only axes of size 1 move, or x where the shape does not change"""
    shape = at.type(x).shape
    order = [axis % len(shape) for axis in p if shape[axis] != 1]
    if order != sorted(order):
        return None
    return x if at.same_type(x) else at.call(aten.reshape.default, x, list(at.type(at.root).shape))


@rule(lambda x, s, t: aten.reshape.default(aten.reshape.default(x, s), t))
def reshape_reshape(at, x, s, t):
    """reshape(reshape(x, s), t) -> reshape(x, t), or x when they cancel"""
    return x if at.same_type(x) else at.call(aten.reshape.default, x, list(at.type(at.root).shape))


def _undone(x, p, s, q):
    return aten.permute.default(aten.reshape.default(aten.permute.default(x, p), s), q)


def _undone_in_two(x, p, s, t, q):
    return aten.permute.default(aten.reshape.default(aten.reshape.default(aten.permute.default(x, p), s), t), q)


@rule(
    _undone,
    _undone_in_two,
    # With the reshape that follows: it copies if only the strides of the permute differ from those of x.
    lambda x, p, s, q, u: aten.reshape.default(_undone(x, p, s, q), u),
    lambda x, p, s, t, q, u: aten.reshape.default(_undone_in_two(x, p, s, t, q), u),
)
def permute_reshape_permute(at, x, p, *_):
    """permute(reshape(permute(x, p), s), q) -> reshape(x, ...), or x, where the permutes cancel"""
    last: Any = at.root if at.root.target is aten.permute.default else at.root.args[0]
    if not is_undone(at.type(x).shape, p, at.type(last.args[0]).shape, last.args[1]):
        return None
    return x if at.same_type(x) else at.call(aten.reshape.default, x, list(at.type(at.root).shape))


def is_undone(shape: tuple[int, ...], p: list[int], middle: tuple[int, ...], q: list[int]) -> bool:
    """Whether permute, reshape to `middle` and permute leave the elements in their order.

    What is permuted is cut into pieces of (size, stride in x) that the reshape keeps whole; then the strides tell.
    """
    if 0 in shape:
        return False
    pieces: list[tuple[int, int]] = []  # innermost last
    for axis in (axis % len(shape) for axis in p):
        size, stride = shape[axis], math.prod(shape[axis + 1 :])
        if pieces and pieces[-1][1] == size * stride:
            size *= pieces.pop()[0]
        pieces.append((size, stride))
    strides: list[list[int]] = []
    for wanted in reversed(middle):
        strides.insert(0, [])
        while wanted > 1:
            size, stride = pieces.pop()
            taken = min(size, wanted)
            if size % taken or wanted % taken:
                return False
            wanted //= taken
            strides[0][:0] = [stride] if taken > 1 else []
            if size > taken:
                pieces.append((size // taken, stride * taken))
    order = [stride for axis in q for stride in strides[axis]]
    return order == sorted(order, reverse=True)


@rule(
    lambda x, s, i, t, j: aten.expand.default(aten.expand.default(x, s, implicit=i), t, implicit=j),
)
def expand_expand(at, x, *_):
    """expand(expand(x, s), t) -> expand(x, t)"""
    return at.call(aten.expand.default, x, list(at.type(at.root).shape))


_ELEMENTWISE = (
    *(getattr(aten, name).Tensor for name in ("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge")),
    *(getattr(aten, name).default for name in ("maximum", "minimum", "logical_and", "logical_or")),
    *(getattr(aten, name).Tensor for name in ("bitwise_and", "bitwise_or")),
)


def _binary(op: Any) -> Any:
    return lambda x, y: op(x, y)


@rule(*map(_binary, _ELEMENTWISE), lambda c, x, y: aten.where.self(c, x, y))
def expand_dropped(at, *operands):
    """expand(x) + y -> x + y where y has the full shape; also for where and comparisons, and for either operand"""
    for position, value in enumerate(operands):
        if not isinstance(value, fx.Node) or value.target is not aten.expand.default:
            continue
        inner: Any = value.args[0]
        others = [at.type(o) for i, o in enumerate(operands) if i != position and at.is_tensor(o)]
        # NOTE: a 0-d value promotes less than its expansion does.
        promotes_less = not at.type(inner).shape and any(o.dtype != at.type(inner).dtype for o in others)
        shape = torch.broadcast_shapes(at.type(inner).shape, *(o.shape for o in others))
        if not promotes_less and not rounds_by_place(at, inner) and shape == at.type(at.root).shape:
            return at.call(at.root.target, *operands[:position], inner, *operands[position + 1 :])
    return None


_MOVES = (aten.permute.default, aten.reshape.default, aten.expand.default)
_LAYERS = (
    aten.linear.default,
    *(getattr(getattr(aten, f"conv{n}d"), kind) for n in (1, 2, 3) for kind in ("default", "padding")),
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
)


@rule(lambda x, c: aten.mul.Tensor(x, c), lambda x, c: aten.div.Tensor(x, c))
def scale_before_moves(at, x, c):
    """permute(linear(x, w)) * c -> permute(linear(x, w) * c), c a literal, w a constant that c can be folded into"""
    if not isinstance(c, (int, float)) or isinstance(c, bool) or not at.same_type(x):
        return None
    moves: list[Any] = []
    while x.target in _MOVES and len(x.users) == 1:
        moves.insert(0, x)
        x = x.args[0]
    if not moves or not _has_constant_weight(at, x):
        return None
    if len(x.users) > 1:
        return at.skip(SHARED)
    value = at.call(at.root.target, x, c)
    for move in moves:
        value = at.call(move.target, value, *move.args[1:])
    return value


def _has_constant_weight(at: Site, layer: fx.Node) -> bool:
    if layer.target is aten.matmul.default:
        return any(at.value(operand) is not None for operand in layer.args)
    return layer.target in _LAYERS and at.value(bind(layer)["weight"]) is not None


RULES = (
    permute_permute,
    permute_ones,
    reshape_reshape,
    permute_reshape_permute,
    expand_expand,
    expand_dropped,
    *slices.RULES,
    scale_before_moves,
)
