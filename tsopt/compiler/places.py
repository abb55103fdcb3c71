"""Where code reads values that no dictionary holds: each thread or context has its own, or a class makes them anew."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, MutableMapping
from contextvars import ContextVar
from typing import Any

ABSENT = object()  # where a name has no value


class _Place(MutableMapping[str, Any]):
    """Values by name. They stand as they are: nothing is removed."""

    names: tuple[str, ...]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __delitem__(self, name: str) -> None:
        raise NotImplementedError


class InContext(_Place):
    """What a context variable is where somebody looks: in the thread, or the task, of a call."""

    def __init__(self, variable: ContextVar[Any]) -> None:
        self.names, self._variable = (variable.name,), variable

    def __getitem__(self, name: str) -> Any:
        try:
            return self._variable.get()
        except LookupError:
            return ABSENT

    def __setitem__(self, name: str, value: Any) -> None:
        if value is not ABSENT:  # which nothing but its token brings back
            self._variable.set(value)


class InThread(_Place):
    """What a `threading.local` holds in the thread of whoever looks.

    Args:
        read: names that count; names may be added to them later.
    """

    names = ("threading.local",)

    def __init__(self, held: threading.local, read: Collection[str]) -> None:
        self._held, self._read = held, read
        self._last: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        last, now = self._last, {name: value for name, value in vars(self._held).items() if name in self._read}
        if len(now) != len(last) or any(last.get(name, ABSENT) is not value for name, value in now.items()):
            self._last = last = now
        return last  # the very same for as long as nothing changes

    def __setitem__(self, name: str, value: dict[str, Any]) -> None:
        held = vars(self._held)
        for gone in [name for name in held if name in self._read and name not in value]:
            del held[gone]
        held.update(value)


class OfClass(_Place):
    """An attribute of a class that is another object each time it is read: as it is defined, wherever that is."""

    def __init__(self, cls: type, name: str) -> None:
        self.names, self._cls = (name,), cls

    def __getitem__(self, name: str) -> Any:
        return next((vars(base)[name] for base in self._cls.__mro__ if name in vars(base)), ABSENT)

    def __setitem__(self, name: str, value: Any) -> None:
        base = next((base for base in self._cls.__mro__ if name in vars(base)), self._cls)
        setattr(base, name, value)
