"""Values that code reads and no dictionary holds: of a context, of a thread, or bound by a class at each access."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

ABSENT = object()  # where a name has no value


class _Place(Mapping[str, Any]):
    """Values by name, which subclasses can also set."""

    names: tuple[str, ...]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class InContext(_Place):
    """The value of a context variable in the current context."""

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
    """What a `threading.local` holds in the current thread.

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
        self._last = value


class OfClass(_Place):
    """An attribute of a class that is another object each time it is read: as it is defined, wherever that is."""

    def __init__(self, cls: type, name: str) -> None:
        self.names, self._cls = (name,), cls

    def __getitem__(self, name: str) -> Any:
        return next((vars(base)[name] for base in self._cls.__mro__ if name in vars(base)), ABSENT)

    def __setitem__(self, name: str, value: Any) -> None:
        base = next((base for base in self._cls.__mro__ if name in vars(base)), self._cls)
        setattr(base, name, value)
