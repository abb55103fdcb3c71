"""The boundaries of merged branches: how stacked inputs are built, and where stacked results go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tsopt.compiler.calls.types import TensorType
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.edit import Impossible
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.program import tensor_type
from tsopt.passes.merge.branches import Group, is_shared, is_weights, run_of
from tsopt.passes.merge.draft import Draft
from tsopt.passes.merge.stacked import lower

SEVERAL = "a multi-output value is used outside the branches"


def stacks(draft: Draft, groups: Sequence[Group]) -> dict[Group, fx.Node]:
    """The calls of each group made once, on stacks; sources come before what reads them.

    Raises:
        Impossible: an op has no form for stacks.
    """
    wholes: dict[Group, fx.Node] = {}
    entries: dict[Group, fx.Node] = {}

    def read(column: Group) -> fx.Node | None:
        if is_shared(column) or column in wholes:
            return wholes.get(column, column[0])
        if is_weights(column):
            return None
        if column not in entries:
            entries[column] = _entry(draft, column)
        return entries[column]

    for group in groups:
        draft.at = group
        wholes[group] = lower(draft, group, read)
    return wholes


def _entry(draft: Draft, column: Group) -> fx.Node:
    """Values of branches as one: a view where they are neighbouring parts of a value, else a copy."""
    run = run_of(column)
    if run is None:
        return draft.call(aten.stack.default, list(column))
    count, shape = len(column), list(tensor_type(run.source).shape)
    value, size = run.source, count * run.size
    if size != shape[run.axis]:
        value = draft.call(aten.slice.Tensor, value, run.axis, run.start, run.start + size)
    if not run.is_index:
        shape[run.axis : run.axis + 1] = [count, run.size]
        value = draft.reshape(value, shape)
    axes = [axis for axis in range(len(tensor_type(value).shape)) if axis != run.axis]
    return draft.permute(value, [run.axis, *axes])


def exits(draft: Draft, wholes: dict[Group, fx.Node]) -> tuple[dict[fx.Node, fx.Node], set[fx.Node]]:
    """What stands for the values that leave the branches, and what is computed no longer.

    Raises:
        Impossible: a value that leaves is not one tensor.
    """
    replaced: dict[fx.Node, fx.Node] = {}
    gone = {node for group in wholes for node in group}
    made = set(draft.created)
    for group, whole in wholes.items():
        for user in [user for user in group[0].users if user not in gone and user not in made]:
            joined = join(draft, group, whole, user)
            if joined is not None:
                replaced[joined.node] = joined.value
                gone.update(joined.gone)
    for group, whole in wholes.items():
        draft.at = group
        for i, member in enumerate(group):
            if all(user in gone for user in member.users):
                continue
            if not isinstance(whole.meta["val"], torch.Tensor):
                raise Impossible(SEVERAL)
            replaced[member] = draft.call(aten.select.int, whole, 0, i)
    return replaced, gone


# ---- calls that bring all values of a group together ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Join:
    """`value` stands for `node`; what `gone` computes is no longer needed (`node` is one of them)."""

    node: fx.Node
    value: fx.Node
    gone: tuple[fx.Node, ...]


def join(draft: Draft, group: Group, whole: fx.Node, user: fx.Node) -> Join | None:
    """What a call that reads the first of a group is on the stack of the group; None when it is none of these."""
    if user.target is aten.stack.default:
        return _stack(draft, group, whole, user)
    if user.target is aten.cat.default:
        return _cat(draft, group, whole, user)
    return _sum(draft, group, whole, user) if user.target is aten.add.Tensor else None


def _behind(whole: fx.Node, axis: int) -> list[int]:
    """The axes of a stack with that of the branches at another place."""
    axes = list(range(1, len(tensor_type(whole).shape)))
    return [*axes[:axis], 0, *axes[axis:]]


def _stack(draft: Draft, group: Group, whole: fx.Node, user: fx.Node) -> Join | None:
    """stack([x_0, x_1, ...], axis) -> permute(x)."""
    bound = ops.bind(user)
    if tuple(bound["tensors"]) != group:
        return None
    draft.at = (user,)
    axis = bound["dim"] % len(tensor_type(user).shape)
    return Join(user, draft.permute(whole, _behind(whole, axis)), (user,))


def _cat(draft: Draft, group: Group, whole: fx.Node, user: fx.Node) -> Join | None:
    """cat([y, x_0, x_1, ..., z], axis) -> cat([y, reshape(permute(x)), z], axis)."""
    bound, result = ops.bind(user), tensor_type(user)
    pieces: list[fx.Node] = list(bound["tensors"])
    begin = pieces.index(group[0])
    end = begin + len(group)
    shape = list(tensor_type(group[0]).shape)
    if tuple(pieces[begin:end]) != group or len(shape) != len(result.shape):  # cat leaves out empty vectors
        return None
    draft.at = (user,)
    axis = bound["dim"] % len(result.shape)
    shape[axis] *= len(group)
    pieces[begin:end] = [draft.reshape(draft.permute(whole, _behind(whole, axis)), shape)]
    return Join(user, pieces[0] if len(pieces) == 1 else draft.call(aten.cat.default, pieces, axis), (user,))


def _sum(draft: Draft, group: Group, whole: fx.Node, user: fx.Node) -> Join | None:
    """x_0 + x_1 + ... + y -> sum(x, 0) + y, in whatever order they are added."""
    kind = tensor_type(group[0])
    if not kind.dtype.startswith(("float", "bfloat")):
        return None  # sum promotes integers
    wanted = set(group)
    chain: list[fx.Node] = []
    rest: list[Any] = []
    node: fx.Node = group[0]
    wanted.discard(node)
    while wanted:
        if len(node.users) != 1 and node is not group[0]:
            return None
        following = user if node is group[0] else next(iter(node.users))
        other = _other(following, node, kind)
        if other is None:
            return None
        chain.append(following)
        inner, leaves = _leaves(other, kind, wanted)
        if not wanted.isdisjoint(leaves):
            chain += inner
            rest += [leaf for leaf in leaves if leaf not in wanted]
            if len(set(leaves)) != len(leaves):
                return None
            wanted.difference_update(leaves)
        else:
            rest.append(other)
        node = following
    if set(rest) & set(group):
        return None  # added twice
    draft.at = (node,)
    value = draft.call(aten.sum.dim_IntList, whole, [0])
    for term in rest:
        value = draft.call(aten.add.Tensor, value, term)
    return Join(node, value, tuple(chain))


def _other(node: fx.Node, value: fx.Node, kind: TensorType) -> Any:
    """The other term of a call that reads a value; None when it is no plain sum of that type."""
    terms = _terms(node, kind)
    if terms is None or terms[0] is terms[1]:
        return None
    return terms[1] if terms[0] is value else terms[0]


def _terms(node: Any, kind: TensorType) -> list[Any] | None:
    if not isinstance(node, fx.Node) or node.target is not aten.add.Tensor:
        return None
    bound, found = ops.bind(node), tensor_type(node)
    terms = [bound["self"], bound["other"]]
    if bound["alpha"] != 1 or (found.dtype, found.shape) != (kind.dtype, kind.shape):
        return None
    return terms


def _leaves(node: Any, kind: TensorType, wanted: set[fx.Node]) -> tuple[list[fx.Node], list[Any]]:
    """The sums that make up a term and have no other users, and their terms."""
    sums: list[fx.Node] = []
    leaves: list[Any] = []
    todo = [node]
    while todo:
        term = todo.pop()
        terms = None if term in wanted else _terms(term, kind)
        if terms is None or terms[0] is terms[1] or len(term.users) != 1:
            leaves.append(term)
        else:
            sums.append(term)
            todo += terms
    return sums, leaves
