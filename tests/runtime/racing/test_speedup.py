from __future__ import annotations

import math

import pytest

from tsopt.runtime.racing.speedup import Speedup, Timing, fastest_first, speedup


def _timing(*samples: float) -> Timing:
    return Timing(samples)


BASE = [10.0, 10.2, 9.9, 10.1, 10.0, 9.8, 10.3, 10.1, 9.9]


@pytest.mark.parametrize(("factor", "verdict"), [(0.5, "faster"), (2.0, "slower")])
def test_a_clear_difference_is_a_verdict(factor, verdict):
    found = speedup(_timing(*[factor * value for value in BASE]), _timing(*BASE))
    assert found.verdict == verdict
    assert found.ratio == pytest.approx(1 / factor)
    assert found.low <= found.ratio <= found.high


def test_noise_is_the_same():
    found = speedup(_timing(*reversed(BASE)), _timing(*BASE))
    assert found.verdict == "same"
    assert found.low < 1 < found.high


def test_equal_samples_are_the_same():
    assert speedup(_timing(*BASE), _timing(*BASE)).verdict == "same"


@pytest.mark.parametrize(
    ("ratio", "low", "high", "verdict"),
    [
        (40.0, 2.51, 1171.0, "undecided"),
        (1.5, 1.1, 3.4, "undecided"),
        (1.5, 1.1, 3.2, "faster"),
        (1.0, 0.2, 5.0, "undecided"),  # `same` would be as bold as `faster`
        (0.3, 0.001, 0.9, "undecided"),
        (0.02, 0.01, 0.05, "slower"),
        (50.0, 20.0, 110.0, "faster"),  # wide, but at least 20 times
        (1.0, 0.9, 1.1, "same"),
        (1.3, 1.1, 1.2, "undecided"),  # outside its own interval
        (1.0, 1.1, 1.2, "undecided"),
        (1.2, 1.3, 1.1, "undecided"),
        (math.nan, math.nan, math.nan, "undecided"),
        (2.0, 1.5, math.inf, "undecided"),
        (2.0, 0.0, 2.5, "undecided"),
        (-2.0, -3.0, -1.0, "undecided"),
    ],
)
def test_an_interval_that_is_no_ground_for_a_verdict_is_undecided(ratio, low, high, verdict):
    found = Speedup(ratio, low, high)
    assert found.verdict == verdict
    assert bool(found.why_undecided) == (verdict == "undecided")


@pytest.mark.parametrize(("rounds", "verdict"), [(1, "undecided"), (5, "undecided"), (6, "faster")])
def test_few_rounds_decide_nothing_however_equal_they_are(rounds, verdict):
    assert speedup(_timing(*[1.0] * rounds), _timing(*[2.0] * rounds)).verdict == verdict


@pytest.mark.parametrize("broken", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_a_round_without_a_time_does_not_count(broken):
    found = speedup(_timing(5.0, broken, *[5.0] * 6), _timing(*[10.0] * 7, broken))
    assert (found.ratio, found.low, found.high, found.rounds) == (2.0, 2.0, 2.0, 6)
    none = speedup(_timing(*[broken] * 9), _timing(*[10.0] * 9))
    assert (none.rounds, none.verdict) == (0, "undecided")
    assert speedup(_timing(), _timing(1.0)).verdict == "undecided"


def test_what_slows_the_whole_round_slows_both():
    disturbed = [value * (5 if i % 2 else 1) for i, value in enumerate(BASE)]
    found = speedup(_timing(*[value / 2 for value in disturbed]), _timing(*disturbed))
    assert found.low == pytest.approx(2.0)
    assert found.high == pytest.approx(2.0)


def test_only_the_rounds_that_both_had_are_compared():
    found = speedup(_timing(5.0, 5.0, 5.0), _timing(10.0, 10.0, 10.0, 1000.0, 1000.0, 1000.0, 1000.0))
    assert found.ratio == pytest.approx(2.0)


def test_the_interval_is_the_same_each_time():
    mine, base = _timing(*[v * 0.9 for v in reversed(BASE)]), _timing(*BASE)
    assert speedup(mine, base) == speedup(mine, base)
    assert str(speedup(mine, base)).count("x [") == 1


def test_an_interval_that_is_wider_than_what_it_may_show_does_not_say_the_same():
    assert Speedup(1.0, 0.95, 1.05).verdict == "same"
    wide = Speedup(1.8, 0.9, 1.9)
    assert wide.verdict == "undecided"
    assert "vary too much" in wide.why_undecided


def test_more_confidence_is_a_wider_interval():
    mine, base = _timing(*[v * 0.9 for v in reversed(BASE)]), _timing(*BASE)
    usual, more = speedup(mine, base), speedup(mine, base, confidence=99.8)
    assert more.low <= usual.low < usual.high <= more.high
    assert more.high - more.low > usual.high - usual.low


def test_the_order_is_that_of_rounds_in_which_both_were_timed():
    eager = [9.0, 5.0, 9.0, 9.0, 5.0, 9.0, 9.0, *[5.0] * 10]
    timings = {"eager": eager, "left early": [4.4] * 7, "fast": [3.0] * 17, "stayed": [4.0] * 17, "gave up": []}
    order = fastest_first({name: Timing(tuple(samples)) for name, samples in timings.items()})
    assert order == ["fast", "stayed", "left early", "eager", "gave up"]
    assert fastest_first({"only": Timing((1.0,))}) == ["only"]


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (Speedup(1.003, 1.001, 1.004), "1.003x [1.001, 1.004]"),
        (Speedup(0.9999, 0.9998, 0.99996), "0.9999x [0.9998, 1.0000]"),
        (Speedup(1.002, 0.999, 1.004), "1.00x [1.00, 1.00]"),
        (Speedup(2.0, 1.8, 2.2), "2.00x [1.80, 2.20]"),
        (Speedup(math.nan, math.nan, math.nan), "nanx [nan, nan]"),
    ],
)
def test_what_is_faster_or_slower_looks_so(found, text):
    assert str(found) == text
