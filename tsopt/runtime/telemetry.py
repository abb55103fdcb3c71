"""Keeps engines from reporting on their users. Imports no engine and no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

from tsopt.compiler import forks

# ONNX Runtime 1.29 and later send telemetry by default, as they are imported. A value that the user has set is kept.
NO_TELEMETRY = {"ORT_DISABLE_TELEMETRY": "1"}
# OpenVINO reports that it was imported: it forks the process that imports it, and writes to the home directory. It asks
# this package to do so, and reports nothing where that cannot be imported.
SENDER = "openvino_telemetry"
_IMPORTING = forks.Lock()
_UNDO: list[Callable[[], None]] = []  # of blocks that have begun, also in the child of a fork


@contextmanager
def without_telemetry() -> Iterator[None]:
    """A block that imports engines. Nothing of it stays set; those that have been imported before are as they are."""
    with _IMPORTING.held():
        modules: dict[str, ModuleType | None] = sys.modules  # type: ignore[assignment]  # None: not to be imported
        unset = [name for name in NO_TELEMETRY if name not in os.environ]
        blocked, sender = SENDER in modules and modules[SENDER] is None, modules.get(SENDER)

        def undo() -> None:
            for name in unset:
                os.environ.pop(name, None)
            if not blocked:
                modules.pop(SENDER, None)
                modules.update({} if sender is None else {SENDER: sender})

        _UNDO.append(undo)
        try:
            os.environ.update({name: NO_TELEMETRY[name] for name in unset})
            modules[SENDER] = None
            yield
        finally:
            _UNDO.remove(undo)
            undo()


@forks.in_child
def _undo_all() -> None:
    """The thread that has begun a block is not there to end it."""
    while _UNDO:
        _UNDO.pop()()
