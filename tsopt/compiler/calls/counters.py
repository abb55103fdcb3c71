"""Python integers in a call that change together with a size: how many tokens a cache has seen, say.

In the Structure of a call such an integer is a node of kind `size`: a size of one of the call's tensors, plus a number.
Does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from typing import Any

from tsopt.compiler.calls.effects import steps_of
from tsopt.compiler.calls.structure import Path, Structure, size_of
from tsopt.compiler.calls.types import unlike_a_tensor


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a tensor of a call.

    Attributes:
        leaf: the tensor's index.
        path: where in `(args, kwargs)` the tensor is.
    """

    leaf: int
    path: Path
    axis: int

    def and_more(self, more: int) -> Structure:
        """The node of an integer that is this much larger than the size of this axis."""
        return Structure("size", index=self.leaf, keys=self.path, value=(self.axis, more))


def axes_of(structure: Structure, leaves: Sequence[Any]) -> list[Axis]:
    """All axes of the tensors of a call."""
    paths: dict[int, Path] = {}  # of a tensor in two places, the first
    for path, node in _walk(structure, ()):
        if node.kind == "leaf":
            paths.setdefault(node.index, path)
    return [Axis(index, path, axis) for index, path in paths.items() for axis in range(len(leaves[index].shape))]


def counted(calls: Sequence[tuple[Sequence[Any], Structure]]) -> Structure | None:
    """The Structure that calls have in common, whose integers may differ if each goes along with a size.

    Args:
        calls: the tensors of each call, and its Structure.

    Returns:
        None where the calls differ in something else, or an integer changes by an amount that no size changes by.
    """
    (first, structure), *others = calls
    if all(other == structure for _, other in others):
        return structure
    shape = without_integers(structure)
    ranks = [[len(leaf.shape) for leaf in leaves] for leaves, _ in calls]
    if any(without_integers(other) != shape for _, other in others) or any(rank != ranks[0] for rank in ranks):
        return None
    sizes = {
        axis: [int(leaves[axis.leaf].shape[axis.axis]) for leaves, _ in calls] for axis in axes_of(structure, first)
    }
    varying = {axis: found for axis, found in sizes.items() if len(set(found)) > 1}
    integers = [dict(_integers(structure, ())) for _, structure in calls]
    places: dict[Path, Structure] = {}
    for path in integers[0]:
        values = [found[path] for found in integers]
        if len(set(values)) == 1:
            continue
        along = [
            axis
            for axis, found in varying.items()
            if len({value - size for value, size in zip(values, found, strict=True)}) == 1
        ]
        if not along:
            return None
        nearest = max(along, key=lambda axis: _common(axis.path, path))
        places[path] = nearest.and_more(values[0] - sizes[nearest][0])
    return _with(structure, (), lambda path, node: places.get(path, node))


def as_called(structure: Structure, leaves: Sequence[Any]) -> Structure:
    """The Structure of a call with these tensors: its integers as they have to be then."""

    def number(node: Structure) -> Structure:
        leaf = leaves[node.index] if node.kind == "size" and node.index < len(leaves) else None
        if leaf is None or unlike_a_tensor(leaf) is not None or node.value[0] >= len(leaf.shape):
            return node
        return _constant(size_of(node, leaf))

    return replaced(structure, number) if holds_sizes(structure) else structure


def replaced(structure: Structure, change: Callable[[Structure], Structure]) -> Structure:
    """The Structure with other nodes in the places of some that have no children."""
    return _with(structure, (), lambda _, node: change(node))


def with_sizes_of(structure: Structure, other: Structure) -> Structure:
    """The Structure of a call, with the nodes of kind `size` that another one of the same nesting has."""
    if other.kind == "size":
        return other
    pairs = zip(structure.children, other.children, strict=True)
    return replace(structure, children=tuple(starmap(with_sizes_of, pairs))) if structure.children else structure


def without_integers(structure: Structure) -> Structure:
    """The same for calls that differ only in their integers."""
    return replaced(structure, lambda node: _constant(0) if _is_integer(node) or node.kind == "size" else node)


def holds_sizes(structure: Structure) -> bool:
    """Whether an integer goes along with a size."""
    return structure.kind == "size" or any(map(holds_sizes, structure.children))


def _constant(value: int) -> Structure:
    return Structure("const", int, value=value)


def _is_integer(node: Structure) -> bool:
    return node.kind == "const" and type(node.value) is int


def _integers(structure: Structure, path: Path) -> Iterator[tuple[Path, int]]:
    return ((place, node.value) for place, node in _walk(structure, path) if _is_integer(node))


def _walk(node: Structure, path: Path) -> Iterator[tuple[Path, Structure]]:
    yield path, node
    for step, child in zip(_steps(node), node.children, strict=True):
        yield from _walk(child, (*path, step))


def _steps(node: Structure) -> list[tuple[str, Any]]:
    return steps_of(node.kind, node.keys, len(node.children)) if node.children else []


def _with(node: Structure, path: Path, change: Callable[[Path, Structure], Structure]) -> Structure:
    """The Structure with other nodes in the places of some."""
    if not node.children:
        return change(path, node)
    pairs = zip(_steps(node), node.children, strict=True)
    return replace(node, children=tuple(_with(child, (*path, step), change) for step, child in pairs))


def _common(path: Path, other: Path) -> int:
    """How many steps two paths have in common."""
    return next((i for i, (a, b) in enumerate(zip(path, other, strict=False)) if a != b), min(len(path), len(other)))
