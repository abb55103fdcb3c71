"""Whether a model has changed since it was compiled, as far as that can be detected at every call.

Detected: tensors written in place, given other memory or another shape; their `requires_grad`, where code reads it;
parameters, buffers, modules and hooks that are replaced, added or removed, one by one or with their tables; classes of
modules; training flags; attributes, globals and closures that its Python code reads (`model_reads.py`), and the
contents of lists, dicts and plain objects among them.
Not detected: values of tensors written through numpy or `.data`, other than by a step of an optimizer; a replaced
`__dict__`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch

from tsopt.compiler.model_reads import LEAVES, TABLES, Reads, content_of, reads_of
from tsopt.compiler.places import ABSENT
from tsopt.compiler.protect import training_of
from tsopt.runtime.calling import unseen_writes
from tsopt.runtime.calling.alike import Kept, alike, all_alike, differ, resembles
from tsopt.runtime.calling.reading import kind_of, values_of
from tsopt.runtime.calling.tensor_marks import TensorMarks
from tsopt.runtime.calling.watched_places import OWN, WatchedPlaces, bytes_of
from tsopt.runtime.calling.weights import has_place

_cell: Any = attrgetter("cell_contents")
_code, _defaults, _kwdefaults = attrgetter("__code__"), attrgetter("__defaults__"), attrgetter("__kwdefaults__")
_own: Any = itemgetter(*OWN)


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
        self._found = WatchedPlaces(reads)
        self._flags = training_of(self.modules)
        # Not renewed: what was found below others is not looked at.
        self._types, self._own = [*map(type, self._found.typed)], [*map(_own, self._found.whole)]
        self._now()
        unseen_writes.tell(self)

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The tensors that the model computes with, wherever its code finds them."""
        return (*self._marks.tensors, *self.written)

    def _now(self, before: TensorMarks | None = None) -> None:
        """Takes down what is there.

        Args:
            before: marks of tensors that count as they were then.
        """
        found, written = self._found, {id(tensor) for tensor in self.written}
        self._views = [*map(values_of, found.containers)]
        self._held = [*chain.from_iterable(self._views)]
        self._values = [place[name] for place, name in found.slots]
        self._classes = [getattr(cls, name) for cls, name in found.classes]
        self._cells = [content_of(cell) for cell in found.cells]
        self._all = Kept([*self._held, *self._values, *self._classes, *self._cells, *self._of_functions()])
        self._sizes, self._bytes = [*map(len, found.tables)], [*map(bytes_of, found.arrays)]
        self._keys, self._lengths = Kept([*chain.from_iterable(found.keyed)]), [*map(len, found.sized)]
        # Tensors by what holds them: whatever code reads, however it is reached.
        held = (*self._held, *self._values, *self._classes, *self._cells, *found.tensors)
        tensors = [value for value in held if isinstance(value, torch.Tensor)]
        unique = {id(tensor): tensor for tensor in tensors if id(tensor) not in written and has_place(tensor)}
        self._marks = TensorMarks(unique.values(), before)
        self._asked = [*unique.values()] if "requires_grad" in self.asks else []
        self._graded = [tensor.requires_grad for tensor in self._asked]

    def leave_out(self, written: Iterable[torch.Tensor]) -> None:
        """Tensors whose values do not count any more."""
        self.written += written
        self._marks.leave_out(frozenset(id(tensor) for tensor in self.written))

    def changed(self) -> bool:
        """Whether anything is not what it was. Microseconds, and one of them for each two or three tensors."""
        found = self._found
        try:
            same = (
                self._marks.hold()
                and not any(found.empty)
                and (not self._asked or [tensor.requires_grad for tensor in self._asked] == self._graded)
                and (not found.sized or self._are_sized())
                and [*map(len, found.tables)] == self._sizes
                and (not found.arrays or [*map(bytes_of, found.arrays)] == self._bytes)
                and [*map(type, found.typed)] == self._types
                # Equal ones are as good: what they hold is compared at each call.
                and [*map(_own, found.whole)] == self._own
                and self._all.alike(
                    [
                        *chain.from_iterable(self._views),
                        *[place[name] for place, name in found.slots],
                        *[getattr(cls, name) for cls, name in found.classes],
                        *(map(_cell, found.cells) if found.cells else ()),
                        *(self._of_functions() if found.functions else ()),
                    ]
                )
            )
        except Exception:  # a name that is gone, a tensor that is compared with another one: neither is what it was
            same = False
        return not same and not self._is_settled() and not self._is_only_more()

    def _are_sized(self) -> bool:
        """Whether containers have as many values as they had, and dicts the same keys."""
        found = self._found
        same = [*map(len, found.sized)] == self._lengths
        return same and self._keys.alike([*chain.from_iterable(found.keyed)])

    def _of_functions(self) -> list[Any]:
        functions = self._found.functions
        return [*map(_code, functions), *map(_defaults, functions), *map(_kwdefaults, functions)]

    def _is_only_more(self) -> bool:
        """Whether all that differs is attributes that nothing reads: what there is of them counts from now on."""
        found = self._found
        if [*map(len, found.tables)] == self._sizes:
            return False
        shadows = any(
            name in self.asks and name not in known
            for table, known in zip(found.tables, found.known, strict=True)
            for name in table
        )
        if shadows:
            return False
        before, self._sizes = self._sizes, [*map(len, found.tables)]
        if self.changed():
            self._sizes = before
            return False
        return True

    def was_written(self, places: frozenset[int]) -> None:
        self._marks.was_written(places)

    def doubt(self) -> None:
        """Before a call in training mode: statistics that it may write without raising a version, as batch norm does.

        They are compared by value when somebody asks again.
        """
        self._marks.doubt()

    def _is_settled(self) -> bool:
        """Whether statistics that were in doubt are what they were, as all else is."""
        return self._marks.settle() and not self.changed()

    def training_changed(self) -> bool:
        """Whether modules are in training mode that were not, or the other way round."""
        return training_of(self.modules) != self._flags

    def changes_of(
        self,
        call: Callable[[], object],
        kept: Callable[[], AbstractContextManager[None]],
        other: Callable[[], object] | None = None,
    ) -> tuple[list[str], list[str]]:
        """What each call of the model changes: outside of it, and of its attributes.

        What the first call fills, as a cache, does not count; nor does what is written to buffers.

        Args:
            call: makes one.
            kept: puts back what further ones change outside.
            other: makes one with other values. Tensors that it sets to what they were come from weights alone, as those
                of weight norm.
        """
        long = self._in_long()
        call()
        if not any(self._changes(long)):
            return [], []
        self._found.add_new(self.asks)
        self.renew(but_writes=True)
        with kept():
            long = self._in_long()
            (other or call)()
            return self._changes(long, by_value=other is not None)

    def _in_long(self) -> list[list[Any]]:
        """What is in containers that are too long to be compared at each call."""
        return [[*held, *values_of(held)] for held in self._found.long]

    def _changes(self, long: list[list[Any]], *, by_value: bool = False) -> tuple[list[str], list[str]]:
        """What differs now: outside of the model, and in it.

        Args:
            long: what was in long containers.
            by_value: an attribute that is another tensor with the same values is as it was.
        """
        pairs = zip(self._found.long, self._in_long(), long, strict=True)
        other = [held for held, now, before in pairs if not all_alike(now, before)]
        outside = [f"a {kind_of(held)}" for held in other if id(held) in self._found.outside]
        inside = [f"a {kind_of(held)}" for held in other if id(held) not in self._found.outside]
        outside, inside = self._changed_outside() + outside, self._changed_inside(by_value) + inside
        return [*dict.fromkeys(outside)], [*dict.fromkeys(inside)]

    def _changed_inside(self, by_value: bool) -> list[str]:
        """Attributes of modules, and of objects that they hold, which differ now."""
        found, outside = self._found, self._found.outside
        slots = [
            (slot, slot[0].get(slot[1], ABSENT), before) for slot, before in zip(found.slots, self._values, strict=True)
        ]
        names = [
            repr(name)
            for (place, name), now, before in slots
            if id(place) not in outside and not alike(now, before) and not (by_value and _are_equal(now, before))
        ]
        names += self._replaced() + self._gained(outside=False) + self._written_arrays(outside=False)
        lengths = zip(found.sized, self._lengths, strict=True)
        names += [f"a {kind_of(held)}" for held, size in lengths if len(held) != size and id(held) not in outside]
        return names

    def _replaced(self) -> list[str]:
        """What lists and dicts of the model hold now and did not: parameters and buffers by name."""
        found, held = self._found, iter(self._held)
        tables = {id(table[name]) for table in found.whole for name in TABLES}
        names = []
        for container, view in zip(found.containers, self._views, strict=True):
            before, now = [next(held) for _ in range(found.lengths[id(container)])], [*view]
            if id(container) in found.outside or all_alike(now, before):
                continue
            if id(container) in tables and len(now) == len(before):
                pairs = zip(container, now, before, strict=True)
                names += [repr(name) for name, value, old in pairs if not alike(value, old)]
            else:
                names.append(f"a {kind_of(container)}")
        return names

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
            if id(slot[0]) in outside and not resembles(slot[0].get(slot[1], ABSENT), before)
        ]
        names += self._gained(outside=True) + self._written_arrays(outside=True)
        classes = zip(found.classes, self._classes, strict=True)
        names += [repr(name) for (cls, name), before in classes if not alike(getattr(cls, name, ABSENT), before)]
        cells = zip(found.cells, self._cells, strict=True)
        names += ["a variable of a closure" for cell, before in cells if not alike(content_of(cell), before)]
        return names

    def _gained(self, *, outside: bool) -> list[str]:
        """Attributes that objects have gained, and code reads: of those outside of all modules, or of the others."""
        found = self._found
        tables = zip(found.tables, found.known, strict=True)
        asked = ((table, known) for table, known in tables if (id(table) in found.outside) == outside)
        return [repr(name) for table, known in asked for name in table if name not in known and name in self.asks]

    def _written_arrays(self, *, outside: bool) -> list[str]:
        left, found = {id(array) for array in self._unwritten()}, self._found
        written = [held for held in found.arrays if id(held) not in left]
        written = [held for held in written if (id(held) in found.outside) == outside]
        return ["a numpy array" if isinstance(held, np.ndarray) else f"a {type(held).__name__}" for held in written]

    def _unwritten(self) -> list[Any]:
        arrays = zip(self._found.arrays, self._bytes, strict=True)
        return [held for held, before in arrays if bytes_of(held) == before]

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
        out |= {id(held) for held, size in zip(found.sized, self._lengths, strict=True) if len(held) != size}
        found.keyed = [held for held in found.keyed if id(held) not in out]
        found.sized = [held for held in found.sized if id(held) not in out]
        found.containers, found.slots, found.arrays = kept, slots, self._unwritten()
        found.tables, found.known = [table for table, _ in tables], [known for _, known in tables]
        found.empty = [table for table in found.empty if not table]
        found.cells = [c for c, before in zip(found.cells, self._cells, strict=True) if alike(content_of(c), before)]
        classes = zip(found.classes, self._classes, strict=True)
        found.classes = [(cls, name) for (cls, name), before in classes if alike(getattr(cls, name, ABSENT), before)]

    def has_filled(self) -> bool:
        """Whether all that differs is what dicts hold besides what they held, as caches do that calls fill.

        What is new must be plain values: nothing is looked for below others.
        """
        found = self._found
        others = [
            *(place.get(name, ABSENT) for place, name in found.slots),
            *(getattr(cls, name, ABSENT) for cls, name in found.classes),
            *map(content_of, found.cells),
            *self._of_functions(),
        ]
        dicts = {id(held) for held in found.keyed}
        same = (
            self._marks.hold()
            and len(self._unwritten()) == len(found.arrays)
            and not self._gained(outside=True)
            and not self._gained(outside=False)
            and [*map(type, found.typed)] == self._types
            and [*map(_own, found.whole)] == self._own
            and all_alike(others, self._all.values[len(self._held) :])
            and not any(held and id(held) not in dicts for held in found.empty)
        )
        keys, values = iter(self._keys.values), iter(self._held)
        for held, size in zip(found.sized, self._lengths, strict=True):
            if id(held) in dicts:
                before = [next(keys) for _ in range(size)]
                same &= all_alike([*held][:size], before) and all(map(_is_plain, [*values_of(held)][size:]))
            else:
                same &= len(held) == size
        for held, view in zip(found.containers, self._views, strict=True):
            size = found.lengths[id(held)]
            before, now = [next(values) for _ in range(size)], [*view]
            same &= all_alike(now[:size] if id(held) in dicts else now, before)
        return same

    def take_filled(self) -> None:
        """From now on what dicts hold is what they hold now, and so are tensors in tuples there."""
        found = self._found
        # Of copies: other threads may fill the dicts meanwhile.
        held = tuple(value for held in found.keyed for value in tuple(values_of(held)))
        tensors = [*found.tensors, *_tensors_in(held)]
        found.tensors = [*{id(tensor): tensor for tensor in tensors}.values()]
        self.renew(but_writes=True)

    def was_overwritten(self) -> bool:
        """Whether tensors have been written to, or have been given other memory."""
        return self._marks.overwritten()

    def renew(self, *, but_writes: bool = False) -> None:
        """From now on what counts is how things are now.

        Args:
            but_writes: what has been written to tensors meanwhile is still a change: other threads may have done it.
        """
        self._flags = training_of(self.modules)
        self._found.measure()
        self._now(self._marks if but_writes else None)


def _are_equal(value: Any, before: Any) -> bool:
    """Whether they are two tensors with the same values."""
    return isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor) and not differ(value, before)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """A tensor, or those that a tuple holds."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors_in(part)] if type(value) is tuple else []


def _is_plain(value: Any) -> bool:
    """Whether nothing below a value can change, but for what tensors hold."""
    return isinstance(value, LEAVES) or (type(value) is tuple and all(map(_is_plain, value)))
