"""Turns matrix products with constants into linear layers without copying weights; einsum into matmul. All ROUNDING."""

from __future__ import annotations

from typing import Any

from torch import fx

from tsopt.compiler.analysis.large_terms import absorbs
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.rewriting.rewrite import Site, rule
from tsopt.passes.constants import ABSORBS
from tsopt.passes.recompose.attention import attend
from tsopt.passes.recompose.formulas import is_float
from tsopt.passes.recompose.layouts import in_layout_of_root, moved, parameter, permuted, uncopied


def _transposed(at: Site, w: Any) -> fx.Node | None:
    """A constant matrix the other way round, in the same memory."""
    move = moved(at, w)
    if move is not None and move[1] == [1, 0] and at.value(move[0]) is not None:
        return move[0] if is_float(at, w) else None
    matrix = at.value(w)
    if matrix is None or matrix.dim() != 2 or not matrix.is_floating_point():
        return None
    return at.constant(matrix.t(), f"{w.target}.t")


@rule(lambda x, w: aten.matmul.default(x, w), lambda x, w: aten.mm.default(x, w), numerics=Numerics.ROUNDING)
def matmul_linear(at, x, w):
    """matmul(x, w) -> linear(x, w.t()), w a constant matrix"""
    weight = _transposed(at, w)
    return None if weight is None else at.call(aten.linear.default, x, weight)


@rule(lambda b, x, w: aten.addmm.default(b, x, w), numerics=Numerics.ROUNDING)
def addmm_linear(at, b, x, w):
    """addmm(b, x, w) -> linear(x, w.t(), b), w and b constants"""
    weight = _transposed(at, w)
    bias = None if weight is None else parameter(at, b, at.type(weight).shape[:1], x)
    return None if bias is None else at.call(aten.linear.default, x, weight, bias)


@rule(
    lambda x, w, b: aten.add.Tensor(aten.linear.default(x, w), b),
    lambda x, w, b: aten.add.Tensor(b, aten.linear.default(x, w)),
    numerics=Numerics.ROUNDING,
)
def linear_bias(at, x, w, b):
    """linear(x, w) + b -> linear(x, w, b), b a constant"""
    if len(at.type(w).shape) != 2:
        return None
    bias = parameter(at, b, at.type(w).shape[:1], x)
    if bias is None:
        return None
    if absorbs(at.value(bias), x.meta["val"].dtype):
        return at.skip(ABSORBS)
    layer = next(item for item in at.root.args if item is not b)
    made = at.call_from(layer, aten.linear.default, x, w, bias)
    return made if at.same_type(made) else None


def _reshaped(outer: Any, inner: Any) -> Any:
    return lambda x, s, w, b, t: outer(aten.linear.default(inner(x, s), w, b), t)


_RESHAPES = (aten.reshape.default, aten.view.default)


@rule(*(_reshaped(outer, inner) for outer in _RESHAPES for inner in _RESHAPES), numerics=Numerics.ROUNDING)
def reshape_linear(at, x, s, w, b, t):
    """reshape(linear(reshape(x, [-1, k]), w, b), [..., n]) -> linear(x, w, b)"""
    matrix = at.type(w).shape
    if at.type(x).shape[-1:] != matrix[1:]:
        return None
    made = at.call_from(at.root.args[0], aten.linear.default, x, w, b)
    return made if at.same_type(made) else None


@rule(lambda y, w, b: aten.linear.default(y, w, b), numerics=Numerics.ROUNDING)
def linear_of_copy(at, y, w, b):
    """linear(permute(clone(permute(x, p)), q), w, b) -> linear(x, w, b) if they cancel; also linear(clone(x))"""
    x = uncopied(at, y)
    return at.call(aten.linear.default, x, w, b) if x is not y and at.type(x).contiguous else None


# ---- einsum -----------------------------------------------------------------------------------------------


@rule(lambda text, values: aten.einsum.default(text, values), numerics=Numerics.ROUNDING)
def einsum_matmul(at, text, values):
    """einsum("bqhd,bkhd->bhqk", q, k) -> matmul of permutes, where one axis is summed and none is merged"""
    inputs, _, out = text.replace(" ", "").partition("->")
    parts = inputs.split(",")
    if len(parts) != 2:
        return None
    a, b = parts
    if any(len(set(part)) != len(part) for part in (a, b, out)):
        return None  # also the dots of an ellipsis
    batch = "".join(c for c in out if c in a and c in b)
    rows, columns = ("".join(c for c in out if c in mine and c not in other) for mine, other in ((a, b), (b, a)))
    summed = {*a, *b} - {*out}
    if len(summed) != 1 or not summed <= {*a} & {*b} or len(columns) != 1 or (batch and len(rows) != 1):
        return None
    axis = summed.pop()
    if at.type(values[0]).shape[a.index(axis)] != at.type(values[1]).shape[b.index(axis)]:
        return None  # 1 is taken for any size
    left, right = _ordered(at, values[0], a, batch + rows + axis), _ordered(at, values[1], b, batch + axis + columns)
    made = attend(at, left, right)
    if not isinstance(made, fx.Node):
        made = at.call(aten.matmul.default, left, right)
    return in_layout_of_root(at, _ordered(at, made, batch + rows + columns, out))


def _ordered(at: Site, value: fx.Node, have: str, want: str) -> fx.Node:
    return permuted(at, value, [have.index(letter) for letter in want])


RULES = (matmul_linear, addmm_linear, linear_bias, reshape_linear, linear_of_copy, einsum_matmul)
