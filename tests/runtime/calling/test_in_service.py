"""Rounds in which eager and a compiled form serve calls in turns, and what follows from them."""

from __future__ import annotations

import math

import pytest

from tsopt.runtime.calling import in_service, own_work
from tsopt.runtime.calling.audit import Audits
from tsopt.runtime.calling.in_service import FEWEST, LEAST, MOST, TURN, UNTIMED, InService

ROUND = 2 * TURN


@pytest.fixture(autouse=True)
def _compares(monkeypatch):
    monkeypatch.setattr(in_service, "LONG", own_work.LONG)


class Process:
    """One with a clock, and calls that take as many seconds as their inputs have elements, times a factor."""

    def __init__(self, *, share=0.01, took=1.0, served=0.0, gain=2.0):
        self.now, self.audits, self.eager_served = 0.0, Audits(share), []
        self.audits.took, self.audits.served = took, served
        self.service, self.gain = InService(self.audits, clock=lambda: self.now), gain

    def begins(self):
        return self.service.begins(lambda: self.gain)

    def call(self, seconds):
        self.now += seconds
        return seconds

    def round(self, ours, eager, sizes=(1,)):
        for number in range(ROUND):
            is_eagers, size = self.service.is_eagers_turn, sizes[number % len(sizes)]
            self.eager_served.append(is_eagers)
            seconds = (eager if is_eagers else ours) * size
            assert self.service.serve(lambda seconds=seconds: self.call(seconds), size) == seconds
            assert self.service.is_on == (number < ROUND - 1)


def after(ours, eager, **options):
    process = Process(**options)
    for pair in zip(ours, eager, strict=True):
        process.round(*pair)
    return process.service


@pytest.mark.parametrize(
    ("ours", "eager", "is_slower"),
    [
        ([1.2] * FEWEST, [1.0] * FEWEST, True),
        ([1.2] * (FEWEST - 1), [1.0] * (FEWEST - 1), False),
        ([1.02] * FEWEST, [1.0] * FEWEST, False),  # next to nothing
        ([0.8] * FEWEST, [1.0] * FEWEST, False),
        ([1.0] * (FEWEST - 1) + [9.0], [1.0] * FEWEST, False),  # one that had to wait for a core
        ([1.2, 0.9] * FEWEST, [1.0] * 2 * FEWEST, False),  # not certain
        ([1.2, 1.3] * FEWEST, [1.0] * 2 * FEWEST, True),
        ([9.0] * MOST + [0.9] * FEWEST, [1.0] * (MOST + FEWEST), False),  # long ago
    ],
)
def test_eager_is_the_faster_one_only_where_that_is_certain(ours, eager, is_slower):
    assert bool(after(ours, eager).loss) == is_slower


def test_the_reason_says_by_how_much():
    said = after([1.2] * FEWEST, [1.0] * FEWEST).loss
    assert said == "in service, calls take 1.20 times as long compiled as in eager mode (6 comparisons)"


@pytest.mark.parametrize("factor", [1.0, 1.2])
def test_what_counts_is_the_time_for_each_element(factor):
    process = Process()
    for _ in range(FEWEST):
        process.round(factor, 1.0, sizes=(*range(1, TURN + 1), *range(TURN, 10 * TURN + 1)))  # one turn has larger ones
    assert process.service._ratios == pytest.approx([factor] * FEWEST)
    assert bool(process.service.loss) == (factor > 1)
    assert process.service.largest == 2 * TURN - 1


def test_turns_are_as_long_and_begin_with_the_other_form_in_the_next_round():
    process = Process()
    for _ in range(2):
        process.round(1.0, 1.0)
    assert process.eager_served == [False] * TURN + [True] * 2 * TURN + [False] * TURN


def test_the_first_calls_of_a_turn_do_not_count():
    process = Process()
    for _ in range(FEWEST):
        for number in range(ROUND):
            slow = 5.0 if number % TURN < UNTIMED and not process.service.is_eagers_turn else 1.0
            process.service.serve(lambda slow=slow: process.call(slow), 1)
    assert not process.service.loss


def test_a_call_that_raises_ends_the_round_without_a_result():
    process = Process(served=1e9)
    process.service.serve(lambda: process.call(1.0), 1)
    with pytest.raises(ZeroDivisionError):
        process.service.serve(lambda: 1 / 0, 1)
    assert not process.service.is_on
    process.round(1.0, 1.0)
    assert process.eager_served == [True] * TURN + [False] * TURN, "the other one begins"
    assert process.service._ratios == [1.0]


def test_a_round_that_is_broken_off_is_paid_for():
    process = Process(served=1e9)
    for _ in range(TURN + 10):
        process.service.serve(lambda: process.call(1.0), 1)
    process.service.stop()
    assert not process.service.is_on
    process.audits.served += 0.49 * (10 - UNTIMED) / 0.01
    assert not process.begins()
    process.audits.served += 0.02 * (10 - UNTIMED) / 0.01
    assert process.begins()
    process.service.stop()
    assert process.begins(), "there was none"


@pytest.mark.parametrize("took", [0.0, 0.9e-3])
def test_short_calls_are_not_compared(took):
    assert Process(served=1e9).begins()
    assert not Process(served=1e9, took=took).begins()


def test_there_are_none_without_audits_or_before_anything_is_compiled():
    assert not Process(served=1e9, share=0.0).begins()
    assert not Process(served=1e9, gain=math.inf).begins()


@pytest.mark.parametrize("gain", [1.25, 3.0])
def test_rounds_cost_no_larger_share_of_the_time_than_audits(gain):
    process, lost = Process(gain=gain), 0.0
    for _ in range(200_000):
        process.audits.served += 1.0
        if process.begins():
            process.round(1.0, gain)
            lost += TURN * (gain - 1)
            assert lost <= 0.0101 * process.audits.served
    assert lost > 0.009 * process.audits.served


def test_where_eager_costs_nothing_there_is_time_between_rounds_all_the_same():
    process, rounds, calls = Process(gain=1.0), 0, 10_000
    process.audits.served = 1e6  # nothing is saved up
    for _ in range(calls):
        process.audits.served += 1.0
        if process.begins():
            process.round(1.0, 0.9)
            rounds += 1
    assert rounds == pytest.approx(calls / (LEAST * (TURN - UNTIMED) * 1.9 / 0.01), abs=1)
