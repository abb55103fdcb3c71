"""Recognizes formulas in a graph: numbers, products, polynomials, means. Never changes a program."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tsopt.compiler.analysis.large_terms import absorbs
from tsopt.compiler.calls.types import TensorType
from tsopt.compiler.graph.ops import aten, bind, is_call
from tsopt.compiler.graph.program import type_of
from tsopt.compiler.rewriting.rewrite import Site

PRODUCTS = (
    lambda a, b: aten.mul.Tensor(a, b),
    lambda a, b: aten.mul.Scalar(a, b),
    lambda a, b: aten.div.Tensor(a, b),
    lambda a, b: aten.div.Scalar(a, b),
)
TIMES = (aten.mul.Tensor, aten.mul.Scalar)
OVER = (aten.div.Tensor, aten.div.Scalar)
PLUS = (aten.add.Tensor, aten.add.Scalar)
MINUS = (aten.sub.Tensor, aten.sub.Scalar)
LONGEST = 64  # calls in a formula: a chain of a thousand products is none, and would be read a thousand times
RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default)
POWERS = (aten.pow.Tensor_Scalar,)


# ---- numbers ----------------------------------------------------------------------------------------------


def literal(at: Site, value: object) -> float | None:
    """A number written in the call, or held by a constant of one element."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    tensor = at.value(value)
    if tensor is None or tensor.numel() != 1 or tensor.is_complex():
        return None
    return float(tensor)


def near(at: Site, value: float | None, wanted: float) -> bool:
    """Equal as far as a constant written in float32 can tell; in float64, but for the rounding of products."""
    tolerance = 1e-12 if at.root.meta["val"].dtype == torch.float64 else 1e-6
    return value is not None and math.isclose(value, wanted, rel_tol=tolerance, abs_tol=1e-12)


def is_of(node: object, *targets: Any) -> bool:
    return isinstance(node, fx.Node) and node.target in targets


def is_float(at: Site, node: object) -> bool:
    """Whether a value is one tensor of real floating-point numbers."""
    found = type_of(node) if isinstance(node, fx.Node) else None
    return isinstance(found, TensorType) and found.dtype.startswith(("float", "bfloat"))


def used_elsewhere(root: fx.Node, leaves: Iterable[object]) -> bool:
    """Whether a value between the leaves and the root is used by anything that is not."""
    ends, inside, todo = set(leaves), set[fx.Node](), [root]
    while todo:
        node = todo.pop()
        if node not in inside and node not in ends and is_call(node):
            inside.add(node)
            todo += node.all_input_nodes
    return any(user not in inside for node in inside if node is not root for user in node.users)


# ---- products and sums ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Product:
    """number * tops / bottoms."""

    number: float
    tops: tuple[fx.Node, ...]
    bottoms: tuple[fx.Node, ...]


def product(at: Site, root: fx.Node) -> Product:
    """A tree of products, quotients and signs, decomposed as long as its values have no other users."""
    number = 1.0
    ends: dict[bool, list[fx.Node]] = {True: [], False: []}
    todo: list[tuple[Any, bool]] = [(root, True)]
    seen = 0
    while todo:
        node, up = todo.pop()
        seen += 1
        value = literal(at, node)
        if value is not None:
            number = number * value if up else number / value if value else math.nan
        elif not isinstance(node, fx.Node):
            number = math.nan  # True and False are no numbers of a formula
        elif seen > LONGEST or (node is not root and len(node.users) > 1):
            ends[up].append(node)
        elif node.target in TIMES:
            todo += [(node.args[1], up), (node.args[0], up)]
        elif node.target in OVER:
            todo += [(node.args[1], not up), (node.args[0], up)]
        elif node.target is aten.reciprocal.default:
            todo.append((node.args[0], not up))
        elif node.target is aten.neg.default:
            number = -number
            todo.append((node.args[0], up))
        else:
            ends[up].append(node)
    return Product(number, tuple(ends[True]), tuple(ends[False]))


def affine(at: Site, node: Any) -> Iterator[tuple[fx.Node, float, float]]:
    """(inner, a, b) with node == a * inner + b, from the node itself inwards."""
    a, b = 1.0, 0.0
    for _ in range(LONGEST):
        if not isinstance(node, fx.Node):
            return
        yield node, a, b
        step = _affine_step(at, node)
        if step is None:
            return
        node, by, plus = step
        a, b = a * by, b + a * plus


def _affine_step(at: Site, node: Any) -> tuple[Any, float, float] | None:
    if node.target is aten.neg.default:
        return node.args[0], -1.0, 0.0
    if node.target not in (*PLUS, *MINUS, *TIMES, *OVER, aten.rsub.Scalar) or node.kwargs or len(node.args) != 2:
        return None
    inner, other = node.args
    number = literal(at, other)
    is_first = number is None
    if number is None:
        inner, number = other, literal(at, inner)
    if number is None or (node.target not in (*TIMES, *OVER) and absorbs(number, node.meta["val"].dtype)):
        return None
    if node.target in PLUS:
        return inner, 1.0, number
    if node.target in TIMES:
        return inner, number, 0.0
    if node.target is aten.rsub.Scalar or (node.target in MINUS and is_first):
        return inner, -1.0, number
    if node.target in MINUS:
        return inner, 1.0, -number
    return None if is_first or not number else (inner, 1.0 / number, 0.0)


