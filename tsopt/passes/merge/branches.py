"""Finds copies of one computation, such as a Python loop over ensemble members, heads or experts leaves in the graph.

Values are numbered by how they are computed, weights only by their type, and everything else that is not a pure call
individually. Equal numbers then mean the same calls on the same inputs with different weights. Two such values have the
same depth in the graph, so neither is computed from the other.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.program import Program, format_type, format_value, tensor_type, type_of

Group = tuple[fx.Node, ...]  # one value of each branch, in the same order for all groups of a set of branches

FEWEST = 3
STEPS = 8  # how often each value may be looked at before groups are no longer cut (see `Uneven`)


class Kinds:
    """The number of each value, its depth in the graph, and the values of each number.

    Args:
        is_known: whether the calls of an op may be computed together. Other values are numbered by type and depth, so
            that branches on values of their own are found as well.
    """

    def __init__(self, program: Program, is_known: Callable[[Any], bool]) -> None:
        self.is_known = is_known
        self.depth = depths(program)
        self.kind: dict[fx.Node, int] = {}
        self.members: dict[int, list[fx.Node]] = defaultdict(list)
        self.steps = STEPS * len(self.depth)
        self.drawn: set[fx.Node] = set()  # values that depend on random or unknown calls
        self.cuts: dict[fx.Node, Counter[Any]] = {}
        numbers: dict[object, int] = {}
        names: dict[fx.Node, str] = {}
        # NOTE: level by level: all values of a number are known before anything that reads them is numbered.
        for node in sorted(self.depth, key=self.depth.__getitem__):
            key = self._key(node, names)
            number = self.kind[node] = numbers.setdefault(key, len(numbers))
            self.members[number].append(node)
            names[node] = f"%{number}"

    def _key(self, node: fx.Node, names: dict[fx.Node, str]) -> object:
        if node.op == "get_attr":
            return "weight", format_type(type_of(node))
        if ops.is_call(node) and (not ops.is_pure(node) or not self.drawn.isdisjoint(node.all_input_nodes)):
            self.drawn.add(node)
        if node.target in PARTS and self._is_for_branches(node):
            return node.target, node.args[0], ops.bind(node).get("dim"), format_type(type_of(node))
        if ops.is_call(node) and ops.is_pure(node) and self.is_known(node.target):
            bound = ops.bind(node)
            return node.target, tuple((k, format_value(v, names), type(v).__name__) for k, v in bound.items())
        # NOTE: draws keep their order, so branches that read different ones may have to wait for each other.
        return node if node in self.drawn else ("value", self.depth[node], format_type(type_of(node)))

    def _is_for_branches(self, part: fx.Node) -> bool:
        """Whether a value is cut into parts for branches to read: then which part it is tells branches not apart.

        If not, the value is inside of a branch, and there are as many of its kind.
        """
        base: Any = part.args[0]
        if base not in self.cuts:
            self.cuts[base] = Counter(user.target for user in base.users)
        return self.cuts[base][part.target] > len(self.like(base))

    def like(self, node: fx.Node) -> list[fx.Node]:
        """The values of a number; none for calls that were made later."""
        return self.members[self.kind[node]] if node in self.kind else []

    def candidates(self) -> list[Group]:
        """Values of one number, three at least, the deepest first."""
        groups = [tuple(nodes) for nodes in self.members.values() if len(nodes) >= FEWEST and ops.is_call(nodes[0])]
        return sorted(groups, key=lambda group: self.depth[group[0]], reverse=True)


def depths(program: Program) -> dict[fx.Node, int]:
    """The longest way from an input to each value."""
    depth: dict[fx.Node, int] = {}
    for node in program.graph.nodes:
        if node.op != "output":
            depth[node] = 1 + max((depth[source] for source in node.all_input_nodes), default=-1)
    return depth


PARTS = (operator.getitem, aten.select.int, aten.slice.Tensor)


def operands(node: fx.Node) -> list[fx.Node]:
    """The values that a call reads, in the order of its schema, repeats included."""
    found: list[fx.Node] = []
    fx.node.map_arg(tuple(ops.bind(node).values()), found.append)
    return found


def columns(group: Group) -> list[Group]:
    """What the members of a group read, argument by argument."""
    return list(zip(*(operands(member) for member in group), strict=True))


def is_shared(column: Group) -> bool:
    return all(value is column[0] for value in column)


def is_weights(column: Group) -> bool:
    return all(value.op == "get_attr" for value in column)


@dataclass(frozen=True, slots=True)
class Uneven:
    """A set of branches falls apart: some, not all, read the same value. `parts` are groups to try instead."""

    parts: tuple[Group, ...]


def grow(
    top: Group, kinds: Kinds, fits: Callable[[Group], bool], taken: set[fx.Node], among: int
) -> list[Group] | Uneven:
    """The groups that a group is computed from, itself included, as far down as they `fit`; sources first.

    Linear in what it finds: every value is in one group at most. Ends where there are twice as many values of a kind:
    two of them meet in a member (a sum of pairs), so what is below are branches of their own. Not so where nothing is
    below, nor where they meet in different roles, as queries, keys and values do.

    Args:
        among: how many values there are of the kind of the group.
    """
    found: dict[Group, None] = {}
    mine: set[fx.Node] = set()
    todo = [top]
    while todo:
        group = todo.pop()
        if not mine.isdisjoint(group):
            continue
        found[group] = None
        mine.update(group)
        kinds.steps -= len(group)
        for column in columns(group):
            if _is_given(column):
                continue
            distinct = len(set(column))
            if distinct < len(column) and kinds.steps > 0:
                return Uneven(_parts(top, column, distinct))
            joins = 2 * among <= len(kinds.like(column[0])) and _has_no_roles(group) and not _begins(column)
            if distinct == len(column) and not joins and _is_group(column, kinds, taken) and fits(column):
                todo.append(column)
    return sorted(found, key=lambda group: kinds.depth[group[0]])


def _has_no_roles(group: Group) -> bool:
    target: Any = group[0].target
    return target is aten.cat.default or torch.Tag.pointwise in getattr(target, "tags", ())


def _begins(column: Group) -> bool:
    """Whether branches begin here: with calls that read what all of them share, and weights."""
    return all(ops.is_call(value) for value in column) and all(map(_is_given, columns(column)))


def _is_given(column: Group) -> bool:
    return is_shared(column) or is_weights(column)


def _is_group(column: Group, kinds: Kinds, taken: set[fx.Node]) -> bool:
    """Whether the values of a column are computed alike, each from values of its own branch or weights."""
    kind = kinds.kind.get(column[0])
    if any(kinds.kind.get(value) != kind or value in taken or not ops.is_call(value) for value in column):
        return False
    return kind is not None and varies(column)


def varies(group: Group) -> bool:
    """Whether the members read different values; parts of one value do not, for that value is not stacked."""
    return not all(is_shared(column) for column in columns(group))


def _parts(top: Group, column: Group, distinct: int) -> tuple[Group, ...]:
    """A group cut along a column: by the value that is read, or by the how manyth reader, whatever leaves more."""
    by_value: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for member, value in zip(top, column, strict=True):
        by_value[value].append(member)
    groups = list(by_value.values())
    if distinct > len(column) // distinct:
        longest = max(map(len, groups))
        groups = [[readers[i] for readers in by_value.values() if i < len(readers)] for i in range(longest)]
    return tuple(tuple(group) for group in groups if len(group) >= FEWEST)


# ---- parts of one value -----------------------------------------------------------------------------------------

SPLITS = (
    aten.split.Tensor,
    aten.split.sizes,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.tensor_split.sections,
)


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring parts of `source` on one axis, all of them `size` long; with `is_index` the axis is gone."""

    source: fx.Node
    axis: int
    start: int
    size: int
    is_index: bool


