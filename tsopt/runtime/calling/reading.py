"""Containers and objects of the user's, read past whatever their classes do when they are read."""

from __future__ import annotations

import threading
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from tsopt.compiler.calls.snapshot import builtin_class, dict_class, slot_names

CONTAINERS = (list, dict, set, deque)
OWN = (*CONTAINERS, OrderedDict, defaultdict, Counter)


class Past:
    """A container whose class may have methods of its own: what it holds, or its keys, read by those of Python's."""

    __slots__ = ("_kind", "held")

    def __init__(self, held: Any) -> None:
        self.held = held
        self._kind: Any = dict_class(held) if isinstance(held, dict) else builtin_class(held)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._kind.__iter__(self.held))

    def __len__(self) -> int:
        return int(self._kind.__len__(self.held))

    def values(self) -> Iterable[Any]:
        """Those of a dict, as they are whenever it is looked at; otherwise all that it holds."""
        return self._kind.values(self.held) if isinstance(self.held, dict) else self


def readable(container: Any) -> Any:
    """A container, to be looked at often: itself, unless its class is derived from one of Python's.

    A proxy only says that it is one: it is read as it wants to be.
    """
    derived = type(container) not in OWN and issubclass(type(container), CONTAINERS)
    return Past(container) if derived else container


def values_of(container: Any) -> Iterable[Any]:
    """What a readable container holds; of a dict, a view of its values."""
    if isinstance(container, Past):
        return container.values()
    return container.values() if isinstance(container, dict) else container


def kind_of(container: Any) -> str:
    """The name of the class of a readable container."""
    return type(container.held if isinstance(container, Past) else container).__name__


class Slots(Mapping[str, Any]):
    """The attributes of an object whose class has slots for them."""

    def __init__(self, value: Any, names: Sequence[str]) -> None:
        self._value, self.names = value, names

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._value, name)
        except AttributeError as error:
            raise KeyError(name) from error

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.names if hasattr(self._value, name))

    def __len__(self) -> int:
        return len(list(iter(self)))


def attributes_by_name(value: Any) -> Mapping[str, Any]:
    """The attributes of an object by name; none of what each thread has for itself (see `compiler/places.py`)."""
    if isinstance(value, threading.local):
        return {}
    namespace, slots = getattr(value, "__dict__", None), Slots(value, slot_names(type(value)))
    if not isinstance(namespace, dict):
        return slots
    return ChainMap(namespace, cast("dict[str, Any]", slots)) if slots.names else namespace
