"""What torch prints while it traces is not shown; what other threads print is."""

from __future__ import annotations

import logging
import sys
import threading

import pytest

from tsopt.compiler.quiet import quiet, silent


@pytest.mark.parametrize("stream", ["stderr", "stdout"])
def test_only_this_thread_is_hushed(stream, capsys):
    with quiet(stdout=True):
        print("mine", file=getattr(sys, stream))
        thread = threading.Thread(target=lambda: print("another's", file=getattr(sys, stream)))
        thread.start()
        thread.join()
    print("behind", file=getattr(sys, stream))
    assert getattr(capsys.readouterr(), "err" if stream == "stderr" else "out") == "another's\nbehind\n"


def test_a_process_without_stderr_is_quiet_as_well(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with quiet():
        print("mine", file=sys.stderr)
    assert sys.stderr is None


@pytest.mark.parametrize("level", [logging.NOTSET, logging.INFO])
def test_loggers_are_as_they_were_when_the_last_of_several_blocks_ends(level):
    """Those of two threads end in any order."""
    logger = logging.getLogger("silenced")
    logger.setLevel(level)
    first, second = silent("silenced"), silent("silenced", "another")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert logger.level == logging.CRITICAL
    second.__exit__(None, None, None)
    assert logger.level == level
