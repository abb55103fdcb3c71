"""Temporary directories that are locked by their owner, so that those of a killed process can be found and removed.

A lock that the system releases when a process ends tells whether the owner of a directory is alive. Imports nothing
heavy.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: nobody knows which owners are alive, so nothing is swept
    fcntl = None  # type: ignore[assignment]


# Begin and end the names of directories of tsopt's own processes: those of a race, and of a job in the background.
OURS, RACE, JOB = "tsopt-", ".race", ".job"


def create(parent: Path, prefix: str, suffix: str) -> tuple[Path, int]:
    """Creates a directory. Returns it with the file descriptor that holds its lock until it is closed.

    Raises:
        OSError: it cannot be created there.
    """
    while True:
        made = Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=parent))
        # `sweep` of another process may come before the lock.
        try:
            handle = os.open(made, os.O_RDONLY)
        except FileNotFoundError:
            continue
        if _lock(handle) is not False and made.exists():
            return made, handle
        os.close(handle)


def find(parent: Path, prefix: str, suffix: str) -> list[Path]:
    """The directories in `parent` whose names begin and end like this, without symbolic links."""
    try:
        with os.scandir(parent) as entries:
            return [
                Path(entry.path)
                for entry in entries
                if entry.name.startswith(prefix) and entry.name.endswith(suffix) and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return []


def sweep(parent: Path, prefix: str, suffix: str) -> None:
    """Removes the directories whose owners are dead."""
    for path in find(parent, prefix, suffix):
        with contextlib.suppress(OSError), owner_is_dead(path) as dead:  # another user's, or already removed
            if dead:
                shutil.rmtree(path, ignore_errors=True)


def sweep_ours(parent: Path) -> None:
    """Removes what processes of ours have left, that were killed together with those who had started them."""
    for suffix in (RACE, JOB):
        sweep(parent, OURS, suffix)


@contextmanager
def owner_is_dead(path: Path) -> Iterator[bool]:
    """Whether the owner of a directory is known to be dead. The directory stays locked inside the block.

    Raises:
        OSError: it cannot be opened, or no longer exists.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0))
    try:
        yield _lock(handle) is True
    finally:
        os.close(handle)


def _lock(handle: int) -> bool | None:
    """Takes the lock if it is free. Returns whether it was, or None where the system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a network file system
        return None
    return True
