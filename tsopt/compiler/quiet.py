"""Keeps what torch and its exporters print about themselves from the user; what fails still arrives as an exception."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

LOGGERS = ("torch", "torch.export", "torch.onnx", "onnxscript", "onnx_ir")


@contextlib.contextmanager
def quiet(*, stdout: bool = False) -> Iterator[None]:
    """Silences log lines, warnings and stderr (where torch.export prints half a graph before it raises).

    Args:
        stdout: silence stdout as well, where the code that runs is not the user's.
    """
    with silent(*LOGGERS), warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        with contextlib.redirect_stdout(io.StringIO()) if stdout else contextlib.nullcontext():
            yield


@contextlib.contextmanager
def silent(*names: str) -> Iterator[None]:
    """Silences loggers."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
