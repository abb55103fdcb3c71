"""Floats that are whole numbers, as counts are: sums of them are exact in any order while they are small enough."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from tsopt.compiler.analysis.jumps import CASTS
from tsopt.compiler.analysis.range_rules import SAME_VALUES
from tsopt.compiler.analysis.ranged_call import base_name
from tsopt.compiler.graph import ops

ADDED = {"add", "sub", "subtract", "rsub"}
CHOSEN = (SAME_VALUES - {"repeat_interleave"}) | {"cat", "stack", "where", "maximum", "minimum"}
SUMS = ("sum", "cumsum")
# The largest whole number up to which a dtype has all. Not of unsigned ones, in which differences wrap around.
LARGEST = {torch.float64: 2.0**53, torch.float32: 2.0**24, torch.float16: 2.0**11, torch.bfloat16: 2.0**8}
LARGEST |= {torch.int64: 2.0**53, torch.int32: 2.0**31 - 1, torch.int16: 2.0**15 - 1, torch.int8: 2.0**7 - 1}
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)


def exact_sums(graph: fx.Graph) -> set[fx.Node]:
    """The calls that add whole numbers which are so small that all sums of some of them are exact.

    Their sizes are bounded by what they are made of: booleans are at most 1.
    """
    bounds: dict[fx.Node, float] = {}
    for node in graph.nodes:
        bounds[node] = _bound_of_call(node, bounds)
    return {node for node, bound in bounds.items() if base_name(node) in SUMS and math.isfinite(bound)}


def _bound(value: Any, known: Mapping[fx.Node, float]) -> float:
    """The largest absolute value of a whole number; infinite if it may be no whole one, or too large for its dtype."""
    if isinstance(value, bool | int):
        return float(abs(value)) if abs(value) < LARGEST[torch.float64] else math.inf
    if isinstance(value, fx.Node):
        return known.get(value, math.inf)
    return abs(value) if isinstance(value, float) and value.is_integer() else math.inf


def _bound_of_call(node: fx.Node, known: Mapping[fx.Node, float]) -> float:
    value, name = node.meta.get("val"), base_name(node) if ops.is_call(node) else ""
    if not isinstance(value, torch.Tensor):
        return math.inf
    if value.dtype == torch.bool:
        return 1.0
    limit = LARGEST.get(value.dtype, 1.0 if value.dtype in UNSIGNED else 0.0)
    if not name or not limit or (value.dtype in UNSIGNED and name not in CASTS and name not in SAME_VALUES):
        return math.inf
    given, operands = ops.bind(node), node.all_input_nodes
    found = math.inf
    if name in CASTS or name in CHOSEN:
        if value.dtype in UNSIGNED and not _is_of_truths(operands[:1]):
            return math.inf
        found = max((_bound(item, known) for item in _chosen(name, given, operands)), default=math.inf)
    elif name in ADDED and given.get("alpha", 1) == 1:
        found = _bound(given["self"], known) + _bound(given["other"], known)
    elif name in ("mul", "multiply"):
        found = _bound(given["self"], known) * _bound(given["other"], known)
    elif name == "sum":
        found = _bound(given["self"], known) * max(1, given["self"].meta["val"].numel()) / max(1, value.numel())
    elif name == "cumsum":
        found = _bound(given["self"], known) * (value.shape[given["dim"]] if value.dim() else 1)
    return found if found <= limit else math.inf


def _chosen(name: str, given: dict[str, Any], operands: list[fx.Node]) -> list[Any]:
    """The numbers among which a call takes its results, without places and conditions."""
    if name == "where":
        return [given["self"], given["other"]]
    if name in ("cat", "stack", "maximum", "minimum"):
        return operands
    return operands[:1]


def _is_of_truths(operands: list[fx.Node]) -> bool:
    """Whether what is cast or moved is booleans, or what was made of them without a sign."""
    return all(operand.meta["val"].dtype in (torch.bool, *UNSIGNED) for operand in operands)
