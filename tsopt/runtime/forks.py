"""What the child of a fork must not share with its parent: locks and engines of threads that it has not, open files."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
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


def never_free(*items: object) -> None:
    """Keeps what has threads of the parent's: to free it would be to wait for them, at the end of the process too."""
    for item in items:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))


@functools.cache
def end_at_once() -> None:
    """Once Python has ended, so does the process, with the same status.

    ONNX Runtime and OpenVINO would clean up first, and wait for threads of the parent's (1.31, 2026.4). Only the C
    library of GNU can be told not to.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "on_exit"):
        atexit.register(library.fflush, None)  # what C has printed
        library.on_exit(library._exit, None)  # called first, as the last one to be registered


def _tell_all() -> None:
    for item in list(_there):
        item.forked()


if hasattr(os, "register_at_fork"):  # elsewhere nothing forks
    os.register_at_fork(after_in_child=_tell_all)
