"""How candidates end: the status in the table, and whether the model or this machine is the cause. Imports no torch."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from tsopt.runtime.checking.verdict import INACCURATE

MISSING = "missing"
OUT_OF_MEMORY, SYSTEM_ERROR = "out of memory", "system error"
LOST = ("crashed", "exited", "timed out", OUT_OF_MEMORY, SYSTEM_ERROR)  # none of them for what the model computes
REFUSED = ("unsupported", "no gain")  # for what the model computes, before anything ran
NOT_CHECKED = "not checked"  # too far behind the best to be of interest
NOT_TIMED = "not timed"  # behind the best, and its memory was wanted
SLOWER = "slower"  # than eager, in measurements after the race
NOT_BIT_EQUAL = "not bit-equal to eager, which uses different kernels for this model"
STATUSES = ("ok", "wrong", INACCURATE, "failed", SLOWER, NOT_CHECKED, NOT_TIMED, MISSING, *REFUSED, *LOST)

# protobuf raises the last one when it has no room for a message; models of more than 2 GB are written otherwise.
_NO_ROOM = ("MemoryError", "OutOfMemoryError", "EncodeError")
# NOTE: engines and torch's allocator on the CPU raise one of few general classes with these words.
_NO_MEMORY = re.compile(
    r"bad.?alloc|out of memory|not enough memory|tried to allocate|(can.?t|could not|failed to|unable to) allocate",
    re.IGNORECASE,
)
_NO_THREAD = re.compile(r"can't start new thread|resource temporarily unavailable", re.IGNORECASE)
_PACKAGE = str(Path(__file__).parents[2])


class NoCandidate(UserWarning):
    """Eager runs because no candidate could be tried on this machine, not because eager is the fastest."""


class Ended(Protocol):
    """A row of a race."""

    @property
    def name(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def reason(self) -> str: ...


def ending_of(error: BaseException) -> str:
    """The status of a candidate that raised: how its process ended, for want of memory, by the system, or `failed`."""
    kind = getattr(error, "kind", None)
    if kind in LOST:
        return str(kind)
    for item in _chain(error):
        if type(item).__name__ in _NO_ROOM:
            return OUT_OF_MEMORY
        if isinstance(item, OSError):
            return SYSTEM_ERROR
        is_general = isinstance(item, RuntimeError) or type(item).__module__.startswith("onnxruntime.")
        if is_general and _NO_MEMORY.search(str(item)):
            return OUT_OF_MEMORY
        if is_general and _NO_THREAD.search(str(item)):
            return SYSTEM_ERROR
    return "failed"


def said_by(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def stopped(rows: tuple[Ended, ...]) -> str:
    """Why no candidate could be tried, where that is not the model's doing; empty when one could be, or refused it.

    Args:
        rows: of a race, the baseline first.
    """
    asked = rows[1:]
    left = [row for row in asked if row.status not in REFUSED]
    if not left or any(row.status not in (MISSING, *LOST) for row in left):
        return ""
    if len(left) < len(asked) and all(row.status == MISSING for row in left):
        return ""  # those that are installed have refused the model
    return "; ".join(f"{row.name} {row.status}{f' ({row.reason})' if row.reason else ''}" for row in left)


def warn(text: str, category: type[Warning]) -> None:
    """A warning at the line of the caller's that led here."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
