"""The slowdown between sessions: its estimate, its interval, and what follows from them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tsopt.regression.sessions import FEWEST, MOST
from tsopt.regression.slowdown import BETWEEN_CHECKS, Slowdown, between, paired

NOISE = np.array([0.0, 0.01, -0.01, 0.005, -0.005])


def _sessions(speedup: float, scatter: float = 1.0) -> list[float]:
    return list(speedup * np.exp(scatter * NOISE))


def test_it_says_how_much_longer_a_call_takes():
    assert between(_sessions(3.0), _sessions(3.0 / 1.1)).estimate == pytest.approx(0.1)
    assert between(_sessions(3.0), _sessions(3.3)).estimate == pytest.approx(1 / 1.1 - 1)
    assert paired(_sessions(1.1)).estimate == pytest.approx(0.1)


def test_the_interval_of_few_is_welchs():
    # 99 %: t = 4.604 with 4 degrees of freedom, 3.355 with 8.
    error, floor = float(np.std(NOISE, ddof=1)) / math.sqrt(5), BETWEEN_CHECKS
    assert paired(_sessions(1.0)).high == pytest.approx(math.expm1(4.604 * math.hypot(error, floor)), rel=0.01)
    equal = between(_sessions(1.0), _sessions(1.0))
    assert equal.high == pytest.approx(math.expm1(3.355 * math.hypot(error, error, floor)), rel=0.01)
    busy = between(_sessions(1.0), _sessions(1.0, scatter=100.0))  # the scatter of the other one counts for nothing
    assert busy.high == pytest.approx(math.expm1(4.604 * math.hypot(error, 100 * error, floor)), rel=0.02)


def test_an_outlier_among_ten_sessions_counts_only_as_much_as_its_neighbor():
    usual = [3.0 * math.exp(value) for value in (*NOISE, *NOISE[1:], 0.0)]
    with_an_outlier = [3.0 * math.exp(value) for value in (*NOISE, *NOISE[1:], 0.2)]
    found, wanted = between(with_an_outlier, _sessions(3.0)), between(usual, _sessions(3.0))
    assert found.estimate == pytest.approx(wanted.estimate, abs=0.003)
    assert found.verdict(0.05) == "ok"


def test_the_interval_of_trimmed_means_is_yuens():
    drawn = np.random.default_rng(0).normal(0, 0.01, 20)
    kept = np.sort(drawn)[2:-2]
    error = math.sqrt(19 * np.var(np.clip(drawn, kept[0], kept[-1]), ddof=1) / (16 * 15))
    expected = math.expm1(kept.mean() + 2.947 * math.hypot(error, BETWEEN_CHECKS))  # t of 15 degrees of freedom
    assert paired(list(np.exp(drawn))).high == pytest.approx(expected, rel=0.01)


def test_how_far_one_session_of_the_baseline_may_be_off_is_told_by_those_of_now():
    single = float(np.std(NOISE, ddof=1))
    expected = math.expm1(3.75 * math.hypot(single, single / math.sqrt(5), BETWEEN_CHECKS))
    assert between([3.0], _sessions(3.0)).high == pytest.approx(expected, rel=0.15)
    assert between([3.0], _sessions(3.0)).high > between(_sessions(3.0), _sessions(3.0)).high


def test_sessions_that_are_all_the_same_leave_what_checks_differ_by():
    found = between([3.0] * 5, [3.0] * 5)
    assert 0.02 < found.high < 0.05


def test_one_session_each_says_nothing_about_noise():
    found = between([3.0], [1.0])
    assert (found.low, found.high) == (-1.0, math.inf)
    assert found.verdict(0.05) == "undecided"


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ((0.10, 0.08, 0.12), "slower"),
        ((0.10, 0.02, 0.18), "slower"),  # beyond noise, and most likely beyond the limit
        ((0.10, 0.01, 0.19), "undecided"),  # it may be noise
        ((0.04, 0.03, 0.05), "ok"),
        ((0.04, 0.03, 0.06), "undecided"),  # it may be beyond the limit
        ((-0.3, -0.4, -0.2), "ok"),
    ],
)
def test_what_follows_from_an_interval(interval, verdict):
    assert Slowdown(*interval).verdict(0.05) == verdict


def test_it_is_a_text():
    assert str(Slowdown(0.104, 0.08, 0.12)) == "10.4% slower [8.0%, 12.0%]"
    assert str(Slowdown(-0.3, -0.4, -0.2)) == "30.0% faster [20.0%, 40.0%]"
    assert str(Slowdown(-0.02, -0.03, 0.01)) == "2.0% faster [3.0% faster, 1.0% slower]"
    assert str(Slowdown(-0.02, -1.0, math.inf)) == "2.0% faster, not yet certain"


@pytest.mark.parametrize("scatter", [0.01, 0.03])
def test_a_slowdown_of_a_tenth_is_found_and_none_is_not(scatter):
    """Simulated as checks are made: sessions are added until it is decided, and checks differ on top of that."""
    draw = np.random.default_rng(0)

    def verdict(slowdown: float) -> str:
        off = draw.normal(0, 0.01)
        then = list(3.0 * np.exp(draw.normal(0, scatter, 10)))
        now: list[float] = []
        while len(now) < MOST:
            now.append(float(3.0 / (1 + slowdown) * np.exp(off + draw.normal(0, scatter))))
            if len(now) >= FEWEST and (found := between(then, now).verdict(0.05)) != "undecided":
                return found
        return "undecided"

    assert [verdict(0.1) for _ in range(40)].count("slower") >= 38
    assert [verdict(0.0) for _ in range(100)].count("slower") == 0
