"""The slowdown between sessions: its estimate, its interval, and what follows from them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tsopt.regression.slowdown import Slowdown, between, paired

NOISE = np.array([0.0, 0.01, -0.01, 0.005, -0.005])


def _sessions(speedup: float, scatter: float = 1.0) -> list[float]:
    return list(speedup * np.exp(scatter * NOISE))


def test_it_says_how_much_longer_a_call_takes():
    assert between(_sessions(3.0), _sessions(3.0 / 1.1)).estimate == pytest.approx(0.1)
    assert between(_sessions(3.0), _sessions(3.3)).estimate == pytest.approx(1 / 1.1 - 1)
    assert paired(_sessions(1.1)).estimate == pytest.approx(0.1)


def test_work_that_the_yardstick_has_too_counts_as_time():
    assert between(_sessions(3.0), _sessions(3.0), work=1.2).estimate == pytest.approx(0.2)


def test_the_interval_is_students():
    # 99 %: t = 4.604 with 4 degrees of freedom, 3.355 with 8.
    error = float(np.std(NOISE, ddof=1)) / math.sqrt(5)
    assert paired(_sessions(1.0)).high == pytest.approx(math.expm1(4.604 * error), rel=0.01)
    assert between(_sessions(1.0), _sessions(1.0)).high == pytest.approx(
        math.expm1(3.355 * math.sqrt(2) * error), rel=0.01
    )


def test_how_far_one_session_of_the_baseline_may_be_off_is_told_by_those_of_now():
    found = between([3.0], _sessions(3.0))
    error = float(np.std(NOISE, ddof=1)) * math.sqrt(1 + 1 / 5)
    assert found.high == pytest.approx(math.expm1(4.604 * error), rel=0.01)


def test_one_session_each_says_nothing_about_noise():
    found = between([3.0], [1.0])
    assert (found.low, found.high) == (-1.0, math.inf)
    assert found.verdict(0.05) == "undecided"


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ((0.10, 0.08, 0.12), "slower"),
        ((0.10, 0.01, 0.19), "slower"),  # beyond noise, and most likely beyond the limit
        ((0.10, -0.01, 0.21), "undecided"),  # it may be noise
        ((0.04, 0.03, 0.05), "ok"),
        ((0.04, 0.03, 0.06), "undecided"),  # it may be beyond the limit
        ((-0.3, -0.4, -0.2), "ok"),
    ],
)
def test_what_follows_from_an_interval(interval, verdict):
    assert Slowdown(*interval).verdict(0.05) == verdict


def test_it_is_a_text():
    assert str(Slowdown(0.104, 0.08, 0.12)) == "10.4% slower [+8.0%, +12.0%]"
    assert str(Slowdown(-0.02, -0.03, 0.01)) == "2.0% faster [-3.0%, +1.0%]"


@pytest.mark.parametrize("scatter", [0.5, 2.0])
def test_a_slowdown_of_a_tenth_is_found_and_none_is_not(scatter):
    """Sessions that scatter by 1 and 4 %, as simulated: the verdict holds in all but a few of many."""
    draw = np.random.default_rng(0)

    def drawn(center: float, count: int) -> list[float]:
        return list(center * np.exp(draw.normal(0, 0.02 * scatter, count)))

    slower = [between(drawn(3.0, 10), drawn(3.0 / 1.1, 12)).verdict(0.05) for _ in range(50)]
    same = [between(drawn(3.0, 10), drawn(3.0, 12)).verdict(0.05) for _ in range(50)]
    assert slower.count("slower") >= 48
    assert same.count("slower") == 0
