"""The ranges of integer values in a program: interval arithmetic, op by op. Never changes a program.

A Range holds the mathematical result, before it wraps around in its dtype. Its users then start from the range of the
dtype again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tsopt.compiler.analysis.intervals import ANY, FLAG, Range, of_dtype, range_of_tensor
from tsopt.compiler.analysis.range_rules import PLACES, RULES, SAME_VALUES, RangedCall, Ranges, Values
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.program import Program


def recorded(program: Program) -> Values:
    """The values as the program records them."""
    return {node: node.meta["val"] for node in program.graph.nodes if "val" in node.meta}


def ranges_of(program: Program, values: Values, inputs: Sequence[Range]) -> Ranges:
    """The range of every tensor of a program, by the ranges of its inputs.

    Args:
        values: what the nodes are at the sizes that are asked about.
        inputs: of each input of the signature, state included.
    """
    found: Ranges = {}
    given = iter(inputs)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            found[node] = next(given)
        elif node.op == "get_attr":
            found[node] = range_of_tensor(program.weights[str(node.target)])
        elif ops.is_call(node) and isinstance(values.get(node), torch.Tensor):
            found[node] = _range_of(RangedCall(node, values, found))
    return found


def _range_of(call: RangedCall) -> Range:
    if call.value.dtype == torch.bool:
        return FLAG
    if call.name == "getitem":
        return _range_of_part(call)
    rule = RULES.get(call.name)
    try:
        found = rule(call) if rule is not None else None
    except (KeyError, TypeError, ValueError, ArithmeticError):
        found = None  # a form of the op that the rule does not know
    return ANY if found is None or math.isnan(found.low) or math.isnan(found.high) else found


def _range_of_part(call: RangedCall) -> Range:
    """One of several results."""
    source: Any = call.node.args[0]
    if not isinstance(source, fx.Node) or not ops.is_overload(source.target):
        return of_dtype(call.value.dtype)
    inner = RangedCall(source, call.values, call.found)
    if inner.name in PLACES and call.value.dtype == torch.int64 and call.node.args[1] == 1:
        dim = inner.arguments.get("dim", -1)
        return Range(0, max(0, inner.size("self", dim) - 1))
    if inner.name in (*SAME_VALUES, *PLACES):
        return inner.of("self")
    return of_dtype(call.value.dtype)
