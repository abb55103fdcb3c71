"""What is done in the child of a fork."""

from __future__ import annotations

import os

import pytest

from tests.forks import FORKS, in_a_fork
from tsopt.compiler import forks
from tsopt.compiler.forks import Lock
from tsopt.runtime.calling import unseen_writes

pytestmark = FORKS


class Told:
    def __init__(self):
        self.of = []

    def forked(self):
        self.of.append(os.getpid())


def test_what_is_there_is_told_in_the_child_alone():
    told = Told()
    forks.tell(told)
    assert in_a_fork(lambda: told.of == [os.getpid()])
    assert told.of == []


def test_a_lock_that_another_thread_has_is_free_in_the_child(meanwhile):
    lock = Lock()
    meanwhile(lock.held())

    def is_free():
        with lock.held(), lock.held():
            return True

    assert in_a_fork(is_free)


def test_a_lock_that_the_thread_has_which_forks_is_released_there_as_well():
    lock = Lock()
    held = lock.held()
    held.__enter__()
    try:
        assert in_a_fork(lambda: not held.__exit__(None, None, None))
    finally:
        held.__exit__(None, None, None)


@pytest.mark.parametrize("action", [lambda: unseen_writes.written([]), lambda: unseen_writes.tell(Told())])
def test_writes_are_told_in_a_fork_while_another_thread_is_at_it(meanwhile, action):
    meanwhile(unseen_writes._lock.held())
    assert in_a_fork(lambda: action() is None)
