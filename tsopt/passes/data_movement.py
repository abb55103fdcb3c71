"""Data movement: permutes, reshapes, expands, slices, concatenations and stacks that cancel or combine.

Expects canonicalized programs. All EXACT, because values are only moved; the driver compares the memory layout.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tsopt.compiler.graph.ops import aten, bind
from tsopt.compiler.rewriting.rewrite import Site, rule

SHARED = "the inner value has other users"

# ---- permute, reshape, expand -------------------------------------------------------------------------------


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
        others = [at.type(o) for i, o in enumerate(operands) if i != position and isinstance(o, fx.Node)]
        # NOTE: a 0-d value promotes less than its expansion does.
        promotes_less = not at.type(inner).shape and any(o.dtype != at.type(inner).dtype for o in others)
        shape = torch.broadcast_shapes(at.type(inner).shape, *(o.shape for o in others))
        if not promotes_less and shape == at.type(at.root).shape:
            return at.call(at.root.target, *operands[:position], inner, *operands[position + 1 :])
    return None


# ---- slice, split, cat, stack -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """`source[start:stop:step]` on one axis; with `is_index` `source[start]`, without the axis."""

    source: fx.Node
    axis: int
    start: int
    stop: int
    step: int = 1
    is_index: bool = False


_SPLITS = (
    aten.split.Tensor,
    aten.split.sizes,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.tensor_split.sections,
)


def part_of(at: Site, node: fx.Node) -> Part | None:
    """What a slice, a select, or one of the results of a split or an unbind is a part of."""
    if node.target is operator.getitem:
        return _part_of_split(at, node)
    if node.target not in (aten.slice.Tensor, aten.select.int):
        return None
    bound = bind(node)
    shape = at.type(bound["self"]).shape
    axis = bound["dim"] % len(shape)
    if node.target is aten.select.int:
        index = bound["index"] % shape[axis]
        return Part(bound["self"], axis, index, index + 1, is_index=True)
    start, stop, step = slice(bound["start"], bound["end"], bound["step"]).indices(shape[axis])
    return Part(bound["self"], axis, start, max(start, stop), step)


def _part_of_split(at: Site, node: fx.Node) -> Part | None:
    split: Any = node.args[0]
    index: Any = node.args[1]
    if split.target not in (*_SPLITS, aten.unbind.int):
        return None
    bound = bind(split)
    axis = bound["dim"] % len(at.type(bound["self"]).shape)
    if split.target is aten.unbind.int:
        return Part(bound["self"], axis, index, index + 1, is_index=True)
    sizes = [part.shape[axis] for part in split.meta["val"]]
    return Part(bound["self"], axis, sum(sizes[:index]), sum(sizes[: index + 1]))


def take(at: Site, part: Part) -> fx.Node:
    """A part in its canonical form: the source itself, a slice, a select, or a reshape for an axis of size 1."""
    shape = at.type(part.source).shape
    size = shape[part.axis]
    if part.is_index and size == 1:
        return at.call(aten.reshape.default, part.source, [*shape[: part.axis], *shape[part.axis + 1 :]])
    if part.is_index:
        return at.call(aten.select.int, part.source, part.axis, part.start)
    if (part.start, part.stop, part.step) == (0, size, 1):
        return part.source
    step = () if part.step == 1 else (part.step,)
    return at.call(aten.slice.Tensor, part.source, part.axis, part.start, part.stop, *step)


@rule(
    lambda x, d, s, e, k, d2, s2, e2, k2: aten.slice.Tensor(aten.slice.Tensor(x, d, s, e, k), d2, s2, e2, k2),
    lambda x, d, s, e, k, d2, i: aten.select.int(aten.slice.Tensor(x, d, s, e, k), d2, i),
)
def slice_slice(at, x, *_):
    """x[a:b:i][c:d:j] -> x[a + c * i : ... : i * j] on the same axis; also x[a:b][c] -> x[a + c]"""
    outer, inner = part_of(at, at.root), part_of(at, at.root.args[0])
    assert outer is not None, "every pattern is a slice or a select"
    assert inner is not None, "every pattern has a slice inside"
    if outer.axis != inner.axis:
        return None
    count = -(-(outer.stop - outer.start) // outer.step)
    start, step = inner.start + outer.start * inner.step, inner.step * outer.step
    if not count:
        return take(at, replace(inner, stop=inner.start, step=1))
    return take(at, Part(x, inner.axis, start, start + (count - 1) * step + 1, step, outer.is_index))


@rule(
    lambda x, d, s, e, k: aten.slice.Tensor(x, d, s, e, k),
    lambda x, d, i: aten.select.int(x, d, i),
    lambda parts, i: operator.getitem(parts, i),
)
def part_of_joined(at, *_):
    """cat([x, y])[a:b] -> x[a:b] if it is within x; stack([x, y])[1] -> y; also for the results of split and unbind"""
    part = part_of(at, at.root)
    if part is None or part.source.target not in (aten.cat.default, aten.stack.default):
        return None
    joined = bind(part.source)
    whole = at.type(part.source)
    if joined["dim"] % len(whole.shape) != part.axis:
        return None
    if part.source.target is aten.stack.default:
        chosen = joined["tensors"][part.start]
        return chosen if at.same_type(chosen) else None  # not promoted, nor a slice, which keeps the axis
    begin = 0
    for x in joined["tensors"]:
        piece = at.type(x)
        if piece.dtype != whole.dtype or len(piece.shape) != len(whole.shape):
            return None  # promoted by cat, or an empty vector that cat leaves out
        end = begin + piece.shape[part.axis]
        if begin <= part.start and part.stop <= end:
            return take(at, replace(part, source=x, start=part.start - begin, stop=part.stop - begin))
        begin = end
    return None


@rule(lambda xs, dim: aten.cat.default(xs, dim))
def cat_cat(at, xs, dim):
    """cat([x, cat([y, z])]) -> cat([x, y, z]) on the same axis"""
    flat = [piece for x in xs for piece in _pieces(at, x)]
    if len(flat) == len(xs):
        return None
    if any(len(x.users) > 1 for x in xs if len(_pieces(at, x)) > 1):
        return at.skip(SHARED)
    return at.call(aten.cat.default, flat, dim)


def _pieces(at: Site, x: fx.Node) -> list[fx.Node]:
    """The operands of a concatenation on the axis of the root; for anything else, the value itself."""
    if x.target is not aten.cat.default:
        return [x]
    bound, whole, rank = bind(x), at.type(x), len(at.type(at.root).shape)
    pieces: list[fx.Node] = bound["tensors"]
    alike = all(at.type(p).dtype == whole.dtype and len(at.type(p).shape) == rank for p in pieces)
    return pieces if alike and bound["dim"] % rank == bind(at.root)["dim"] % rank else [x]


@rule(lambda xs, dim: aten.cat.default(xs, dim))
def cat_neighbours(at, xs, dim):
    """cat([x[:2], x[2:5], y]) -> cat([x[:5], y]), cat(x.split(2)) -> x"""
    axis = dim % len(at.type(at.root).shape)
    runs: list[tuple[list[fx.Node], Part | None]] = []
    for x in xs:
        part = part_of(at, x)
        part = part if part and part.axis == axis and part.step == 1 and not part.is_index else None
        before = runs[-1][1] if runs else None
        if part and before and (part.source, part.start) == (before.source, before.stop):
            runs[-1] = ([*runs[-1][0], x], replace(before, stop=part.stop))
        else:
            runs.append(([x], part))
    pieces = [piece for nodes, part in runs for piece in _joined(at, nodes, part)]
    if len(pieces) == len(xs):
        return None
    return pieces[0] if len(pieces) == 1 else at.call(aten.cat.default, pieces, dim)


def _joined(at: Site, nodes: list[fx.Node], part: Part | None) -> list[fx.Node]:
    """One value for neighbouring parts; the parts as they are where that makes no call less."""
    if part is None or len(nodes) == 1:
        return nodes
    is_whole = (part.start, part.stop) == (0, at.type(part.source).shape[part.axis])
    return [take(at, part)] if is_whole or all(len(node.users) == 1 for node in nodes) else nodes


@rule(lambda xs, dim: aten.stack.default(xs, dim))
def stack_unbind(at, xs, dim):
    """stack([x[0], x[1], x[2]]) -> x, stack(x.unbind()) -> x"""
    axis, parts = dim % len(at.type(at.root).shape), [part_of(at, x) for x in xs]
    first = parts[0]
    if first is None or not at.same_type(first.source):
        return None
    wanted = [Part(first.source, axis, i, i + 1, is_index=True) for i in range(len(xs))]
    return first.source if parts == wanted else None


# ---- scales -------------------------------------------------------------------------------------------------

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
    slice_slice,
    part_of_joined,
    cat_cat,
    cat_neighbours,
    stack_unbind,
    scale_before_moves,
)
