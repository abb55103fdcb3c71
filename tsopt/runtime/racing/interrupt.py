"""Ctrl-C that ends the rounds of a race, for callers who want the best candidate so far."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def first_interrupt_noted(wanted: bool) -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether Ctrl-C has been pressed. A second one raises KeyboardInterrupt as usual.

    It is recorded instead of raised, so that no call is interrupted and all samples are complete. Only the main
    thread gets signals; in another one, and where the process ignores or handles SIGINT itself, nothing is recorded.

    Args:
        wanted: False: Ctrl-C does what it always does.
    """
    noted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal noted
        noted = True
        signal.signal(signal.SIGINT, before)

    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not wanted or not is_main or before is not signal.default_int_handler:
        yield lambda: False
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: noted
    finally:
        signal.signal(signal.SIGINT, before)
