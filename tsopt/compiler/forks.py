"""What is done in the child of a fork, where no thread of the parent's is but the one that has forked.

Locks that others had would never be released there, and what they had put in place would stay.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakSet


class Forks(Protocol):
    """What is told when it has become a copy in a fork."""

    def forked(self) -> None:
        """Lets go of what is the parent's. No other thread runs yet."""


_there: WeakSet[Forks] = WeakSet()


def tell(item: Forks) -> None:
    """Tells it of each fork, in the child, for as long as it is there."""
    _there.add(item)


def in_child(action: Callable[[], None]) -> Callable[[], None]:
    """Does it in the child of each fork: a decorator of functions."""
    if hasattr(os, "register_at_fork"):  # elsewhere nothing forks
        os.register_at_fork(after_in_child=action)
    return action


@in_child
def _tell_all() -> None:
    for item in list(_there):
        item.forked()


class Lock:
    """A reentrant lock that is free in the child, whichever thread of the parent's had it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        tell(self)

    def forked(self) -> None:
        self._lock = threading.RLock()

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._lock:
            yield
