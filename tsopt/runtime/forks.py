"""What the child of a fork must not share with its parent: engines with threads that it has not, open files."""

from __future__ import annotations

import atexit
import ctypes
import functools

from tsopt.compiler.forks import tell as tell


def never_free(*items: object) -> None:
    """Keeps what has threads of the parent's: to free it would be to wait for them, at the end of the process too."""
    for item in items:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))


@functools.cache
def end_at_once() -> None:
    """Once Python has ended, so does the process, with the same status.

    ONNX Runtime and OpenVINO would clean up first, and wait for threads of the parent's (1.31, 2026.4). Only the C
    library of GNU can be told not to, and only by ending before them: what C code has registered with `atexit` before
    the fork is not called in the child, for HDF5 or a profiler. What it registers afterwards is.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "on_exit"):
        atexit.register(library.fflush, None)  # what C has printed
        library.on_exit(library._exit, None)  # called first, as the last one to be registered
