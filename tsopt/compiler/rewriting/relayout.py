"""Strides of axes of size 1: they address no elements, yet kernels choose the memory layout of their results by them.

A replacement with different strides there computes the same values, but a convolution downstream may return its result
in a different layout. This file works out how far the difference propagates, and whether anything reads memory by its
place.
"""

from __future__ import annotations

import heapq
from typing import Any

import torch
from torch import fx

from tsopt.compiler.calls.types import TensorType
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.infer import infer_on
from tsopt.compiler.graph.program import Program, Type, type_of, type_of_value

BY_PLACE = (*ops.BY_STRIDES, ops.aten.view_as_complex.default)  # which starts at an even number of elements


def retyped_behind(program: Program, node: fx.Node, result: fx.Node) -> dict[fx.Node, Any] | None:
    """The values behind a node that get other strides when `result` takes its place, with their new fake values.

    Returns:
        None where one of them would have another memory layout, or read memory in another place.
    """
    if _is_read_elsewhere(program, node, result):
        return None
    if type_of(node) == type_of(result):
        return {}
    changed: dict[fx.Node, Any] = {node: result.meta["val"]}
    pending = [user for user in node.users if ops.is_call(user)]
    seen = set(pending)
    heapq.heapify(pending)  # nodes compare by their place in the graph: each call comes after all that it reads
    while pending:
        behind = heapq.heappop(pending)
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
        for user in behind.users:
            if ops.is_call(user) and user not in seen:
                seen.add(user)
                heapq.heappush(pending, user)
    del changed[node]
    return changed


def _is_read_elsewhere(program: Program, node: fx.Node, result: fx.Node) -> bool:
    """Whether a call behind a node reads memory by its place, and that of the result is not the same.

    Types do not tell: `x[2:]` and a clone of it have the same strides.
    """
    if not any(program.graph.find_nodes(op="call_function", target=target, sort=False) for target in BY_PLACE):
        return False
    old, new = node.meta["val"], result.meta["val"]
    pending, seen = [node], {node}
    while pending:
        source = pending.pop()
        for user in source.users:
            if user.target in BY_PLACE and not _reads_the_same(user, old, new):
                return True
            if user not in seen and source in ops.may_alias(user):
                seen.add(user)
                pending.append(user)
    return False


def _reads_the_same(call: fx.Node, old: torch.Tensor, new: torch.Tensor) -> bool:
    is_strided = call.target in ops.STRIDED
    if is_strided and not ops.reads_within(call, old):
        return False
    is_relative = is_strided and ops.bind(call)["storage_offset"] is None
    return is_relative or old.storage_offset() == new.storage_offset()


def _matches(derived: Type, recorded: Type) -> bool:
    if isinstance(derived, TensorType) and isinstance(recorded, TensorType):
        return derived.matches(recorded)
    if isinstance(derived, tuple) and isinstance(recorded, tuple) and len(derived) == len(recorded):
        return all(map(_matches, derived, recorded))
    return False
