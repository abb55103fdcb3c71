"""Locks under which models are called: a thread that has one never waits for that of another model.

One model may be inside another. Two threads that each have the lock of one, and wait for that of the other, never end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tsopt.compiler import forks

_here = threading.local()


class Turn:
    """The turn of a thread to do something for which a model is called."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        forks.tell(self)

    def forked(self) -> None:
        """No thread is there that may have had the turn, but this one."""
        self._lock = threading.RLock()

    @contextmanager
    def taken(self, *, waits: bool = False, at_once: bool = False) -> Iterator[bool]:
        """Whether this thread has the turn in the block. It waits for it, unless it has another one.

        Args:
            waits: in any case. Only for a turn in which nobody waits for another one.
            at_once: it does not wait.
        """
        lock = self._lock
        if waits or not (at_once or bool(getattr(_here, "held", 0))):
            with lock, _counted():
                yield True
        elif lock.acquire(blocking=False):
            try:
                with _counted():
                    yield True
            finally:
                lock.release()
        else:
            yield False


@contextmanager
def _counted() -> Iterator[None]:
    held = getattr(_here, "held", 0)
    _here.held = held + 1
    try:
        yield
    finally:
        _here.held = held
