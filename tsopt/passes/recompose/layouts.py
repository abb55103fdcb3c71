"""Axes, casts and layouts of values: looks through permutes and copies, and creates the calls that rules need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from tsopt.compiler.graph.ops import aten
from tsopt.compiler.rewriting.rewrite import Site
from tsopt.passes.algebra import holds
from tsopt.passes.recompose.formulas import is_float, is_of

CASTS = (aten.to.dtype, aten._to_copy.default)
COPIES = (aten.clone.default, aten.contiguous.default)


def uncast(at: Site, node: fx.Node) -> fx.Node:
    """The value before casts between floating-point types that lose nothing of it."""
    while node.target in CASTS and is_float(at, node) and is_float(at, node.args[0]):
        source: Any = node.args[0]
        if at.type(source).device != at.type(node).device or not widens(at, node):
            break
        node = source
    return node


def widens(at: Site, cast: fx.Node) -> bool:
    """Whether every value that a cast is given is one of its dtype."""
    source: Any = cast.args[0]
    return holds(cast.meta["val"].dtype, at.type(source).dtype)


def rounds_no_more_than_root(at: Site, cast: fx.Node) -> bool:
    """Whether a cast loses nothing, or no more than the dtype of the root does."""
    return widens(at, cast) or holds(cast.meta["val"].dtype, at.type(at.root).dtype)


def rearranged(at: Site, node: Any) -> tuple[Any, list[int]]:
    """(x, axes) of a value that is x permuted, and copied on the way, any number of times."""
    axes = list(range(len(at.type(node).shape) if at.is_tensor(node) else 0))
    while True:
        move = moved(at, node)
        if move is None and not is_of(node, *COPIES):
            return node, axes
        node, inner = (node.args[0], None) if move is None else move
        axes = axes if inner is None else [inner[axis] for axis in axes]


def uncopied(at: Site, node: fx.Node) -> Any:
    """The value that a clone is a copy of, also where it was permuted for the copy and back; else the node itself."""
    x, axes = rearranged(at, node)
    return x if axes == sorted(axes) else node


def moved(at: Site, node: Any) -> tuple[fx.Node, list[int]] | None:
    """(x, axes) of a permute, transpose or t, as axes of permute that count from 0."""
    if not is_of(node, aten.permute.default, aten.transpose.int, aten.t.default):
        return None
    x: fx.Node = node.args[0]
    rank = len(at.type(x).shape)
    axes = list(range(rank))
    if node.target is aten.permute.default:
        return x, [axis % max(rank, 1) for axis in node.args[1]]
    if node.target is aten.t.default:
        return x, axes[::-1]
    i, j = node.args[1:3]
    if rank:
        axes[i], axes[j] = axes[j], axes[i]
    return x, axes


def permuted(at: Site, node: fx.Node, axes: Sequence[int]) -> fx.Node:
    """The value with its axes in an order; itself where that is its own."""
    return node if list(axes) == sorted(axes) else at.call(aten.permute.default, node, list(axes))


def with_last_axes_swapped(at: Site, node: fx.Node) -> fx.Node:
    """The value with its last two axes exchanged, the move that it may come from undone."""
    rank = len(at.type(node).shape)
    swap = [*range(rank - 2), rank - 1, rank - 2]
    found = moved(at, node)
    if found is not None:
        node, axes = found
        swap = [axes[i] for i in swap]
    return permuted(at, node, swap)


def in_layout_of_root(at: Site, node: fx.Node) -> fx.Node:
    """The value with the strides of the root, copied where its own are others.

    A composite op may write its result in another layout than the formula did; the copy is one pass over
    the values, the formula is several.
    """
    wanted = at.type(at.root)
    if at.type(node).shape != wanted.shape or wanted.same_layout(at.type(node).stride):
        return node
    order = sorted(range(len(wanted.shape)), key=lambda i: -wanted.stride[i])
    copy = at.call(aten.clone.default, permuted(at, node, order), memory_format=torch.contiguous_format)
    return permuted(at, copy, [order.index(i) for i in range(len(order))])


def reshaped(at: Site, node: fx.Node, shape: Iterable[int]) -> fx.Node:
    """The value in a shape; itself where it has it."""
    sizes = list(shape)
    return node if list(at.type(node).shape) == sizes else at.call(aten.reshape.default, node, sizes)


def parameter(
    at: Site, value: fx.Node, shape: Sequence[int], like: fx.Node, axes: Sequence[int] | None = None
) -> fx.Node | None:
    """A constant operand as the parameter of a layer: without the leading axes of size 1; None where it has others.

    Args:
        shape: of the parameter.
        like: a value of its dtype.
        axes: what the other operand is a permute of the layer's result by; None where it is no permute.
    """
    tensor = at.value(value)
    if tensor is None or tensor.dtype != like.meta["val"].dtype:
        return None
    if axes is not None and list(axes) != sorted(axes):
        if tensor.dim() > len(axes):
            return None
        tensor = tensor.reshape([1] * (len(axes) - tensor.dim()) + list(tensor.shape))
        tensor = tensor.permute([axes.index(axis) for axis in range(len(axes))])
    sizes, own = list(shape), list(tensor.shape)
    if own == sizes and tensor is at.value(value):
        return value
    if own != [1] * (len(own) - len(sizes)) + sizes:
        return None
    return at.constant(tensor.reshape(sizes), f"{value.target}.parameter")
