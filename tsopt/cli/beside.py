"""Imports of what lies beside the Python files that a command names: while they run, and in their functions later."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class State:
    """The directories that stand at the end of `sys.path` until the command ends, that of the first file first."""

    directories: tuple[str, ...] = ()


@contextmanager
def importable(path: Path) -> Iterator[None]:
    """Runs code of a file, which finds what lies beside that file before what lies beside the others.

    The directory stays behind for imports in functions that are called later: `forward`, a metric.
    NOTE: at the end: a `json.py` next to the model would shadow the standard library.
    """
    here, known = str(path.parent.resolve()), State.directories
    if here not in known and here in sys.path:  # PYTHONPATH has it: where it stands is the user's decision
        yield
        return
    _place([here, *(item for item in known if item != here)])
    try:
        yield
    finally:
        _place(known if here in known else [*known, here])


def forget() -> None:
    """Ends what `importable` has begun."""
    _place(())


def _place(directories: Iterable[str]) -> None:
    """Makes these the ones at the end. An entry that a file has made itself, further ahead, stays."""
    for item in State.directories:
        if item in sys.path:
            del sys.path[len(sys.path) - 1 - sys.path[::-1].index(item)]
    State.directories = tuple(directories)
    sys.path.extend(State.directories)
