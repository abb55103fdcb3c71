from __future__ import annotations

import threading

import pytest

from tsopt.compiler.calls.example import Example
from tsopt.runtime.racing import timing
from tsopt.runtime.racing.timing import ColdStart, first_calls, once_warm, rest, seconds_in_turns, seconds_of

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
    first_calls(clock.taking(0.4), INPUTS)
    assert clock.now == pytest.approx(0.4 * timing.MIN_COLD)
    start = clock.now
    first_calls(clock.taking(1e-6), INPUTS)
    assert clock.now - start == pytest.approx(1e-6 * timing.MAX_COLD)


@pytest.mark.parametrize(
    ("seconds", "calls"), [((10.0,), 2), ((14.0, 10.0), 3), ((12.0, 10.0), 2), ((10.0, 14.0, 10.0), 3)]
)
def test_of_calls_that_take_long_two_do_if_both_were_warm(clock, seconds, calls):
    assert len(first_calls(in_turn(clock, *seconds), INPUTS)) == calls


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
    assert seconds_of(clock.taking(0.6, log), INPUTS) == pytest.approx(0.6)
    assert len(log) == 1


def test_one_of_some_milliseconds_is_estimated_by_the_second_call_which_has_another_input(clock):
    log: list = []
    assert seconds_of(clock.taking(0.1, log), INPUTS) == pytest.approx(0.1)
    assert [args[0] for _, args, _ in log] == [0, 1]


@pytest.mark.parametrize(("first", "later", "found"), [(1e-3, 1e-4, 1e-4), (10e-3, 1e-4, 10e-3), (1e-3, 5.0, 1e-3)])
def test_only_short_calls_are_estimated_again_after_the_first_ones(clock, first, later, found):
    assert once_warm([first, first], clock.taking(later), INPUTS) == pytest.approx(found)


def test_all_is_measured_where_the_calls_are_made():
    class Elsewhere:
        def timed(self, how, inputs, **counts):
            asked.append((how, inputs, counts))
            return [2.0]

    asked: list = []
    assert first_calls(Elsewhere(), INPUTS) == [2.0]
    assert seconds_of(Elsewhere(), INPUTS) == 2.0
    assert timing.seconds_of_calls(Elsewhere(), INPUTS, 3) == [2.0]
    counts = {"times": 3, "untimed": 0, "samples": 1}
    assert asked == [("first_calls", INPUTS, {}), ("seconds_of", INPUTS, {}), ("seconds_of_calls", INPUTS, counts)]
    assert timing.seconds_between_ops(Elsewhere(), INPUTS, **counts) == [2.0]
    assert asked[-1] == ("seconds_between_ops", INPUTS, counts)
    assert set(timing.MEASUREMENTS) == {how for how, *_ in asked}


def test_it_rests_until_no_other_thread_has_been_running_for_several_looks(monkeypatch, tmp_path, clock):
    """A thread that spins runs; one that waits for a core runs as well, although it uses none."""
    other, mine, ended = tmp_path / "7", tmp_path / str(threading.get_native_id()), tmp_path / "8"
    for thread in (other, mine, ended):
        thread.mkdir()
    states = iter("RRSRSSSSSSS")

    def sleep(seconds):
        clock.now += seconds
        (other / "stat").write_text(f"7 (name) R) {next(states)} 1 2")

    (mine / "stat").write_text("1 (python) R 1 2")
    monkeypatch.setattr(clock, "sleep", sleep)
    monkeypatch.setattr(timing, "THREADS", tmp_path)
    rest()
    assert clock.now == pytest.approx(timing.LOOK * 7)


@pytest.mark.parametrize(("other", "turns"), [(2e-5, timing.FEW), (0.5e-5, timing.FEW), (1.1e-5, timing.TURNS)])
def test_turns_end_when_it_is_clear_which_is_faster(monkeypatch, clock, other, turns):
    monkeypatch.setattr(timing, "rest", lambda: None)
    found = seconds_in_turns([clock.taking(1e-5), clock.taking(other)], INPUTS[0])
    assert [len(samples) for samples in found] == [turns, turns]
    assert [min(samples) for samples in found] == pytest.approx([1e-5, other])
