"""Keeps engines from reporting on their users. Imports no engine and no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from tsopt.compiler import forks

# ONNX Runtime 1.29 and later send telemetry by default, as they are imported. A value that the user has set is kept.
NO_TELEMETRY = {"ORT_DISABLE_TELEMETRY": "1"}
# OpenVINO reports that it was imported: it forks the process that imports it, and writes to the home directory. It asks
# this package to do so, and reports nothing where that cannot be imported.
SENDER = "openvino_telemetry"
_IMPORTING = forks.Lock()


@contextmanager
def without_telemetry() -> Iterator[None]:
    """A block that imports engines. Nothing of it stays set; those that have been imported before are as they are."""
    with _IMPORTING.held():
        unset = {name: value for name, value in NO_TELEMETRY.items() if name not in os.environ}
        modules: dict[str, ModuleType | None] = sys.modules  # type: ignore[assignment]  # None: not to be imported
        sender = modules.get(SENDER)
        os.environ.update(unset)
        modules[SENDER] = None
        try:
            yield
        finally:
            for name in unset:
                os.environ.pop(name, None)
            del modules[SENDER]
            if sender is not None:
                modules[SENDER] = sender
