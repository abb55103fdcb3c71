"""Calibration data that can be read once, for several runs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from copy import copy
from typing import Any

import torch

from tsopt.compiler.calls.calibration_kept import LARGEST, MOST
from tsopt.compiler.calls.calibration_order import Unreadable
from tsopt.compiler.calls.structure import flatten, unflatten
from tsopt.compiler.graph.origin import user_frame
from tsopt.compiler.random_state import random_state_kept
from tsopt.errors import UsageError


def readable_again(data: Any) -> Any:
    """Calibration data for several runs: an iterator behind copies of its items; anything else as it is."""
    return Replayed(data) if isinstance(data, Iterator) else data


def owned(value: Any) -> Any:
    """A nesting of tensors and arrays with the same values in memory of its own."""
    leaves, structure = flatten(value)
    return unflatten(structure, [_copy_of(leaf) for leaf in leaves])


def _copy_of(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy(leaf)


class Replayed(Iterable[Any]):
    """The items of an iterator, which is read only as far as some run has asked, for others to read them again."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._copies: list[Any] = []
        self._end: Exception | None = None  # by which it ended: an error is for each run, which would miss the rest
        self._lock = threading.RLock()

    def __iter__(self) -> Iterator[Any]:
        for number in itertools.count():
            if not self._has(number):
                return
            yield self._copies[number]

    def _has(self, number: int) -> bool:
        """Whether there is such an item, which is read if it was not yet."""
        with self._lock:
            while number >= len(self._copies) and self._end is None:
                try:
                    self._copies.append(owned(next(self._source)))
                except Exception as error:
                    self._end = error
            if number < len(self._copies):
                return True
            if isinstance(self._end, StopIteration):
                return False
            raise self._end  # type: ignore[misc]

    def read_ahead(self) -> None:
        """Reads what is probably needed in another process."""
        size = 0
        with random_state_kept():
            for item in itertools.islice(self, MOST):
                size += sum(leaf.nbytes for leaf in flatten(item)[0] if hasattr(leaf, "nbytes"))
                if size >= LARGEST:
                    break

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process, a list of what has been read, and of what is probably needed there."""
        self.read_ahead()
        return list, (self._copies.copy(),)

    def __len__(self) -> int:
        """How many items have been read."""
        return len(self._copies)


def unreadable(raised: Exception, count: int) -> UsageError:
    """What to tell of an error of the data, after so many items."""
    error, place = raised, f"after {counted(count, 'item')}"
    if isinstance(raised, Unreadable):
        error, place = raised.error, f"at item {raised.number}"
    return UsageError(
        f"calibration raises {type(error).__name__} {place}",
        where=user_frame(error),
        why=str(error)[:300] or None,
        fix="check that the data can be read to its end",
    )


def read_ahead(data: Any) -> None:
    """Reads what another process will be sent of an iterator, so that its errors are raised here.

    Raises:
        UsageError: the iterator raises an error.
    """
    if isinstance(data, Replayed):
        try:
            data.read_ahead()
        except Exception as error:
            raise unreadable(error, len(data)) from error


def counted(count: int, what: str) -> str:
    """Such as `1 input`, `2 inputs`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
