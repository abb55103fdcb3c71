"""How many threads may be asked for, and torch with so many. Imports torch only to set them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Lets torch compute with so many threads, and puts its own number back; None leaves it as it is.

    NOTE: the number belongs to the process. Where two threads are in here at a time, the later one may put back the
    number of the earlier one.
    """
    import torch

    before = torch.get_num_threads()
    try:
        if count is not None and count != before:
            torch.set_num_threads(count)
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
