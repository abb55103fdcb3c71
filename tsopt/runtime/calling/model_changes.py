"""Whether a model has changed since it was compiled, as far as that can be detected at every call.

Detected: tensors written in place or given other memory; parameters, buffers, modules and hooks that are replaced,
added or removed; training flags; attributes, globals and closures that its Python code reads (`model_reads.py`), and
the contents of lists, dicts and plain objects among them. Not detected: values written through numpy
or `.data`, other than by a step of an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from operator import attrgetter
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from tsopt.compiler.calls.snapshot import elements_of, slot_names
from tsopt.compiler.model_reads import HOOKS, LEAVES, TABLES, Reads, content_of, reads_of
from tsopt.compiler.places import ABSENT
from tsopt.compiler.protect import training_of
from tsopt.runtime.calling import unseen_writes
from tsopt.runtime.calling.alike import alike, all_alike, differ
from tsopt.runtime.calling.reading import CONTAINERS, Slots, attributes_by_name, kind_of, readable, values_of
from tsopt.runtime.calling.weights import has_place

CONTENTS = 64  # values in a container that is compared; longer ones are for audits
MOST = 512  # and how many of them
Slot = tuple[Mapping[str, Any], str]
_version, _place, _strides = attrgetter("_version"), torch.Tensor.data_ptr, torch.Tensor.stride
_cell: Any = attrgetter("cell_contents")
_function = attrgetter("__code__", "__defaults__", "__kwdefaults__")


class Watch:
    """A model as it is now, all that its Python reads included; or what it was found to read.

    Args:
        written: tensors that the model writes itself, whose values do not count.

    Attributes:
        modules: of the model, and those that its functions hold.
        asks: names that its code reads.
        written: as given.
    """

    def __init__(self, model: Any, written: Iterable[torch.Tensor] = ()) -> None:
        reads = model if isinstance(model, Reads) else reads_of(model)
        self.modules, self.asks = reads.modules, frozenset(reads.names)
        self.written: list[torch.Tensor] = list(written)
        self._found = _Found(reads)
        self._flags = training_of(self.modules)
        self._now()
        unseen_writes.tell(self)

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The tensors that the model computes with, wherever its code finds them."""
        return (*self._tensors, *self.written)

    def _now(self) -> None:
        """Takes down what is there."""
        found, written = self._found, {id(tensor) for tensor in self.written}
        self._views = [*map(values_of, found.containers)]
        self._held = [*chain.from_iterable(self._views)]
        self._values = [place[name] for place, name in found.slots]
        self._classes = [getattr(cls, name) for cls, name in found.classes]
        self._cells = [content_of(cell) for cell in found.cells]
        functions = chain.from_iterable(map(_function, found.functions))
        self._all = [*self._held, *self._values, *self._classes, *self._cells, *functions]
        self._sizes = [*map(len, found.tables)]
        self._keys, self._lengths = [*chain.from_iterable(found.keyed)], [*map(len, found.sized)]
        # Tensors by what holds them: whatever code reads, however it is reached.
        held = (*self._held, *self._values, *self._classes, *self._cells, *found.tensors)
        tensors = [value for value in held if isinstance(value, torch.Tensor)]
        unique = {id(tensor): tensor for tensor in tensors if id(tensor) not in written and has_place(tensor)}
        self._tensors = [*unique.values()]
        self._counted = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._shaped = [tensor for tensor in self._tensors if tensor.dim() > 1]
        self._versions = [*map(_version, self._counted)]
        self._expected: list[int] | None = self._versions  # None while statistics are in doubt
        self._doubted: list[tuple[torch.Tensor, torch.Tensor]] = []  # and what they were
        self._places = [*map(_place, self._tensors)]
        self._strides = [*map(_strides, self._shaped)]

    def leave_out(self, written: Iterable[torch.Tensor]) -> None:
        """Tensors whose values do not count any more."""
        self.written += written
        out, marks = {id(tensor) for tensor in self.written}, self._marks()
        self._tensors = [tensor for tensor in self._tensors if id(tensor) not in out]
        self._counted = [tensor for tensor in self._counted if id(tensor) not in out]
        self._shaped = [tensor for tensor in self._shaped if id(tensor) not in out]
        self._as_marked(*marks)

    def _marks(self) -> tuple[dict[int, int], dict[int, int], dict[int, tuple[int, ...]]]:
        """The versions, places and strides of tensors as they count, by their ids."""
        versions, places = (
            zip(self._counted, self._versions, strict=True),
            zip(self._tensors, self._places, strict=True),
        )
        strides = zip(self._shaped, self._strides, strict=True)
        return {id(t): v for t, v in versions}, {id(t): p for t, p in places}, {id(t): s for t, s in strides}

    def _as_marked(self, versions: dict[int, int], places: dict[int, int], strides: dict[int, tuple[int, ...]]) -> None:
        """Tensors that have marks count as these say; others as they are."""
        self._versions = [versions[id(t)] if id(t) in versions else _version(t) for t in self._counted]
        self._places = [places[id(t)] if id(t) in places else _place(t) for t in self._tensors]
        self._strides = [strides[id(t)] if id(t) in strides else _strides(t) for t in self._shaped]
        self._expected = None if self._doubted else self._versions

    def changed(self) -> bool:
        """Whether anything is not what it was. Microseconds, and one of them for each two or three tensors."""
        found = self._found
        try:
            same = (
                [*map(_version, self._counted)] == self._expected
                and [*map(_place, self._tensors)] == self._places
                and [*map(_strides, self._shaped)] == self._strides
                and not any(found.empty)
                and [*map(len, found.sized)] == self._lengths
                and all_alike([*chain.from_iterable(found.keyed)], self._keys)
                and [*map(len, found.tables)] == self._sizes
                and all_alike(
                    [
                        *chain.from_iterable(self._views),
                        *[place[name] for place, name in found.slots],
                        *[getattr(cls, name) for cls, name in found.classes],
                        *map(_cell, found.cells),
                        *chain.from_iterable(map(_function, found.functions)),
                    ],
                    self._all,
                )
            )
        except Exception:  # a name that is gone, a tensor that is compared with another one: neither is what it was
            same = False
        return not same and not self._is_settled() and not self._is_only_more()

    def _is_only_more(self) -> bool:
        """Whether all that differs is attributes that nothing reads; they are part of what is there from now on."""
        found = self._found
        if [*map(len, found.tables)] == self._sizes:
            return False
        shadows = any(
            name in self.asks and name not in known
            for table, known in zip(found.tables, found.known, strict=True)
            for name in table
        )
        if shadows or any(len(t) < n for t, n in zip(found.tables, self._sizes, strict=True)):
            return False
        self._sizes = [*map(len, found.tables)]
        return not self.changed()

    def was_written(self, places: frozenset[int]) -> None:
        if any(unseen_writes.place_of(tensor) in places for tensor in self._counted):
            self._versions, self._doubted = [-1] * len(self._counted), []
            self._expected = self._versions

    def doubt(self) -> None:
        """Before a call in training mode: statistics that it may write without raising a version, as batch norm does.

        They are compared by value when somebody asks again.
        """
        if self._expected is not None:
            small = [tensor for tensor in self._counted if tensor.dim() < 2 and not tensor.requires_grad]
            self._doubted = [(tensor, tensor.detach().clone()) for tensor in small]
            self._expected = None if small else self._versions

    def _is_settled(self) -> bool:
        """Whether statistics that were in doubt are what they were, as all else is."""
        if not self._doubted:
            return False
        counted = {id(tensor) for tensor in self._counted}
        if any(differ(*pair) for pair in self._doubted if id(pair[0]) in counted):
            return False
        self._expected, self._doubted = self._versions, []
        return not self.changed()

    def training_changed(self) -> bool:
        """Whether modules are in training mode that were not, or the other way round."""
        return training_of(self.modules) != self._flags

    def changes_of(
        self, call: Callable[[], object], kept: Callable[[], AbstractContextManager[None]]
    ) -> tuple[list[str], list[str]]:
        """What each call of the model changes: outside of it, and of its attributes.

        What the first call fills, as a cache, does not count; nor do buffers.

        Args:
            call: makes one.
            kept: puts back what further ones change outside.
        """
        call()
        if not self._changed_outside() and not self._changed_inside():
            return [], []
        self._found.add_new(self.asks)
        self.renew(but_writes=True)
        with kept():
            call()
            return self._changed_outside(), self._changed_inside()

    def _changed_inside(self) -> list[str]:
        """Attributes of modules, and of objects that they hold, which differ now."""
        found, outside = self._found, self._found.outside
        names = [
            repr(name)
            for (place, name), before in zip(found.slots, self._values, strict=True)
            if id(place) not in outside and not alike(place.get(name, ABSENT), before)
        ]
        for table, known in zip(found.tables, found.known, strict=True):
            names += [repr(name) for name in table if name not in known and name in self.asks]
        lengths = zip(found.sized, self._lengths, strict=True)
        names += [f"a {kind_of(held)}" for held, size in lengths if len(held) != size and id(held) not in outside]
        return [*dict.fromkeys(names)]

    def _changed_outside(self) -> list[str]:
        """What differs now and is not part of the model: globals, closures, and what they and hooks hold."""
        found, outside = self._found, self._found.outside
        held = iter(self._held)
        names = []
        for container, view in zip(found.containers, self._views, strict=True):
            before = [next(held) for _ in range(found.lengths[id(container)])]
            if id(container) in outside and not all_alike([*view], before):
                names.append(f"a {kind_of(container)}")
        names += [f"a {kind_of(container)}" for container in found.empty if container and id(container) in outside]
        names += [
            repr(slot[1])
            for slot, before in zip(found.slots, self._values, strict=True)
            if id(slot[0]) in outside and not alike(slot[0].get(slot[1], ABSENT), before)
        ]
        classes = zip(found.classes, self._classes, strict=True)
        names += [repr(name) for (cls, name), before in classes if not alike(getattr(cls, name, ABSENT), before)]
        cells = zip(found.cells, self._cells, strict=True)
        names += ["a variable of a closure" for cell, before in cells if not alike(content_of(cell), before)]
        return [*dict.fromkeys(names)]

    def leave_out_changes(self) -> None:
        """What differs now, tensors apart, was changed by the model's own call: it does not count any more."""
        found = self._found
        held = iter(self._held)
        kept = []
        for container, view in zip(found.containers, self._views, strict=True):
            # As many as there were: those that are there now may be more.
            before = [next(held) for _ in range(found.lengths[id(container)])]
            if len(before) == len(container) and all(map(alike, view, before)):
                kept.append(container)
        slots = [
            slot
            for slot, before in zip(found.slots, self._values, strict=True)
            if alike(slot[0].get(slot[1], ABSENT), before)
        ]
        tables = [
            (table, known)
            for table, known, size in zip(found.tables, found.known, self._sizes, strict=True)
            if len(table) == size
        ]
        out = {id(container) for container in found.containers} - {id(container) for container in kept}
        out |= {id(container) for container in found.empty if container}
        found.keyed = [held for held in found.keyed if id(held) not in out]
        found.sized = [held for held in found.sized if id(held) not in out]
        found.containers, found.slots = kept, slots
        found.tables, found.known = [table for table, _ in tables], [known for _, known in tables]
        found.empty = [table for table in found.empty if not table]
        found.cells = [c for c, before in zip(found.cells, self._cells, strict=True) if alike(content_of(c), before)]

    def was_overwritten(self) -> bool:
        """Whether tensors have been written to, or have been given other memory."""
        written = [*map(_version, self._counted)] != self._versions
        return written or [*map(_place, self._tensors)] != self._places

    def renew(self, *, but_writes: bool = False) -> None:
        """From now on what counts is how things are now.

        Args:
            but_writes: what has been written to tensors meanwhile is still a change: other threads may have done it.
        """
        held, marks, doubted = self._tensors, self._marks(), self._doubted  # `held`: an id is that of one tensor
        self._flags = training_of(self.modules)
        self._found.measure()
        self._now()
        if but_writes and held:
            self._doubted = doubted
            self._as_marked(*marks)


