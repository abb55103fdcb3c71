"""What torch prints while it traces is not shown; what other threads print is."""

from __future__ import annotations

import logging
import sys
import threading
import warnings

import pytest

from tests.forks import FORKS, in_a_fork
from tsopt.compiler.quiet import LOGGERS, quiet, silent, unwarned


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


def is_heard():
    return (
        logging.getLogger(LOGGERS[0]).level != logging.CRITICAL and ("ignore", None, Warning, None, 0) not in filters()
    )


def filters():
    return list(warnings.filters)


@FORKS
def test_what_another_thread_silences_is_heard_in_a_fork(meanwhile):
    meanwhile(quiet())
    assert not is_heard()

    def is_silenced_again():
        assert is_heard()
        with quiet():
            assert not is_heard()
        return is_heard()

    assert in_a_fork(is_silenced_again)


@FORKS
def test_what_the_thread_that_forks_silences_stays_until_its_block_ends(meanwhile):
    meanwhile(quiet())
    mine = quiet()
    mine.__enter__()
    assert in_a_fork(lambda: not is_heard())

    def ends():
        mine.__exit__(None, None, None)
        return logging.getLogger(LOGGERS[0]).level != logging.CRITICAL

    assert in_a_fork(ends)
    mine.__exit__(None, None, None)


def test_warnings_are_shown_behind_a_block_that_ignores_them():
    before = filters()
    with unwarned():
        warnings.warn("nobody sees it", stacklevel=1)
    assert filters() == before
