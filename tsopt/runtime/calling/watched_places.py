"""Where a watch looks: the places that hold what a model's Python code reads."""

from __future__ import annotations

from array import array
from collections import ChainMap, UserDict, UserList
from collections.abc import Mapping
from types import CellType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from tsopt.compiler.calls.snapshot import elements_of, slot_names
from tsopt.compiler.contents import HEAP_TYPE, behind_proxy, process_wide
from tsopt.compiler.model_reads import HOOKS, LEAVES, TABLES, Reads, content_of
from tsopt.runtime.calling.reading import CONTAINERS, Slots, attributes_by_name, readable, values_of

CONTENTS = 64  # values in a container that is compared at each call; of longer ones, it is how many
MOST = 512  # and how many containers and objects, those apart that modules, functions and globals hold themselves
MOST_TENSORS = 512  # in long containers: each costs time at each call
ARRAYS = 4096  # bytes of arrays that are compared at each call
ARRAY_TYPES = (np.ndarray, array, bytearray)
WRAPPERS = (UserDict, UserList, ChainMap)  # whose own code reads what they wrap
OWN = (*TABLES, *HOOKS, "training")  # of each module
ORDERED = ("_modules", *HOOKS)  # tables whose order counts
Slot = tuple[Mapping[str, Any], str]


