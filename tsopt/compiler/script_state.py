"""What TorchScript keeps from call to call: attributes that its code sets, lists and dicts in them that it changes.

They are in C++, where neither `__dict__` nor `state_dict` has them, and each look at a list is a look at a copy.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

import torch
from torch import nn

from tsopt.compiler.graph.origin import is_library, short_path

CONTAINERS = ("ListType", "DictType", "TupleType", "OptionalType", "UnionType", "AnyType")
_PLACE = re.compile(r"# (.+?):(\d+):\d+\s*$")


@dataclass(frozen=True, slots=True)
class Written:
    """An attribute that a call changes: where it is below the module, and the line that changes it."""

    path: tuple[str, ...]
    where: str | None

    def __str__(self) -> str:
        return ".".join(self.path)


class ScriptState:
    """The attributes that calls of the scripts among some modules change, as they are."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._held: list[tuple[Any, str, Any]] = []
        known: set[int] = set()  # parts of a script that has been looked at
        for module in modules:
            if isinstance(module, torch.jit.ScriptModule) and id(module) not in known:
                known.update(map(id, module.modules()))
                for written in attributes_written(module):
                    holder = reduce(getattr, written.path[:-1], module)
                    self._held.append((holder, written.path[-1], getattr(holder, written.path[-1])))

    def put_back(self) -> None:
        """Restores what has changed, and touches nothing else."""
        for holder, name, value in self._held:
            if not _same(getattr(holder, name), value):
                setattr(holder, name, value)

    def are_same(self) -> bool:
        """Whether nothing has changed."""
        return all(_same(getattr(holder, name), value) for holder, name, value in self._held)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    return a is b if isinstance(a, torch.Tensor) else type(a) is type(b) and bool(a == b)


_KNOWN: weakref.WeakKeyDictionary[nn.Module, tuple[Written, ...]] = weakref.WeakKeyDictionary()


def attributes_written(script: nn.Module) -> tuple[Written, ...]:
    """What a call of a ScriptModule changes of it: in any of its branches, and not what it writes to tensors."""
    found = _KNOWN.get(script)
    if found is None:
        forward = getattr(script, "forward", None)
        graph = getattr(forward, "graph", None)
        found = () if graph is None else tuple(_written_in(graph.copy()))
        _KNOWN[script] = found
    return found


def _written_in(graph: Any) -> Iterator[Written]:
    torch._C._jit_pass_inline(graph)
    sources = _sources(graph)
    root = next(graph.inputs()).debugName()
    seen: set[tuple[str, ...]] = set()
    for node in nodes_in(graph):
        inputs = list(node.inputs())
        paths = []
        if node.kind() == "prim::SetAttr":
            holder = _path_of(inputs[0], root)
            paths = [] if holder is None else [(*holder, node.s("name"))]
        for place in containers_written(node.schema()):
            paths += [path for value in _origins(inputs[place], sources) if (path := _path_of(value, root))]
        for path in paths:
            if path not in seen:
                seen.add(path)
                # One that is set has no place: that of the value.
                yield Written(path, place_of(node) or place_of(inputs[-1].node()))


def nodes_in(block: Any) -> Iterator[Any]:
    """The nodes of a graph or a block, and of the blocks in these."""
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from nodes_in(inner)


def _path_of(value: Any, root: str) -> tuple[str, ...] | None:
    """The attributes that lead from the module, the value `root`, to a value; None for what the call has made."""
    node = value.node()
    if value.debugName() == root:
        return ()
    if node.kind() != "prim::GetAttr":
        return None
    holder = _path_of(node.input(), root)
    return None if holder is None else (*holder, node.s("name"))


def _sources(graph: Any) -> Mapping[str, list[Any]]:
    """By name of a value that is or holds a list or a dict: the values that this may be, or be out of."""
    found: dict[str, list[Any]] = {}

    def flows(value: Any, *origins: Any) -> None:
        found.setdefault(value.debugName(), []).extend(origin for origin in origins if _is_container(origin))

    for node in nodes_in(graph):
        inputs, outputs = list(node.inputs()), list(node.outputs())
        for place in containers_written(node.schema()):
            flows(inputs[place], *inputs)
        if node.kind() == "prim::Loop":
            (body,) = node.blocks()
            going = list(zip(list(body.inputs())[1:], list(body.outputs())[1:], inputs[2:], outputs, strict=True))
            for given, made, first, output in going:
                flows(given, first, made)
                flows(output, first, made)
        elif node.kind() == "prim::If":
            for block in node.blocks():
                for output, made in zip(outputs, block.outputs(), strict=True):
                    flows(output, made)
        else:
            for output in outputs:
                if not (_is_new(node.schema()) and _is_flat(output.type())):
                    flows(output, *inputs)
    return found


def _origins(value: Any, sources: Mapping[str, list[Any]]) -> list[Any]:
    """The attributes that a list or a dict may be, or be out of."""
    todo, seen, found = [value], set[str](), []
    while todo:
        value = todo.pop()
        if value.debugName() not in seen:
            seen.add(value.debugName())
            if value.node().kind() == "prim::GetAttr":
                found.append(value)
            todo += sources.get(value.debugName(), ())
    return found


def _is_container(value: Any) -> bool:
    return value.type().kind() in CONTAINERS


def _is_flat(kind: Any) -> bool:
    """Whether it is a list whose elements hold nothing."""
    return kind.kind() == "ListType" and kind.getElementType().kind() not in CONTAINERS


@cache
def _is_new(schema: str) -> bool:
    """Whether an op returns a list or a dict of its own."""
    if "::" not in schema:  # of `prim` ops
        return False
    returns = torch._C.parse_schema(schema).returns
    return len(returns) == 1 and returns[0].alias_info is None


@cache
def containers_written(schema: str) -> tuple[int, ...]:
    """Which arguments of an op are lists or dicts that it changes; not those whose tensors it writes to."""
    if "::" not in schema:
        return ()
    arguments = enumerate(torch._C.parse_schema(schema).arguments)
    return tuple(
        place
        for place, item in arguments
        if item.alias_info is not None
        and item.alias_info.is_write
        and item.alias_info.before_set  # of `Tensor(a!)[]` it is empty: there the elements are written to
        and item.type.kind() in ("ListType", "DictType")
    )


def place_of(node: Any) -> str | None:
    """`model.py:12` of a node, where it was scripted from a file of the user's."""
    found = _PLACE.search(str(node).splitlines()[0])
    return None if found is None or is_library(found.group(1)) else f"{short_path(found.group(1))}:{found.group(2)}"
