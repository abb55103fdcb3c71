"""Recomposes handwritten attention into scaled_dot_product_attention, and removes the copies that this leaves.

The op is always called on four axes, and on operands whose last axis is dense: anything else, and a value
with a different width than the query, takes a path in PyTorch that is slower than the formula.

NOTE: the kernel on CPU returns 0 where all scores of a row are NaN (torch 2.13): NaN in a query is lost there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tsopt.compiler.graph.ops import aten, bind
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.rewriting.rewrite import USED_ELSEWHERE, Site, Skip, rule
from tsopt.passes.recompose.formulas import RESHAPES, is_float, is_of, near
from tsopt.passes.recompose.layouts import (
    CASTS,
    COPIES,
    in_layout_of_root,
    moved,
    permuted,
    reshaped,
    widens,
    with_last_axes_swapped,
)
from tsopt.passes.recompose.masks import Grid, Known, choose
from tsopt.passes.recompose.scores import Operand, read_weights

MORE_VALUES = "the values have batch dimensions that the queries lack"
OTHER_WIDTH = "the values have a different width than the queries"
LIKE = (
    aten.full_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
)  # they depend only on the shape of the scores
MASK_SHAPE = "the shape of the mask does not match batch and heads"
MIXED_DTYPES = "the queries or keys have a different dtype than the values"


def _value(at: Site, operand: Operand, dtype: torch.dtype) -> fx.Node:
    """The operand as a value; of casts only what the dtype asks for."""
    x: Any = operand.x
    while x.meta["val"].dtype != dtype and x.target in CASTS and is_float(at, x.args[0]) and widens(at, x):
        x = x.args[0]
    return x if operand.axes is None else permuted(at, x, operand.axes)


def _on_four_axes(at: Site, x: fx.Node, whole: Sequence[int], lead: Sequence[int]) -> fx.Node:
    """[..., n, width], broadcast to leading axes and with these as batch and heads; the last axis is dense."""
    last = list(at.type(x).shape[-2:])
    if list(at.type(x).shape[:-2]) != list(whole):
        x = at.call(aten.expand.default, x, [*whole, *last])
    x = reshaped(at, x, [*lead, *last])
    if last[1] > 1 and at.type(x).stride[-1] != 1:
        x = at.call(aten.clone.default, x, memory_format=torch.contiguous_format)
    return x


def attend(at: Site, p: fx.Node, v: fx.Node, inside: Sequence[fx.Node] = ()) -> fx.Node | Skip | None:
    """The op for softmax(...) @ v, in the shape of that product.

    Args:
        p: the softmax, or what was made of it.
        inside: values between p and the root, which are gone as well.
    """
    if len(at.type(v).shape) < 2:
        return None
    dtype, outer = v.meta["val"].dtype, at.type(p).shape
    found = read_weights(at, p, dtype)
    if found is None:
        return None
    if torch.broadcast_shapes(outer[:-2], at.type(v).shape[:-2]) != outer[:-2]:
        return at.skip(MORE_VALUES)
    scores = found.scores
    query, key = _value(at, scores.query, dtype), _value(at, scores.key, dtype)
    for factor in scores.by_head:
        query = at.call(aten.mul.Tensor, query, factor)
    inner, width = at.type(scores.product).shape, at.type(query).shape[-1]
    if not 0 < scores.scale < math.inf or 0 in (*inner, width):
        return None
    if query.meta["val"].dtype != dtype or key.meta["val"].dtype != dtype:
        return at.skip(MIXED_DTYPES)
    if at.type(v).shape[-1] != width:
        return at.skip(OTHER_WIDTH)
    gone = {at.root, *inside, *found.inside}
    gone |= {user for node in gone for user in node.users if is_of(user, *LIKE) and gone >= set(user.users)}
    if any(user not in gone for node in gone - {at.root} for user in node.users):
        return Skip(USED_ELSEWHERE)
    grid = Grid.of([inner, outer, *(mask.shape for mask in scores.masks)])
    if grid is None:
        return at.skip(MASK_SHAPE)
    chosen = choose(at, scores.masks, grid, dtype, found.zeroed)
    if chosen is None or isinstance(chosen, Skip):
        return chosen
    mask, causal = chosen
    fitted = at.type(mask).shape if mask is not None else (1,) * (len(grid.sizes) + 2)
    halves = grid.split(fitted, inner[0] if len(inner) == 4 else math.prod(inner[:-3]))
    if halves is None:
        return at.skip(MASK_SHAPE)
    lead, mask_lead = halves
    made = at.call(
        aten.scaled_dot_product_attention.default,
        _on_four_axes(at, query, inner[:-2], lead),
        _on_four_axes(at, key, inner[:-2], lead),
        _on_four_axes(at, v, outer[:-2], lead),
        mask if mask is None else reshaped(at, mask, [*mask_lead, *fitted[-2:]]),
        0.0,
        causal,
        scale=None if near(at, scores.scale, 1 / math.sqrt(width)) else scores.scale,
    )
    return reshaped(at, made, [*outer[:-1], width])


@rule(lambda p, v: aten.matmul.default(p, v), lambda p, v: aten.bmm.default(p, v), numerics=Numerics.ROUNDING)
def attention(at, p, v):
    """softmax(q @ k^T * c + mask) @ v -> scaled_dot_product_attention(q, k, v, mask, scale=c)"""
    made = attend(at, p, v)
    return in_layout_of_root(at, made) if isinstance(made, fx.Node) else made


@rule(lambda v, p: aten.matmul.default(v, p), lambda v, p: aten.bmm.default(v, p), numerics=Numerics.ROUNDING)
def attention_transposed(at, v, p):
    """v^T @ softmax(q @ k^T * c + mask)^T -> scaled_dot_product_attention(q, k, v, mask, scale=c)^T"""
    move, rank = moved(at, p), len(at.type(p).shape)
    if move is None or move[1] != [*range(rank - 2), rank - 1, rank - 2] or len(at.type(v).shape) < 2:
        return None
    made = attend(at, move[0], with_last_axes_swapped(at, v), inside=(p,))
    return in_layout_of_root(at, with_last_axes_swapped(at, made)) if isinstance(made, fx.Node) else made


# ---- calls of the op --------------------------------------------------------------------------------------


@rule(
    lambda q, k, v, m, p, s, g: aten.scaled_dot_product_attention.default(q, k, v, m, p, False, scale=s, enable_gqa=g),
    numerics=Numerics.ROUNDING,
)
def plain_mask(at, q, k, v, m, p, s, g):
    """scaled_dot_product_attention(..., a causal mask) -> (..., is_causal=True); a mask that hides nothing goes away"""
    value = at.value(m)
    if value is None or not value.numel():
        return None
    dtype, rows, columns = q.meta["val"].dtype, at.type(q).shape[-2], at.type(k).shape[-2]
    value, nothing = value.cpu(), torch.zeros(1, 1, device="cpu")
    said = Known(~value, nothing) if value.dtype == torch.bool else Known(nothing.bool(), value)
    if not said.is_nothing() and not said.is_causal(rows, columns, dtype):
        return None
    causal = not said.is_nothing()
    return at.call(at.root.target, q, k, v, None, p, causal, scale=s, enable_gqa=g)


@rule(
    lambda q, k, v, m, p, c, s: aten.scaled_dot_product_attention.default(q, k, v, m, p, c, scale=s),
    numerics=Numerics.ROUNDING,
)
def grouped_heads(at, q, k, v, m, p, c, s):
    """scaled_dot_product_attention(q, repeated k, repeated v) -> (q, k, v, enable_gqa=True)"""
    keys, values = _repeated(at, k), _repeated(at, v)
    if keys is None or values is None or keys[1] != values[1]:
        return None
    k, v = (reshaped(at, x, shape) for x, _, shape in (keys, values))
    return at.call(at.root.target, q, k, v, m, p, c, scale=s, enable_gqa=True)


def _repeated(at: Site, node: Any) -> tuple[fx.Node, int, list[int]] | None:
    """(x, times, shape of x) of [batch, heads * times, n, width], each head of x repeated on its place."""
    shape = at.type(node).shape
    if len(shape) != 4:
        return None
    if node.target is aten.repeat_interleave.self_int:
        arguments = bind(node)
        times, inner = arguments["repeats"], arguments["self"]
        on_heads = arguments["dim"] in (1, -3) and times > 1
        return (inner, times, list(at.type(inner).shape)) if on_heads else None
    wide: Any = node.args[0] if node.target in RESHAPES else None
    if not is_of(wide, aten.expand.default) or len(at.type(wide).shape) != 5:
        return None
    inner, (batch, heads, times, n, width) = wide.args[0], at.type(wide).shape
    if at.type(inner).shape != (batch, heads, 1, n, width) or shape != (batch, heads * times, n, width) or times < 2:
        return None
    if is_of(inner, *RESHAPES) and at.type(inner.args[0]).shape == (batch, heads, n, width):
        inner = inner.args[0]
    return inner, times, [batch, heads, n, width]


# ---- the copies that are left -----------------------------------------------------------------------------


@rule(
    lambda y, s: aten.reshape.default(y, s),
    lambda y, s: aten.view.default(y, s),
    lambda y, m: aten.clone.default(y, memory_format=m),
    lambda y, m: aten.contiguous.default(y, memory_format=m),
)
def copy_before_copy(at, y, *_):
    """reshape(permute(clone(x), p), s) -> reshape(permute(x, p), s): the reshape copies anyway; also a second clone"""
    move = moved(at, y)
    copy = y if move is None else move[0]
    if not is_of(copy, *COPIES) or len(y.users) > 1 or len(copy.users) > 1:
        return None
    x: Any = copy.args[0]
    made = x if move is None else permuted(at, x, move[1])
    if not is_of(at.root, *COPIES):
        made = at.call(aten.reshape.default, made, list(at.type(at.root).shape))
    elif not at.type(made).matches(at.type(at.root)):
        made = at.call(at.root.target, made, **at.root.kwargs)
    return made if at.type(made).matches(at.type(at.root)) else None


RULES = (attention, attention_transposed, plain_mask, grouped_heads, copy_before_copy)
