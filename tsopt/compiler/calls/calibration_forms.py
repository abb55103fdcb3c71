"""Items of calibration data in other containers than the example's: their tensors in the places of the example's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tsopt.compiler.calls.calibration_files import with_tensors
from tsopt.compiler.calls.snapshot import is_leaf
from tsopt.compiler.calls.structure import CHANGEABLE, Structure, flatten

HELD_IN = "data"  # the attribute in which a UserDict has its items


class Unlike(Exception):
    """An item has no tensor where the example has one, or another constant."""


def named_parts(item: Any) -> dict[str, Any] | None:
    """What an item holds by name: a mapping, a NamedTuple or a dataclass; None for anything else."""
    if isinstance(item, Mapping):
        return dict(item) if all(isinstance(key, str) for key in item) else None
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return dict(zip(item._fields, item, strict=True))
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {
            field.name: getattr(item, field.name) for field in dataclasses.fields(item) if hasattr(item, field.name)
        }
    return None


def ways_to_read(structure: Structure, item: Any) -> list[Callable[[Placed], None]]:
    """The ways in which an item may hold the arguments of a call, most likely first.

    Args:
        structure: of the example, as `(args, kwargs)`.
    """
    args, kwargs = structure.children
    arguments, parts = [*args.children, *kwargs.children], named_parts(item)
    ways: list[Callable[[Placed], None]] = []
    if parts is not None and not args.children:
        ways.append(lambda placed: placed.put(kwargs, parts))
    if len(arguments) == 1:
        ways.append(lambda placed: placed.put(arguments[0], item))
    if isinstance(item, (list, tuple)):
        ways.append(lambda placed: placed.put_all(arguments, item))
    return ways


class Placed:
    """The tensors of an item by the places that they have in the example.

    Attributes:
        leaves: by their index in the structure of the example.
        left_out: names of what the example has no place for.
    """

    def __init__(self) -> None:
        self.leaves: dict[int, Any] = {}
        self.left_out: list[str] = []
        self._objects: list[Any] = []  # in the order of the example's, which may have one of them twice

    def put_all(self, nodes: Sequence[Structure], values: Sequence[Any]) -> None:
        if len(nodes) != len(values):
            raise Unlike
        for node, value in zip(nodes, values, strict=True):
            self.put(node, value)

    def put(self, node: Structure, value: Any) -> None:
        """Finds the tensors of one part of the example in a value.

        Raises:
            Unlike: one is missing.
        """
        if node.kind == "leaf":
            value = with_tensors(value)
            if not is_leaf(value):
                raise Unlike
            self.leaves[node.index] = value
        elif node.kind == "const":
            if type(value) is not type(node.value) or value != node.value:
                raise Unlike
        elif node.kind == "shared":
            if not _is_the_same(self._objects[node.index], value):
                raise Unlike
        elif isinstance(value, (list, tuple)) and node.kind in ("tuple", "list", "namedtuple"):
            self.put_all(node.children, value)
        elif node.kind in ("dict", "namedtuple", "object"):
            self._put_by_name(node, value)
        else:
            raise Unlike
        if node.kind in CHANGEABLE:
            self._objects.append(value)

    def _put_by_name(self, node: Structure, value: Any) -> None:
        parts = named_parts(value)
        if parts is None:
            raise Unlike
        names = node.labels()
        wrapped = HELD_IN in names and HELD_IN not in parts
        for name, child in zip(names, node.children, strict=True):
            if name in parts:
                self.put(child, parts[name])
            elif wrapped and name == HELD_IN:
                self.put(child, parts)
            elif child.leaf_count:
                raise Unlike
        if not wrapped:
            self.left_out += [name for name in parts if name not in names]


def _is_the_same(one: Any, other: Any) -> bool:
    """Whether two containers hold the same tensors: reading has copied the containers."""
    (mine, structure), (theirs, another) = flatten(one), flatten(other)
    return structure == another and all(a is b for a, b in zip(mine, theirs, strict=True))
