"""Calls that do not end are stopped, and the user's own timers are not."""

from __future__ import annotations

import contextlib
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tsopt.runtime.checking.time_limits import at_most


def test_a_timer_of_the_users_is_left_alone():
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with at_most(0.05):
            time.sleep(0.6)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert rung == [1]


def test_in_another_thread_there_is_no_limit():
    def patient():
        with at_most(0.05):
            time.sleep(0.2)
        return True

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(patient).result()


def test_a_model_that_catches_the_end_is_ended_again():
    def stubborn():
        for _ in range(2):
            with contextlib.suppress(TimeoutError):
                time.sleep(5)
        time.sleep(5)

    def limited():
        with at_most(0.01):
            stubborn()

    with pytest.raises(TimeoutError):
        limited()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_end_that_python_drops_comes_again():
    class Slow:
        def __del__(self):
            time.sleep(5)

    def limited():
        with at_most(0.01):
            Slow()
            time.sleep(5)

    with pytest.raises(TimeoutError):
        limited()
