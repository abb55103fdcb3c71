"""What a process has left behind: files and children."""

from __future__ import annotations

import glob
import tempfile
from pathlib import Path

FAULTY = "tests.runtime.faulty:"
ROOT = Path(__file__).parents[3]


def leftovers(pid: int) -> list[str]:
    """Files that a process has left behind."""
    places = {tempfile.gettempdir(), "/dev/shm"}
    return [path for place in places for path in glob.glob(f"{place}/tsopt-{pid}-*")]


def running(pids: list[int]) -> list[int]:
    """Those that have not ended; a zombie has, and waits for somebody to ask how."""
    found = []
    for pid in pids:
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
            found.append(pid)
    return found