def run_of(column: Group) -> Run | None:
    """The run that the values of a column are, in their order; None when they are none."""
    first = _part(column[0])
    if first is None:
        return None
    wanted = [
        Run(first.source, first.axis, first.start + i * first.size, first.size, first.is_index)
        for i in range(len(column))
    ]
    return first if all(_part(value) == want for value, want in zip(column, wanted, strict=True)) else None


def _part(node: fx.Node) -> Run | None:
    bound: dict[str, Any] = ops.bind(node) if ops.is_call(node) else {}
    if node.target is operator.getitem:
        split, index = bound["0"], bound["1"]
        if split.target not in (*SPLITS, aten.unbind.int):
            return None
        bound = ops.bind(split)
        axis = bound["dim"] % len(tensor_type(bound["self"]).shape)
        if split.target is aten.unbind.int:
            return Run(bound["self"], axis, index, 1, True)
        sizes = [part.shape[axis] for part in split.meta["val"]]
        return Run(bound["self"], axis, sum(sizes[:index]), sizes[index], False)
    if node.target not in PARTS:
        return None
    shape = tensor_type(bound["self"]).shape
    axis = bound["dim"] % len(shape)
    if node.target is aten.select.int:
        return Run(bound["self"], axis, bound["index"] % shape[axis], 1, True)
    start, stop, step = slice(bound["start"], bound["end"], bound["step"]).indices(shape[axis])
    return Run(bound["self"], axis, start, stop - start, False) if step == 1 and stop > start else None
