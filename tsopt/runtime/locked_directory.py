"""Temporary directories that a killed process leaves behind, and the next one finds and removes.

A lock that the system releases when a process ends tells whether the owner of a directory is alive. Imports nothing
heavy.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: nobody knows which owners are alive, so nothing is swept
    fcntl = None  # type: ignore[assignment]


def create(parent: Path, prefix: str, suffix: str) -> tuple[Path, int]:
    """A new directory, and the open file that says that its owner is alive, for as long as it is open.

    Raises:
        OSError: it cannot be made there.
    """
    while True:
        made = Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=parent))
        handle = os.open(made, os.O_RDONLY)
        if (
            _lock(handle) is not False and made.exists()
        ):  # between the two, a sweeper may have taken it for a dead one's
            return made, handle
        os.close(handle)


def find(parent: Path, prefix: str, suffix: str) -> list[Path]:
    """The directories in another that carry these marks; none of anything else, and nothing through a link."""
    try:
        with os.scandir(parent) as entries:
            return [
                Path(entry.path)
                for entry in entries
                if entry.name.startswith(prefix) and entry.name.endswith(suffix) and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return []


@contextmanager
def unless_alive(path: Path) -> Iterator[bool]:
    """Whether the owner of a directory is known to be dead. No other process can find that out meanwhile.

    Raises:
        OSError: it cannot be opened; it may be gone.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0))
    try:
        yield _lock(handle) is True
    finally:
        os.close(handle)


def _lock(handle: int) -> bool | None:
    """Whether the lock was free, and is ours now. None where there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a network file system
        return None
    return True
