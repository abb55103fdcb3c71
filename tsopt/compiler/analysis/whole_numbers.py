"""Floats that are whole numbers, as counts are: sums of them are exact in any order while they are small enough."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tsopt.compiler.analysis.jumps import CASTS
from tsopt.compiler.analysis.range_rules import SAME_VALUES
from tsopt.compiler.analysis.ranged_call import base_name
from tsopt.compiler.graph import ops

ADDED = {"add", "sub", "subtract", "rsub"}
CHOSEN = SAME_VALUES | {"cat", "stack", "where", "maximum", "minimum"}
SUMS = ("sum", "cumsum")
# The largest whole number up to which a dtype has all.
LARGEST = {torch.float64: 2.0**53, torch.float32: 2.0**24, torch.float16: 2.0**11, torch.bfloat16: 2.0**8}


def is_exact_sum(node: fx.Node) -> bool:
    """Whether a call adds whole numbers that are so small that all sums of some of them are exact.

    Their sizes are bounded by what they are made of: booleans are at most 1.
    """
    return base_name(node) in SUMS and math.isfinite(_bound(node, {}))


def _bound(value: Any, known: dict[fx.Node, float]) -> float:
    """The largest absolute value of a whole number; infinite if it may be no whole one, or too large for its dtype."""
    if isinstance(value, bool | int):
        return float(abs(value)) if abs(value) < LARGEST[torch.float64] else math.inf
    if not isinstance(value, fx.Node):
        return abs(value) if isinstance(value, float) and value.is_integer() else math.inf
    if value not in known:
        known[value] = _bound_of_call(value, lambda operand: _bound(operand, known))
    return known[value]


def _bound_of_call(node: fx.Node, bound: Callable[[Any], float]) -> float:
    value, name = node.meta.get("val"), base_name(node) if ops.is_call(node) else ""
    if not isinstance(value, torch.Tensor):
        return math.inf
    if value.dtype == torch.bool:
        return 1.0
    if not name:
        return math.inf
    given, operands = ops.bind(node), [arg for arg in node.all_input_nodes]
    found = math.inf
    if name in CASTS or name in CHOSEN:
        found = max(map(bound, _chosen(name, given, operands)), default=math.inf)
    elif name in ADDED and given.get("alpha", 1) == 1:
        found = bound(given["self"]) + bound(given["other"])
    elif name in ("mul", "multiply"):
        found = bound(given["self"]) * bound(given["other"])
    elif name == "sum":
        found = bound(given["self"]) * _count(given["self"]) / max(1, value.numel())
    elif name == "cumsum":
        found = bound(given["self"]) * (value.shape[given["dim"]] if value.dim() else 1)
    return found if found <= LARGEST.get(value.dtype, LARGEST[torch.float64]) else math.inf


def _chosen(name: str, given: dict[str, Any], operands: list[fx.Node]) -> list[Any]:
    """The numbers among which a call takes its results, without places and conditions."""
    if name == "where":
        return [given["self"], given["other"]]
    if name in ("cat", "stack", "maximum", "minimum"):
        return operands
    return operands[:1]


def _count(value: fx.Node) -> int:
    return max(1, int(value.meta["val"].numel()))
