"""How many threads may be asked for. Needs no torch."""

from __future__ import annotations

from typing import Any

from tsopt.errors import UsageError

MOST = 1024  # a process that starts very many is killed


def is_thread_count(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MOST


def check_threads(value: Any) -> None:
    """Raises UsageError for anything but None, which is torch's own setting, and a number of threads."""
    if value is not None and not is_thread_count(value):
        raise UsageError(
            f"threads must be an integer from 1 to {MOST}, got {value!r}",
            fix="pass threads=1, or None for the setting of torch",
        )
