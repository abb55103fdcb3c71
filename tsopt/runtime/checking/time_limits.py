"""A time limit for calls of the user's model on generated inputs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

AGAIN = 0.1  # seconds


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in a block that takes longer, between two steps of Python; again if the block goes on.

    Python drops an exception in a destructor or in the callback of a weak reference, and a model may catch it.

    Without effect outside the main thread, where the system has no such timer, and where the user's own is running.
    """
    can = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if not can or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return

    is_on = True

    def ring(*_: object) -> None:
        if is_on:
            raise TimeoutError(f"not finished after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        yield
    finally:
        try:
            is_on = False
        finally:  # it may have rung just before that
            is_on = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)
