"""Formulas as people write them, drawn in one of their many forms: the order of factors, literals or constant tensors,
a division for a product, a number beside the right one.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from hypothesis import strategies as st
from torch import fx

from tests.passes.program_builder import Builder
from tests.passes.random_calls import DATA_MOVEMENT, FILL, make, rank
from tsopt.compiler.graph.ops import aten

Value = fx.Node | None


def number(b: Builder, x: fx.Node, value: float) -> Any:
    """A literal, or a constant tensor that holds it."""
    if b.often(5):
        return value
    return b.weight(torch.full(b.pick([(), (1,)]), value, dtype=b.fake(x).dtype))


def plus(b: Builder, x: Value, y: Any) -> Value:
    """x + y in one of the ways to write it."""
    if x is None or y is None:
        return None
    if isinstance(y, fx.Node):
        return b.call(aten.add.Tensor, *b.pick([(x, y), (y, x)]))
    form = b.integer(0, 4)
    if form == 4:
        return b.call(aten.sub.Tensor, x, -y)
    pair = (x, number(b, x, y))
    return b.call(aten.add.Tensor, *(pair[::-1] if form == 3 and isinstance(pair[1], fx.Node) else pair))


def minus(b: Builder, x: Value, y: Value) -> Value:
    if x is None or y is None:
        return None
    return b.call(aten.sub.Tensor, x, y) if b.often() else plus(b, x, b.call(aten.neg.default, y))


def times(b: Builder, x: Value, y: Any) -> Value:
    """x * y in one of the ways to write it."""
    if x is None or y is None:
        return None
    if isinstance(y, fx.Node):
        return b.call(aten.mul.Tensor, *b.pick([(x, y), (y, x)]))
    form = b.integer(0, 4)
    if form == 4 and y:
        return b.call(aten.div.Tensor, x, number(b, x, 1 / y))
    pair = (x, number(b, x, y))
    return b.call(aten.mul.Tensor, *(pair[::-1] if form == 3 and isinstance(pair[1], fx.Node) else pair))


def over(b: Builder, x: Value, y: Value) -> Value:
    if x is None or y is None:
        return None
    return b.call(aten.div.Tensor, x, y) if b.often() else times(b, x, b.call(aten.reciprocal.default, y))


def product(b: Builder, *factors: Any) -> Value:
    """The product of some values and numbers in any order of multiplication."""
    left = list(b.draw(st.permutations(factors)))
    if not isinstance(left[0], fx.Node):
        left.sort(key=lambda factor: not isinstance(factor, fx.Node))
    while len(left) > 1:
        x, y = left.pop(0), left.pop(0)
        x, y = (x, y) if isinstance(x, fx.Node) else (y, x)
        made = times(b, x, y) if isinstance(x, fx.Node) else x * y
        left.insert(b.integer(0, len(left)) if isinstance(made, fx.Node) else len(left), made)
        if made is None:
            return None
    return left[0]


def square(b: Builder, x: Value) -> Value:
    if x is None:
        return None
    return b.call(aten.pow.Tensor_Scalar, x, b.pick((2, 2.0))) if b.integer(0, 1) else b.call(aten.mul.Tensor, x, x)


def averaged(b: Builder, x: Value, dims: list[int], keep: bool = True) -> Value:
    if x is None or b.often(3):
        return b.call(aten.mean.dim, x, dims, keep)
    count = math.prod(b.fake(x).shape[d] for d in dims)
    return times(b, b.call(aten.sum.dim_IntList, x, dims, keep), 1 / count) if count else None


def gelu(b: Builder) -> Value:
    x = b.wanted(rank(0, 4))
    if x is None:
        return None
    if b.integer(0, 1):
        inner = b.call(aten.erf.default, times(b, x, b.near(math.sqrt(0.5))))
    else:
        power = b.pick((3.0, 3))
        cube = b.call(aten.pow.Tensor_Scalar, x, power) if b.integer(0, 1) else times(b, square(b, x), x)
        outer = plus(b, x, times(b, cube, b.near(0.044715)))
        inner = b.call(aten.tanh.default, times(b, outer, b.near(math.sqrt(2 / math.pi))))
    return product(b, x, b.near(0.5), plus(b, inner, b.near(1.0)))


def gate(b: Builder) -> Value:
    """silu, quick gelu, hardswish, hardsigmoid, mish and their like."""
    x = b.wanted(rank(0, 4))
    if x is None:
        return None
    kind = b.integer(0, 4)
    if kind == 0:
        return times(b, x, b.call(aten.sigmoid.default, times(b, x, b.pick((1.702, 1.0, -1.0)))))
    if kind == 1:
        share = plus(b, b.call(aten.exp.default, b.call(aten.neg.default, x)), b.near(1.0))
        return over(b, x, share) if b.integer(0, 1) else b.call(aten.reciprocal.default, share)
    if kind == 2:
        soft = b.call(aten.log.default, plus(b, b.call(aten.exp.default, x), b.near(1.0)))
        soft = b.pick([soft, b.call(aten.softplus.default, x), b.call(aten.log1p.default, b.call(aten.exp.default, x))])
        return times(b, x, b.call(aten.tanh.default, soft))
    shifted = plus(b, x, b.near(3.0))
    clipped = b.pick([aten.relu6.default, None])
    ramp = b.call(clipped, shifted) if clipped else b.call(aten.clamp.default, shifted, b.near(0.0), b.near(6.0))
    return times(b, ramp, b.near(1 / 6)) if kind == 3 else product(b, x, ramp or 1.0, b.near(1 / 6))


def norm(b: Builder) -> Value:
    """Layer norm, RMS norm and l2 normalization as they are written out, in a wider type or not."""
    x = b.wanted(rank(1, 4))
    if x is None:
        return None
    dtype, shape = b.fake(x).dtype, b.fake(x).shape
    dims = b.pick(([-1], [-1], [0], [-2, -1] if len(shape) > 1 else [-1]))
    wide = b.often(3)
    x = x if wide else b.call(aten.to.dtype, x, torch.float32)
    kind = b.integer(0, 3)
    if kind == 1:
        variance = b.call(aten.var.correction, x, dims, correction=b.pick((0, 0, 1)), keepdim=True)
    x = minus(b, x, averaged(b, x, dims)) if kind <= 1 else x
    if kind == 3:
        variance = b.call(aten.sum.dim_IntList, square(b, x), dims, True)
    elif kind != 1:
        variance = averaged(b, square(b, x), dims)
    variance = plus(b, variance, b.pick((1e-5, 1e-6, 1.0)))
    if b.integer(0, 1):
        y = times(b, x, b.call(aten.rsqrt.default, variance))
    else:
        y = over(b, x, b.call(aten.sqrt.default, variance))
    y = y if wide else b.call(aten.to.dtype, y, dtype)
    for op in (times, plus):
        if b.often(3) and y is not None:
            y = op(b, y, b.random(shape[-1:], dtype))
    return y


def softmax(b: Builder) -> Value:
    x = b.wanted(rank(1, 4))
    if x is None:
        return None
    dims = b.pick(([-1], [-1], [0]))
    x = minus(b, x, b.call(aten.amax.default, x, dims, True)) if b.often(3) else x
    e = b.call(aten.exp.default, x)
    total = b.call(aten.sum.dim_IntList, e, dims, True)
    if b.often(3):
        return over(b, e, total)
    return minus(b, x, b.call(aten.log.default, total))


def flipped(b: Builder, x: Value) -> Value:
    """The last two axes swapped."""
    if x is None:
        return None
    n = b.fake(x).dim()
    if b.integer(0, 1) and n >= 2:
        return b.call(aten.permute.default, x, [*range(n - 2), n - 1, n - 2])
    return b.call(aten.transpose.int, x, -2, -1)


def attention(b: Builder) -> Value:
    """softmax(q @ k.T * scale + mask) @ v; heads by a view and a transpose, shared heads repeated."""
    x = b.wanted(rank(3, 4))
    if x is None:
        return None
    heads = b.fake(x).dim() == 3 and b.fake(x).shape[-1] % 2 == 0 and b.integer(0, 1)
    dtype, scaled = b.fake(x).dtype, b.integer(0, 2)
    parts = []
    for _ in range(3):
        y = make(b, aten.linear.default, {"input": x}) if b.integer(0, 1) else x
        y = x if y is None or b.fake(y).shape != b.fake(x).shape else y
        if heads:
            n, length, width = b.fake(y).shape
            y = b.call(aten.transpose.int, b.call(aten.view.default, y, [n, length, 2, width // 2]), 1, 2) or y
        parts.append(y)
    q, k, v = parts
    scale = b.near(max(b.fake(q).shape[-1], 1) ** -0.5)
    if b.fake(k).dim() == 4 and not b.integer(0, 3):
        k, v = (b.call(aten.repeat_interleave.self_int, y, 2, 1) or y for y in (k, v))
        q = b.call(aten.cat.default, [q, q], 1) or q
    q = times(b, q, scale) if scaled == 0 else q
    scores = b.call(aten.matmul.default, q, flipped(b, k)) if q is not None else None
    scores = times(b, scores, scale) if scaled == 1 else scores
    if scores is None:
        return None
    length = list(b.fake(scores).shape[-2:])
    kind = b.integer(0, 5)
    if kind == 0:
        scores = plus(b, scores, b.random(length, dtype))
    elif kind == 1:
        scores = b.call(aten.masked_fill.Scalar, scores, b.random(length, torch.bool), b.pick((-1e4, float("-inf"))))
    elif kind == 2:
        mask = b.call(aten.tril.default, b.call(aten.ones.default, length, dtype=torch.bool))
        low = b.call(aten.full.default, [], float("-inf"), dtype=dtype)
        scores = b.call(aten.where.self, mask, scores, low) if mask is not None else scores
    weights = b.call(aten.softmax.int, scores, b.pick((-1, -1, -1, -2)))
    out = b.call(aten.matmul.default, weights, v) if weights is not None else None
    return b.call(aten.transpose.int, out, 1, 2) if heads else out


def linear(b: Builder) -> Value:
    """A linear layer as a product of matrices, and what comes before or after it."""
    x = b.wanted(rank(2, 4))
    if x is None:
        return None
    n, out, dtype = b.fake(x).shape[-1], b.integer(1, 4), b.fake(x).dtype
    w = b.random([out, n], dtype) if b.integer(0, 1) else None
    turned = b.call(aten.t.default, w) if w is not None else b.random([n, out], dtype)
    bias = b.random([out], dtype)
    if turned is not None and b.fake(x).dim() == 2 and b.integer(0, 1):
        return b.call(aten.addmm.default, bias, x, turned)
    y = b.call(aten.matmul.default, x, turned) if turned is not None else None
    return plus(b, y, bias)


def rotary(b: Builder) -> Value:
    """x * cos + rotate_half(x) * sin"""
    x = b.wanted(lambda t: t.is_floating_point() and t.dim() > 0 and t.shape[-1] % 2 == 0)
    if x is None:
        return None
    half, dtype = b.fake(x).shape[-1] // 2, b.fake(x).dtype
    first = b.call(aten.slice.Tensor, x, -1, 0, half)
    second = b.call(aten.slice.Tensor, x, -1, half, b.pick((2 * half, 9223372036854775807)))
    if first is None or second is None:
        return None
    turned = b.call(aten.cat.default, [b.call(aten.neg.default, second), first], b.pick((-1, -1, 0)))
    cos, sin = (b.random([2 * half], dtype) for _ in range(2))
    return plus(b, times(b, x, cos), times(b, turned, sin) if turned is not None else None)


def apart(b: Builder) -> Value:
    """Split, something done to the parts, put together again in some order."""
    x = b.wanted(lambda t: t.dim() > 0)
    dim = b.integer(0, 1)
    parts = b.call(aten.split.Tensor, x, b.integer(1, 2), dim)
    if parts is None:
        return None
    values = [b.call(operator.getitem, parts, i) for i in range(len(parts.meta["val"]))]
    if not b.integer(0, 2):
        values = [b.call(aten.neg.default, value) for value in values]
    values = list(b.draw(st.permutations(values))) if not b.integer(0, 2) else values
    joined = b.call(aten.cat.default, values, dim) if all(v is not None for v in values) else None
    if joined is not None and b.integer(0, 1):
        return b.call(aten.slice.Tensor, joined, dim, b.integer(0, 2), b.integer(1, 4))
    return joined


def layer_then(b: Builder) -> None:
    """A layer and what may be folded into it, in front or behind."""
    target = b.pick((aten.linear.default, aten.conv2d.default, aten.conv1d.default, aten.conv_transpose2d.input))
    x = b.wanted(FILL[target][0])
    if x is None:
        return
    if not b.integer(0, 3):
        x = make(b, b.pick((aten.pad.default, aten.mul.Tensor, aten.add.Tensor)), {"self": x}) or x
    y = make(b, target, {"input": x})
    for _ in range(b.integer(1, 2)):
        if y is None:
            return
        follow = b.pick(
            (aten.batch_norm.default, aten.mul.Tensor, aten.add.Tensor, aten.linear.default, aten.div.Tensor)
        )
        y = make(b, follow, {"input" if follow in FILL else "self": y})


def siblings(b: Builder) -> None:
    """Two or three linear layers on one value, as queries, keys and values are made."""
    x = b.wanted(rank(1, 4))
    for _ in range(b.integer(2, 3)):
        if x is not None:
            make(b, aten.linear.default, {"input": x})


def chain(b: Builder) -> None:
    """One move after the other."""
    x = b.value()
    for _ in range(b.integer(2, 3)):
        if x is None:
            return
        x = make(b, b.pick(DATA_MOVEMENT), {"self": x})


FORMULAS = (gelu, gate, norm, softmax, attention, linear, rotary, apart, layer_then, siblings, chain)
