"""The ranges of integer values in a program: interval arithmetic, op by op. Never changes a program.

A Range holds the mathematical result, before it wraps around in its dtype. Its users then start from the range of the
dtype again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from tsopt.compiler.analysis.intervals import ANY, FLAG, Range, of_dtype, range_of_tensor
from tsopt.compiler.analysis.range_rules import PLACES, RULES, SAME_VALUES, to_whole
from tsopt.compiler.analysis.ranged_call import RangedCall, Ranges, Values, base_name
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.program import Program

# Ops that read the shape of their first argument, and ops that read nothing else of their second.
SHAPED = frozenset(
    {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "fill", "zero", "copy"}
)
LIKE_ANOTHER = frozenset({"expand_as", "view_as", "reshape_as", "type_as"})


def recorded(program: Program) -> Values:
    """The values as the program records them."""
    return {node: node.meta["val"] for node in program.graph.nodes if "val" in node.meta}


def ranges_of(program: Program, values: Values, inputs: Sequence[Range], with_nan: bool = False) -> Ranges:
    """The range of every tensor of a program, by the ranges of its inputs.

    Args:
        values: what the nodes are at the sizes that are asked about.
        inputs: of each input of the signature, state included.
        with_nan: a float that may be NaN may be cast to any whole number. Otherwise floats are taken for numbers.
    """
    found: Ranges = {}
    doubtful: set[fx.Node] = set()
    given = iter(inputs)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            found[node] = next(given)
        elif node.op == "get_attr":
            found[node] = range_of_tensor(program.weights[str(node.target)])
        elif ops.is_call(node) and isinstance(values.get(node), torch.Tensor):
            found[node] = range_of(RangedCall(node, values, found, doubtful))
        if with_nan and _may_be_nan(node, values.get(node), found, doubtful):
            doubtful.add(node)
    return found


def _may_be_nan(node: fx.Node, value: Any, found: Ranges, doubtful: Collection[fx.Node]) -> bool:
    """Whether a float may be NaN: of finite numbers, an op makes NaN only where its range is not known."""
    if not any(item.is_floating_point() or item.is_complex() for item in ops.tensors_of(value)):
        return False
    if node in found and not (math.isfinite(found[node].low) and math.isfinite(found[node].high)):
        return True
    literals = tree_leaves((node.args, dict(node.kwargs)))
    if any(isinstance(item, float) and not math.isfinite(item) for item in literals):
        return True
    return base_name(node) != "nan_to_num" and any(source in doubtful for source in _read(node))


def _read(node: fx.Node) -> list[Any]:
    """The arguments whose numbers a call reads; of others it reads the shape or the dtype."""
    name = base_name(node)
    if name in SHAPED:
        return tree_leaves((node.args[1:], dict(node.kwargs)))
    return [node.args[0]] if name in LIKE_ANOTHER else node.all_input_nodes


def range_of(call: RangedCall) -> Range:
    """The range of the result of one call that returns a tensor."""
    if call.value.dtype == torch.bool:
        return FLAG
    if call.value.is_complex():
        return ANY
    if call.name == "getitem":
        return _range_of_part(call)
    rule = RULES.get(call.name)
    try:
        found = rule(call) if rule is not None else None
        if found is not None:  # what is written into whole numbers is cut: `full_like(ids, 0.5)` is zero
            found = call.rounded(found) if call.is_float else to_whole(found, math.trunc)
    except (KeyError, TypeError, ValueError, ArithmeticError):
        found = None  # a form of the op that the rule does not know
    return ANY if found is None or math.isnan(found.low) or math.isnan(found.high) else found


def _range_of_part(call: RangedCall) -> Range:
    """One of several results."""
    source: Any = call.node.args[0]
    if not isinstance(source, fx.Node) or not ops.is_overload(source.target):
        return of_dtype(call.value.dtype)
    inner = RangedCall(source, call.values, call.found, call.doubtful)
    if inner.name in PLACES and call.value.dtype == torch.int64 and call.node.args[1] == 1:
        dim = inner.arguments.get("dim", -1)
        return Range(0, max(0, inner.size("self", dim) - 1))
    if inner.name in (*SAME_VALUES, *PLACES):
        return inner.of("self")
    return of_dtype(call.value.dtype)
