"""Silences the output of torch and its exporters; failures still surface as exceptions."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any, TextIO, cast

LOGGERS = ("torch", "torch.export", "torch.onnx", "onnxscript", "onnx_ir")

_CHANGING = threading.Lock()
_SILENCED: dict[str, tuple[int, int]] = {}  # by logger: how many blocks silence it, and its level before the first


@contextlib.contextmanager
def quiet(*, stdout: bool = False) -> Iterator[None]:
    """Silences log lines, warnings and stderr (where torch.export prints half a graph before it raises).

    Of stderr and stdout that is what this thread writes; log lines and warnings are those of all threads.

    Args:
        stdout: silence stdout as well, where the code that runs is not the user's.
    """
    with silent(*LOGGERS), warnings.catch_warnings(), contextlib.redirect_stderr(_hushed(sys.stderr)):
        warnings.simplefilter("ignore")
        with contextlib.redirect_stdout(_hushed(sys.stdout)) if stdout else contextlib.nullcontext():
            yield


class _Hushed:
    """A stream to which one thread writes in vain; for the others it is what it was."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._owner, self._nothing = stream, threading.get_ident(), io.StringIO()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nothing if threading.get_ident() == self._owner else self._stream, name)


def _hushed(stream: TextIO | None) -> TextIO:
    return io.StringIO() if stream is None else cast(TextIO, _Hushed(stream))


@contextlib.contextmanager
def silent(*names: str) -> Iterator[None]:
    """Silences loggers, until the last block that does so ends: blocks of several threads end in any order."""
    with _CHANGING:
        for name in names:
            logger = logging.getLogger(name)
            blocks, level = _SILENCED.get(name, (0, logger.level))
            _SILENCED[name] = blocks + 1, level
            logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        with _CHANGING:
            for name in names:
                blocks, level = _SILENCED.pop(name)
                if blocks > 1:
                    _SILENCED[name] = blocks - 1, level
                else:
                    logging.getLogger(name).setLevel(level)
