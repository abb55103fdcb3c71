"""The processes below a process, and their end."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """All processes below one, also those that have left its group or session; where there is no /proc, none."""
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):  # it may have ended meanwhile
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            below.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    todo = [pid]
    while todo:
        children = below.get(todo.pop(), [])
        found += children
        todo += children
    return found


def kill(pid: int) -> None:
    """Ends a process at once; one that has ended already is no matter."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