Polynomial = dict[int, float]
NESTING = 32  # steps that a formula may nest: more is no formula, and Python's stack has an end


def polynomial(at: Site, node: Any, x: fx.Node, degree: int = 3) -> Polynomial | None:
    """Power of x -> coefficient; None for what is no polynomial in x of at most that degree."""
    known: dict[object, Polynomial | None] = {}

    def read(value: Any, depth: int) -> Polynomial | None:
        if value not in known:
            known[value] = made(value, depth + 1) if depth < NESTING else None
        return known[value]

    def made(value: Any, depth: int) -> Polynomial | None:
        if value is x:
            return {1: 1.0}
        number = literal(at, value)
        if number is not None:
            return {0: number}
        if not isinstance(value, fx.Node) or value.kwargs or len(value.args) > 2:
            return None
        if value.target in POWERS:
            return _raised(read(value.args[0], depth), value.args[1], degree)
        if value.target is aten.square.default:
            return _raised(read(value.args[0], depth), 2, degree)
        if value.target is aten.neg.default:
            base = read(value.args[0], depth)
            return None if base is None else _multiplied(base, {0: -1.0}, degree)
        if value.target not in (*PLUS, *MINUS, *TIMES, *OVER, aten.rsub.Scalar):
            return None
        left, right = (read(argument, depth) for argument in value.args)
        if left is None or right is None:
            return None
        if value.target in TIMES:
            return _multiplied(left, right, degree)
        if value.target in OVER:
            return _multiplied(left, {0: 1 / right[0]}, degree) if set(right) == {0} and right[0] else None
        if any(set(term) == {0} and absorbs(term[0], value.meta["val"].dtype) for term in (left, right)):
            return None
        if value.target is aten.rsub.Scalar:
            left, right = right, left
        sign = 1.0 if value.target in PLUS else -1.0
        return {n: left.get(n, 0.0) + sign * right.get(n, 0.0) for n in {*left, *right}}

    found = read(node, 0)
    return None if found is None else {power: c for power, c in found.items() if c}


def _raised(base: Polynomial | None, power: object, degree: int) -> Polynomial | None:
    if base is None or power not in (2, 3):
        return None
    square = _multiplied(base, base, degree)
    return square if square is None or power == 2 else _multiplied(square, base, degree)


def _multiplied(left: Polynomial, right: Polynomial, degree: int) -> Polynomial | None:
    if max(left) + max(right) > degree:
        return None
    found: Polynomial = {}
    for (i, a), (j, b) in ((p, q) for p in left.items() for q in right.items()):
        found[i + j] = found.get(i + j, 0.0) + a * b
    return found


# ---- reductions -------------------------------------------------------------------------------------------


def reduced(at: Site, node: Any, *targets: Any, result: int = 0) -> tuple[fx.Node, tuple[int, ...]] | None:
    """(x, axes) of a reduction that keeps the rank, by itself or through the reshape after it; axes count from 0.

    Of ops with several results, `result` says which one is meant.
    """
    call: Any = node.args[0] if is_of(node, *RESHAPES) else node
    if is_of(call, operator.getitem):
        call = call.args[0] if call.args[1] == result else None
    if not is_of(call, *targets):
        return None
    arguments = bind(call)
    x: fx.Node = arguments["self"]
    if arguments.get("dtype") not in (None, x.meta["val"].dtype):
        return None
    shape, axes = at.type(x).shape, arguments["dim"]
    if not shape:
        return None
    axes = axes if isinstance(axes, (list, tuple)) else range(len(shape)) if axes is None else [axes]
    wanted = {axis % len(shape) for axis in axes or range(len(shape))}
    kept = tuple(1 if i in wanted else size for i, size in enumerate(shape))
    return (x, tuple(sorted(wanted))) if at.type(node).shape == kept else None


def averaged(at: Site, node: Any) -> tuple[fx.Node, tuple[int, ...]] | None:
    """(x, axes) of `mean(x, axes, keepdim=True)`, also written as a sum over a number."""
    found = reduced(at, node, aten.mean.dim)
    if found is not None or not is_of(node, *TIMES, *OVER):
        return found
    for inner, a, b in affine(at, node):
        summed = reduced(at, inner, aten.sum.dim_IntList)
        if summed is not None:
            count = math.prod(at.type(summed[0]).shape[axis] for axis in summed[1])
            return summed if b == 0 and count and near(at, a, 1 / count) else None
    return None


def squared(node: Any) -> Any:
    """x of x * x, x ** 2 and square(x); None for anything else."""
    if is_of(node, aten.square.default):
        return node.args[0]
    if is_of(node, aten.mul.Tensor):
        left, right = node.args
        return left if left is right else None
    if is_of(node, *POWERS):
        base, power = node.args
        return base if power == 2 else None
    return None


def root_of(node: Any) -> tuple[Any, float] | None:
    """(y, 0.5) of sqrt(y) and y ** 0.5, (y, -0.5) of rsqrt(y) and y ** -0.5."""
    if is_of(node, aten.sqrt.default, aten.rsqrt.default):
        return node.args[0], 0.5 if is_of(node, aten.sqrt.default) else -0.5
    if is_of(node, *POWERS) and node.args[1] in (0.5, -0.5):
        return node.args[0], node.args[1]
    return None