class WatchedPlaces:
    """Where to look.

    containers: lists, and dicts whose values count: tables of parameters, buffers, modules, and of hooks.
    empty: tables that held nothing.
    slots: single values in dictionaries.
    arrays: small ones, of ARRAY_TYPES, which are compared by value.
    tensors: what containers hold, long ones too.
    keyed, sized: containers that are not a module's own: dicts, whose keys count, and all, whose lengths do.
    long: those of `sized` whose values are too many to be compared at each call.
    tables: attributes of each module and plain object, and `known`, the names among them; `whole`: those with all of
        OWN.
    typed: modules and objects, whose classes count.
    outside: ids of those of containers, arrays, and dictionaries of slots, that no module holds.
    """

    def __init__(self, reads: Reads) -> None:
        self.containers: list[Any] = []
        self.empty: list[Any] = []
        self.slots: list[Slot] = []
        self.tensors: list[torch.Tensor] = []
        self.keyed: list[dict[Any, Any]] = []
        self.sized: list[Any] = []
        self.long: list[Any] = []
        self.typed: list[Any] = [*reads.modules]
        self.cells: list[CellType] = reads.cells
        self.functions, self.classes = reads.functions, reads.classes
        self.tables: list[Mapping[str, Any]] = [module.__dict__ for module in reads.modules]
        self.whole = [table for table in self.tables if all(name in table for name in OWN)]
        self.known: list[frozenset[str]] = []
        self.arrays: list[Any] = []
        self._seen: set[int] = set()
        self._of_process = process_wide(reads.places)
        held: list[dict[Any, Any]] = [getattr(nn.modules.module, f"_global{name}") for name in HOOKS]
        for module in reads.modules:
            table = module.__dict__
            held += [table[name] for name in (*TABLES, *HOOKS) if isinstance(table.get(name), dict)]
            names = reads.names.difference(OWN if all(name in table for name in OWN) else TABLES)
            places = (table, Slots(module, slot_names(type(module))))
            self.slots += [(at, name) for at in places for name in at if name in names]
        self.slots += reads.places
        self.containers = [table for table in held if table]
        self.empty = [table for table in held if not table]
        inside = len(self.slots) - len(reads.places)
        self._below([place[name] for place, name in self.slots[:inside]], reads.names)
        arrays = len(self.arrays)
        mine = {id(held) for held in (*self.containers, *self.empty, *self.long, *self.tables)}
        mine |= {id(place) for place, _ in self.slots[:inside] + self.slots[inside + len(reads.places) :]}
        values = [place[name] for place, name in reads.places]
        values += [getattr(cls, name) for cls, name in self.classes]
        values += [content_of(cell) for cell in self.cells]
        self._below([*values, *reads.objects, *reads.held], reads.names)
        self.tables += reads.namespaces
        everything = (*self.containers, *self.empty, *self.long, *self.tables, *(place for place, _ in self.slots))
        self.outside = {id(held) for held in everything} - mine | {id(held) for held in self.arrays[arrays:]}
        self.slots += [(table, name) for table in self.whole for name in ORDERED if len(table[name]) > 1]
        self.measure()

    def _below(self, values: list[Any], names: set[str]) -> None:
        """What containers and plain objects hold, however deep, as long as it is little."""
        todo, left = values[::-1], MOST
        direct = {id(value) for value in values}
        while todo:
            value = behind_proxy(todo.pop())
            if isinstance(value, (nn.Module, type, ModuleType)) or id(value) in self._seen:
                continue
            if id(value) not in direct:
                if not left:
                    continue
                left -= isinstance(value, CONTAINERS) or hasattr(value, "__dict__")
            self._seen.add(id(value))
            if isinstance(value, torch.Tensor):
                self.tensors.append(value)
            elif isinstance(value, CONTAINERS):
                todo += self._container(value)
            elif type(value) in ARRAY_TYPES:
                holds_objects = isinstance(value, np.ndarray) and value.dtype.hasobject
                fits = not holds_objects and sum(map(_size, [value, *self.arrays])) <= ARRAYS
                self.arrays += [value] if fits else []
            elif isinstance(value, tuple):
                todo += elements_of(value)[:CONTENTS]
            elif not isinstance(value, (FunctionType, *LEAVES)):
                attributes = attributes_by_name(value)
                own: Any = getattr(value, "__dict__", None)
                if own is (attributes.maps[0] if isinstance(attributes, ChainMap) else attributes):
                    self.tables.append(own)  # not of `threading.local`, which has others in each thread
                # Flags may be read by names that are computed, such as those of transformers' configurations.
                read = [
                    name
                    for name, held in attributes.items()
                    if name in names or held is None or type(held) is bool or isinstance(value, WRAPPERS)
                ]
                self.slots += [(attributes, name) for name in read]
                self.typed += [value] if type(value).__flags__ & HEAP_TYPE else []  # others keep their class
                todo += [attributes[name] for name in read]

    def _container(self, value: Any) -> list[Any]:
        """Adds a container; returns what it holds, if that is little."""
        held = readable(value)
        if len(held) <= CONTENTS:
            (self.containers if held else self.empty).append(held)
            self.keyed += [held] if isinstance(value, dict) else []
            self.sized.append(held)
            return [*values_of(held)]
        if id(value) not in self._of_process:
            self.sized.append(held)
            self.long.append(held)
            inside = [item for item in values_of(held) if issubclass(type(item), torch.Tensor)]
            self.tensors += inside[: max(0, MOST_TENSORS - len(self.tensors))]
        return []

    def add_new(self, names: frozenset[str]) -> None:
        """Adds the attributes that modules have gained since, if code reads them."""
        tables = zip(self.tables, self.known, strict=True)
        self.slots += [(table, name) for table, known in tables for name in table if name in names - known]

    def measure(self) -> None:
        self.slots = [(place, name) for place, name in self.slots if name in place]
        self.containers += [table for table in self.empty if table]
        self.empty = [table for table in self.empty if not table]
        self.lengths = {id(container): len(container) for container in self.containers}
        self.known = [frozenset(table) for table in self.tables]


def bytes_of(held: Any) -> bytes:
    """The values of one of ARRAY_TYPES, which may be resized afterwards."""
    return bytes(held) if isinstance(held, bytearray) else held.tobytes()


def _size(held: Any) -> int:
    if isinstance(held, np.ndarray):
        return held.nbytes
    return len(held) * (held.itemsize if isinstance(held, array) else 1)
