"""Strides of axes of size 1: they address no elements, yet kernels choose the memory layout of their results by them.

A replacement with different strides there computes the same values, but a convolution downstream may return its result
in a different layout. This file works out how far the difference propagates.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from tsopt.compiler.calls.types import TensorType
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.infer import infer_on
from tsopt.compiler.graph.program import Program, Type, type_of, type_of_value


def retyped_behind(program: Program, node: fx.Node, result: fx.Node) -> dict[fx.Node, Any] | None:
    """The values behind a node that get other strides when `result` takes its place, with their new fake values.

    Returns:
        None where one of them would have another memory layout: strides that elements are found by.
    """
    if type_of(node) == type_of(result):
        return {}
    changed: dict[fx.Node, Any] = {node: result.meta["val"]}
    behind = node
    while behind.next.op != "root":
        behind = behind.next
        if not ops.is_call(behind) or not any(source in changed for source in behind.all_input_nodes):
            continue
        try:
            value = infer_on(program, behind, lambda source: changed.get(source, source.meta["val"]))
        except ops.UNDECIDED:
            continue  # the type is known only from capture
        except Exception:  # an op that refuses these strides, view for one
            return None
        derived, recorded = type_of_value(value), type_of(behind)
        if derived == recorded:
            continue
        if not _matches(derived, recorded):
            return None
        changed[behind] = value
    del changed[node]
    return changed


def _matches(derived: Type, recorded: Type) -> bool:
    if isinstance(derived, TensorType) and isinstance(recorded, TensorType):
        return derived.matches(recorded)
    if isinstance(derived, tuple) and isinstance(recorded, tuple) and len(derived) == len(recorded):
        return all(map(_matches, derived, recorded))
    return False
