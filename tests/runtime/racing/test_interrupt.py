"""Ctrl-C while candidates are timed, for callers who want the best one so far."""

from __future__ import annotations

import signal
import threading

import pytest

from tests.runtime.racing.helpers import Behaviour, row
from tsopt.runtime.racing import cached_race, tournament
from tsopt.runtime.racing.interrupt import first_interrupt_noted
from tsopt.runtime.racing.row import MODEL


def press():
    """Ctrl-C, as far as Python is concerned; a real signal could reach the process of all tests a moment later."""
    signal.getsignal(signal.SIGINT)(signal.SIGINT, None)


@pytest.fixture(autouse=True)
def _as_in_a_terminal():
    """What a shell starts in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def presses(monkeypatch):
    """Presses Ctrl-C in these samples of the rounds, counted over all candidates."""

    def at(*numbers):
        sample, seen = tournament._sample, []

        def counted(*args):
            sample(*args)
            seen.append(1)
            if len(seen) in numbers:
                press()

        monkeypatch.setattr(tournament, "_sample", counted)
        return seen

    return at


def test_the_best_candidate_so_far_is_returned(run_race, presses):
    seen = presses(18)
    found = run_race(time_all=True, best_so_far=True, backends=("faulty", "eager"))
    assert found.interrupted
    assert found.why.startswith("interrupted, best so far: ")
    assert len(seen) == 18
    assert {len(item.timing.samples) for item in found.rows} == {6}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_after_a_few_rounds_nothing_is_known_and_eager_is_kept(run_race, presses):
    presses(1)
    found = run_race(best_so_far=True)
    assert (found.winner, found.executable) == (MODEL, None)
    assert found.why.startswith("interrupted, best so far: no candidate is significantly faster; undecided: ")
    assert row(found).reason == "1 valid rounds are too few for a confidence interval"


def test_it_is_not_cached(run_race, presses):
    presses(18)
    assert not cached_race._is_repeatable(run_race(time_all=True, best_so_far=True))


def test_the_second_one_ends_it(run_race, presses):
    presses(1, 2)
    with pytest.raises(KeyboardInterrupt):
        run_race(best_so_far=True)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_the_wish_the_first_one_ends_it(run_race, presses):
    presses(1)
    with pytest.raises(KeyboardInterrupt):
        run_race()


def test_before_anything_is_timed_it_ends_the_race(run_race, monkeypatch):
    monkeypatch.setattr(Behaviour, "compile", press)
    with pytest.raises(KeyboardInterrupt):
        run_race(best_so_far=True)


def test_a_handler_of_the_process_stays():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        with first_interrupt_noted(True) as noted:
            press()
            assert not noted()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [1]


def test_another_thread_than_the_main_one_has_no_signals():
    found = []

    def run():
        with first_interrupt_noted(True) as noted:
            found.append(noted())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [False]