class _Found:
    """Where to look.

    containers: lists, and dicts whose values count: tables of parameters, buffers, modules, and of hooks.
    empty: tables that held nothing.
    slots: single values in dictionaries.
    tensors: what containers hold.
    keyed, sized: containers that are not a module's own: dicts, whose keys count, and all, whose lengths do.
    tables: attributes of each module, and `known`, the names among them.
    outside: ids of those of containers, and of dictionaries of slots, that no module holds.
    """

    def __init__(self, reads: Reads) -> None:
        self.containers: list[Any] = []
        self.empty: list[Any] = []
        self.slots: list[Slot] = []
        self.tensors: list[torch.Tensor] = []
        self.keyed: list[dict[Any, Any]] = []
        self.sized: list[Any] = []
        self.cells: list[CellType] = reads.cells
        self.functions, self.classes = reads.functions, reads.classes
        self.tables = [module.__dict__ for module in reads.modules]
        self.known: list[frozenset[str]] = []
        self._seen: set[int] = set()
        held: list[dict[Any, Any]] = [getattr(nn.modules.module, f"_global{name}") for name in HOOKS]
        for module in reads.modules:
            table = module.__dict__
            held += [table[name] for name in (*TABLES, *HOOKS) if isinstance(table.get(name), dict)]
            places = (table, Slots(module, slot_names(type(module))))
            self.slots += [(at, name) for at in places for name in at if name in reads.names and name not in TABLES]
        self.slots += reads.places
        self.containers = [table for table in held if table]
        self.empty = [table for table in held if not table]
        inside = len(self.slots) - len(reads.places)
        self._below([place[name] for place, name in self.slots[:inside]], reads.names)
        mine = {id(held) for held in (*self.containers, *self.empty, *(place for place, _ in self.slots[:inside]))}
        mine |= {id(place) for place, _ in self.slots[inside + len(reads.places) :]}
        values = [place[name] for place, name in reads.places]
        values += [getattr(cls, name) for cls, name in self.classes]
        values += [content_of(cell) for cell in self.cells]
        self._below([*values, *reads.objects, *reads.held], reads.names)
        everything = (*self.containers, *self.empty, *(place for place, _ in self.slots))
        self.outside = {id(held) for held in everything} - mine
        self.measure()

    def _below(self, values: list[Any], names: set[str]) -> None:
        """What containers and plain objects hold, however deep, as long as it is little."""
        todo, left = values[::-1], MOST
        while todo and left:
            value = todo.pop()
            if isinstance(value, (nn.Module, type, ModuleType)) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            left -= isinstance(value, CONTAINERS) or hasattr(value, "__dict__")
            if isinstance(value, torch.Tensor):
                self.tensors.append(value)
            elif isinstance(value, CONTAINERS):
                held = readable(value)
                if len(held) <= CONTENTS:
                    (self.containers if held else self.empty).append(held)
                    todo.extend(values_of(held))  # not +=, which a proxy answers itself
                    self.keyed += [held] if isinstance(value, dict) else []
                    self.sized += [held]
            elif isinstance(value, tuple):
                todo += elements_of(value)[:CONTENTS]
            elif not isinstance(value, (FunctionType, *LEAVES)):
                attributes = attributes_by_name(value)
                # Flags may be read by names that are computed, such as those of transformers' configurations.
                own = [name for name, held in attributes.items() if name in names or held is None or type(held) is bool]
                self.slots += [(attributes, name) for name in own]
                todo += [attributes[name] for name in own]

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
