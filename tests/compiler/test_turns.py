"""Locks under which models are called, of which a thread that has one waits for no other."""

from __future__ import annotations

import threading

import pytest

from tests.forks import FORKS, in_a_fork
from tsopt.compiler.turns import Turn


@pytest.fixture
def taken():
    """A turn that another thread has for as long as the test runs."""
    turn, held, done = Turn(), threading.Event(), threading.Event()

    def hold():
        with turn.taken():
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert held.wait(60)
    yield turn
    done.set()
    thread.join(60)


def test_a_thread_that_has_a_turn_does_not_wait_for_another_one(taken):
    with Turn().taken() as first, taken.taken() as second:
        assert (first, second) == (True, False)


def test_a_thread_that_has_a_turn_gets_another_one_that_is_free(taken):
    one, other = Turn(), Turn()
    with one.taken(), taken.taken(), other.taken() as second, one.taken() as again:
        assert (second, again) == (True, True)


def test_a_thread_that_has_none_waits():
    turn, order = Turn(), []

    def work():
        with turn.taken() as mine:
            order.append(mine)

    with turn.taken():
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        order.append("first")
    thread.join(60)
    assert order == ["first", True]


def test_what_an_error_ends_is_free_again(taken):
    turn = Turn()
    for _ in range(2):
        with pytest.raises(ValueError, match="stop"), turn.taken(), turn.taken():
            raise ValueError("stop")
    found = []

    def work():
        with Turn().taken(), turn.taken() as mine:
            found.append(mine)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert found == [True]


@FORKS
def test_what_another_thread_had_is_free_in_a_fork(taken):
    def is_free():
        with taken.taken() as mine:
            return mine

    assert in_a_fork(is_free)


@FORKS
def test_a_turn_in_which_a_thread_forks_ends_there_as_well():
    turn = Turn()

    def ends():
        entered.__exit__(None, None, None)
        with Turn().taken(), turn.taken() as again:
            return again

    entered = turn.taken()
    entered.__enter__()
    assert in_a_fork(ends)
    assert ends()
