"""Bounds of a value for any input: interval arithmetic over the few ops that masks are built from."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tsopt.compiler.graph.ops import aten, bind, is_call
from tsopt.compiler.rewriting.rewrite import Site
from tsopt.passes.recompose.formulas import NESTING, is_float, literal

Bounds = tuple[float, float]

_MOVES = frozenset(
    {
        "expand", "reshape", "view", "permute", "transpose", "t", "unsqueeze", "squeeze", "slice", "select", "clone",
        "contiguous", "flatten", "index_select", "gather", "index", "repeat", "tril", "triu", "alias",
    }
)  # fmt: skip
_LIMITED = {"sigmoid": (0.0, 1.0), "tanh": (-1.0, 1.0), "zeros_like": (0.0, 0.0)}


def bounds(at: Site, node: Any) -> Bounds | None:
    """Numbers that a value lies between whatever the input, NaN apart; None when it may be infinite."""
    known_bounds: dict[object, Bounds | None] = {}

    def read(value: Any, depth: int = 0) -> Bounds | None:
        if value not in known_bounds:
            found = _bounds(at, value, lambda inner: read(inner, depth + 1)) if depth < NESTING else None
            known_bounds[value] = found if found is not None and all(map(math.isfinite, found)) else None
        return known_bounds[value]

    return read(node)


def _bounds(at: Site, node: Any, read: Callable[[Any], Bounds | None]) -> Bounds | None:
    number = literal(at, node)
    if number is not None:
        return (number, number)
    if not at.is_tensor(node):
        return None
    constant = at.value(node)
    if constant is not None:
        return _extremes(constant)
    dtype = getattr(torch, at.type(node).dtype)
    if not dtype.is_floating_point:
        return (0.0, 1.0) if dtype == torch.bool else _range(dtype)
    found = _of_call(at, node, read) if is_call(node) else None
    if found is None or max(map(abs, found)) > torch.finfo(dtype).max:
        return None
    return found


def _extremes(constant: torch.Tensor) -> Bounds | None:
    if constant.is_complex() or not constant.numel():
        return None
    return float(constant.min()), float(constant.max())


def _range(dtype: torch.dtype) -> Bounds | None:
    if dtype.is_complex:
        return None
    limits = torch.iinfo(dtype)
    return float(limits.min), float(limits.max)


def _of_call(at: Site, node: fx.Node, read: Callable[[Any], Bounds | None]) -> Bounds | None:
    if node.target is aten.view.dtype:
        return None
    name = str(node.target).split(".")[1] if str(node.target).startswith("aten.") else ""
    if name in _LIMITED:
        return _LIMITED[name]
    if name in _MOVES or (name in ("to", "_to_copy") and is_float(at, node)):
        inner = read(node.args[0])
        return (min(inner[0], 0.0), max(inner[1], 0.0)) if inner is not None and name in ("tril", "triu") else inner
    if name == "masked_fill":
        return _either(read(node.args[0]), read(node.args[2]))
    if name == "where" and len(node.args) == 3:
        return _either(read(node.args[1]), read(node.args[2]))
    if name == "embedding":
        return read(node.args[0])
    if name not in ("add", "sub", "rsub", "mul", "div", "neg") or bind(node).get("alpha", 1) != 1:
        return None
    left = read(node.args[0])
    right = (0.0, 0.0) if name == "neg" else read(node.args[1])
    return None if left is None or right is None else _arithmetic(name, left, right)


def _either(a: Bounds | None, b: Bounds | None) -> Bounds | None:
    return None if a is None or b is None else (min(a[0], b[0]), max(a[1], b[1]))


def _arithmetic(name: str, left: Bounds, right: Bounds) -> Bounds | None:
    if name == "rsub":
        name, left, right = "sub", right, left
    if name == "add":
        return left[0] + right[0], left[1] + right[1]
    if name == "sub":
        return left[0] - right[1], left[1] - right[0]
    if name == "neg":
        return -left[1], -left[0]
    if name == "div":
        if right[0] != right[1] or not right[0]:
            return None
        right = (1 / right[0], 1 / right[0])
    ends = [a * b for a in left for b in right]
    return min(ends), max(ends)
