"""Where code reads values that no dictionary holds: a class makes them anew."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
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


class OfClass(_Place):
    """An attribute of a class that is another object each time it is read: as it is defined, wherever that is."""

    def __init__(self, cls: type, name: str) -> None:
        self.names, self._cls = (name,), cls

    def __getitem__(self, name: str) -> Any:
        return next((vars(base)[name] for base in self._cls.__mro__ if name in vars(base)), ABSENT)

    def __setitem__(self, name: str, value: Any) -> None:
        base = next((base for base in self._cls.__mro__ if name in vars(base)), self._cls)
        setattr(base, name, value)
