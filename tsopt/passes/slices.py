"""Slices, splits, concatenations and stacks that cancel or combine. Expects canonicalized programs. All EXACT."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from tsopt.compiler.graph.ops import aten, bind
from tsopt.compiler.rewriting.rewrite import Site, rule

SHARED = "the inner value has other users"


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
        if not part.is_index:  # a slice keeps the axis, and may be empty
            return None
        chosen = joined["tensors"][part.start]
        return chosen if at.same_type(chosen) else None  # not promoted
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


RULES = (slice_slice, part_of_joined, cat_cat, cat_neighbours, stack_unbind)
