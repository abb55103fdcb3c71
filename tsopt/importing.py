"""Imports of large libraries."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 100  # modules


@contextmanager
def without_collector() -> Iterator[None]:
    """A block in which Python's garbage collector does not run: imports make few cycles, and very many objects.

    torch.export takes 0.8 instead of 1.0 s. If many modules were imported, all objects then go to the oldest generation
    at once. The collector would look at them three times before that, which takes another 0.3 s.
    """
    was_enabled, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if was_enabled and len(sys.modules) - before >= MANY and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        if was_enabled:
            gc.enable()
