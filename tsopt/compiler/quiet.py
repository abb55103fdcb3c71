"""Silences the output of torch and its exporters; failures still surface as exceptions."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO, cast

from tsopt.compiler import forks

LOGGERS = ("torch", "torch.export", "torch.onnx", "onnxscript", "onnx_ir")

_CHANGING = forks.Lock()
# By logger: the threads of the blocks that silence it, and its level before the first of them.
_SILENCED: dict[str, tuple[list[int], int]] = {}
_UNWARNED: list[_Unwarned] = []


@dataclass(frozen=True, eq=False)
class _Unwarned:
    """A block that ignores warnings: the thread, the filters in it, and those before."""

    owner: int
    filters: Any
    before: Any


@contextlib.contextmanager
def quiet(*, stdout: bool = False) -> Iterator[None]:
    """Silences log lines, warnings and stderr (where torch.export prints half a graph before it raises).

    Of stderr and stdout that is what this thread writes; log lines and warnings are those of all threads.

    Args:
        stdout: silence stdout as well, where the code that runs is not the user's.
    """
    out = contextlib.redirect_stdout(_hushed(sys.stdout)) if stdout else contextlib.nullcontext()
    with silent(*LOGGERS), unwarned(), contextlib.redirect_stderr(_hushed(sys.stderr)), out:
        yield


class _Hushed:
    """A stream to which one thread writes in vain; for the others it is what it was."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._owner, self._nothing = stream, threading.get_ident(), io.StringIO()
        forks.tell(self)

    def forked(self) -> None:
        """A thread of the child may get the number of one that is not there."""
        if self._owner != threading.get_ident():
            self._owner = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nothing if threading.get_ident() == self._owner else self._stream, name)


def _hushed(stream: TextIO | None) -> TextIO:
    return io.StringIO() if stream is None else cast(TextIO, _Hushed(stream))


@contextlib.contextmanager
def unwarned() -> Iterator[None]:
    """Ignores warnings, those of all threads."""
    before: Any = warnings.filters
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        block = _Unwarned(threading.get_ident(), warnings.filters, before)
        _UNWARNED.append(block)
        try:
            yield
        finally:
            _UNWARNED.remove(block)


@contextlib.contextmanager
def silent(*names: str) -> Iterator[None]:
    """Silences loggers, until the last block that does so ends: blocks of several threads end in any order."""
    here = threading.get_ident()
    with _CHANGING.held():
        for name in names:
            logger = logging.getLogger(name)
            blocks, _ = _SILENCED.setdefault(name, ([], logger.level))
            blocks.append(here)
            logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        with _CHANGING.held():
            for name in names:
                _SILENCED[name][0].remove(here)
                _heard_again(name)


def _heard_again(name: str) -> None:
    """Gives a logger its level back if no block silences it any more."""
    blocks, level = _SILENCED[name]
    if not blocks:
        del _SILENCED[name]
        logging.getLogger(name).setLevel(level)


@forks.in_child
def _alone() -> None:
    """The blocks of other threads have ended."""
    here = threading.get_ident()
    for name, (blocks, _) in list(_SILENCED.items()):
        blocks[:] = [owner for owner in blocks if owner == here]
        _heard_again(name)
    for block in _UNWARNED:
        if block.owner != here:
            block.filters[:] = block.before  # in the list itself: a block that has begun since puts that one back
    _UNWARNED[:] = [block for block in _UNWARNED if block.owner == here]
