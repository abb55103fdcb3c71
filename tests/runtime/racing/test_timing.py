from __future__ import annotations

import pytest

from tsopt.compiler.calls.example import Example
from tsopt.runtime.racing import timing
from tsopt.runtime.racing.timing import ColdStart, first_calls, seconds_of

INPUTS = [Example((n,), {"k": n}) for n in range(3)]


def in_turn(clock, *seconds):
    """A callable that takes these times, and the last of them from then on."""
    left = list(seconds)

    def call(*args, **kwargs):
        clock.now += left.pop(0) if len(left) > 1 else left[0]

    return call


@pytest.mark.parametrize(
    ("seconds", "first", "slow"),
    [((0.2, 0.01), 200.0, 1), ((0.01,), 10.0, 0), ((0.3, 0.2, 0.1, 0.01), 300.0, 3), ((0.012, 0.01), 12.0, 0)],
)
def test_first_calls_are_slow_until_they_are_as_all_others(clock, seconds, first, slow):
    found = ColdStart.of(first_calls(in_turn(clock, *seconds), INPUTS))
    assert found.first == pytest.approx(first)
    assert found.slow_calls == slow


def test_first_calls_are_not_watched_for_long(clock):
    first_calls(clock.taking(10.0), INPUTS)
    assert clock.now == pytest.approx(10.0 * timing.MIN_COLD)
    start = clock.now
    first_calls(clock.taking(1e-6), INPUTS)
    assert clock.now - start == pytest.approx(1e-6 * timing.MAX_COLD)


def test_first_calls_rotate_the_inputs(clock):
    log: list = []
    first_calls(clock.taking(1e-3, log, "a"), INPUTS)
    assert [args[0] for _, args, _ in log[:4]] == [0, 1, 2, 0]


def test_a_short_call_is_estimated_in_a_row_of_calls(clock):
    """By itself the first one would seem ten times as slow as the ones after it."""
    log: list = []
    call = in_turn(clock, *[1e-3] * 4, *[1e-4] * 20, 5e-5)
    assert seconds_of(lambda *a, **k: (log.append(1), call(*a, **k)), INPUTS) == pytest.approx(5e-5, rel=0.1)
    assert len(log) > 20


def test_a_long_call_is_estimated_by_one(clock):
    log: list = []
    assert seconds_of(clock.taking(0.5, log), INPUTS) == pytest.approx(0.5)
    assert len(log) == 2
