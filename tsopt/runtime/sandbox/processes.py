"""Child processes: finding, limiting and ending them. Needs no torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tsopt.runtime.telemetry import NO_TELEMETRY

# torch initializes CUDA as soon as it looks for a GPU, which takes seconds, takes memory of the GPU, and cannot be done
# in a fork of a process that has looked.
NO_GPU = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}  # an empty text hides none from HIP
OWN = str(Path(__file__).parents[3])  # where this package is, however it was found
SET_DEATH_SIGNAL, SET_SUBREAPER = 1, 36  # prctl(2)


def why_none() -> str:
    """Why no process of tsopt's own can be started; empty if one can."""
    if getattr(sys, "frozen", False):
        return "this is a frozen application: sys.executable would start it again, not Python"
    return "" if sys.executable else "sys.executable does not say where Python is"


def python(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of tsopt.

    NOTE: -P, or a file of the working directory could stand in for a module.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def import_path(path: Iterable[object]) -> list[str]:
    """An import path as another process of ours can be given it: without what imports skip, and without `""`.

    NOTE: a file that lies where we are, such as `queue.py`, would stand in for a module of the library. This package
    is found all the same.
    """
    found = [entry for entry in path if isinstance(entry, str) and not _is_here(entry)]
    return found if OWN in found else [OWN, *found]


def working_directory(path: Iterable[object]) -> list[str]:
    """The working directory if it is on an import path as such: in a console, with `python -c`, in a notebook.

    Code of the user's may be there. A process that is to import it looks there after all else.
    """
    return [""] if any(map(_is_here, path)) else []


def _is_here(entry: object) -> bool:
    return isinstance(entry, str) and os.path.normpath(entry) == os.curdir


def environment_of_child(*first: str, sees_gpus: bool = True) -> dict[str, str]:
    """Environment variables for a process that tsopt starts: those of this one, its import path, no telemetry.

    Args:
        first: directories to put before the import path.
        sees_gpus: whether the process may use the GPUs.
    """
    path = os.pathsep.join([*first, *import_path(sys.path)])
    return {**NO_TELEMETRY, **os.environ, "PYTHONPATH": path, **({} if sees_gpus else NO_GPU)}


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


def kill_group(pid: int) -> None:
    """Ends a process group at once, if it has any members."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def limit_memory(size: int | None) -> None:
    """Allocations beyond `size` bytes more than there are now fail, instead of taking the machine down."""
    if not size or not sys.platform.startswith("linux"):
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    wanted = pages * os.sysconf("SC_PAGESIZE") + size
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard < 0 else min(wanted, hard), hard))


def give_back_memory() -> None:
    """Returns to the system what has been freed: engines free copies of all weights when they have compiled."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None  # glibc's
    if trim is not None:
        trim(0)


def die_first(score: int) -> None:
    """Where memory runs out, the kernel ends this process before others.

    Args:
        score: 0 to 1000, in thousandths of the memory that there is, on top of what the process takes.
    """
    with contextlib.suppress(OSError):  # not Linux
        Path("/proc/self/oom_score_adj").write_text(str(score))


def available_memory() -> int | None:
    """Bytes of memory that can be had without swapping, on the machine and in its control group; None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min([*found, *_left_in_control_groups()], default=None)


def _left_in_control_groups(root: Path = Path("/sys/fs/cgroup"), own: str | None = None) -> Iterator[int]:
    """What each control group of this process still allows, in version 1 and 2; pages of files count as free.

    Args:
        own: what /proc/self/cgroup says.
    """
    try:
        own = Path("/proc/self/cgroup").read_text() if own is None else own
    except OSError:
        return
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _left_in(root, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            yield from _left_in(root / "memory", path, *names)


def _left_in(root: Path, path: str, limit: str, used: str, files: str) -> Iterator[int]:
    """What a group and those above it allow."""
    own = root / path.strip().lstrip("/")
    for group in (own, *own.parents):
        if not group.is_relative_to(root):
            break
        with contextlib.suppress(OSError, ValueError, IndexError):  # no such file, or "max": unlimited
            lines = (group / "memory.stat").read_text().splitlines()
            free = sum(int(line.split()[1]) for line in lines if line.startswith(f"{files} "))
            yield max(0, int((group / limit).read_text()) - int((group / used).read_text()) + free)


def prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
