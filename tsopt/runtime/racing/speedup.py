"""What was measured of a candidate, and how many times faster than another it is, with an interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from tsopt.runtime.racing.outcomes import ending_of, said_by

BOOTSTRAP = 2000
# An interval decides nothing when its ends are further apart than this many times, unless the speed-up at its lower
# end is larger still. A ratio known to within a factor of 3 says less than most speed-ups amount to, and samples that
# scatter so much were not taken on one machine in one state, which is what the bootstrap assumes.
WIDE = 3.0
SAME = 1.25  # times: an interval that holds 1 and is wider does not say that two are equally fast
ENOUGH = 6  # rounds: the median lies between the extremes of n samples with probability 1 - 2 / 2**n, 95 % from n = 6
UNDECIDED = "undecided"

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds per call of one candidate, a value for each round.

    error: why it has no more of them; `ending` is its status then.
    """

    samples: tuple[float, ...]
    calls_per_sample: int = 1
    error: str = ""
    ending: str = "failed"

    def percentile(self, q: float) -> float:
        return float(np.percentile(self.samples, q))

    @property
    def p50(self) -> float:
        return self.percentile(50)

    @property
    def p90(self) -> float:
        return self.percentile(90)

    @property
    def std_percent(self) -> float:
        return 100 * float(np.std(self.samples)) / float(np.mean(self.samples))

    @property
    def is_sound(self) -> bool:
        """Whether there are samples, each of them a time: positive and finite."""
        return bool(self.samples) and all(0 < value < math.inf for value in self.samples)


def timing_of(seconds: Sequence[float], error: Exception | None) -> Timing:
    """Samples of a candidate, and what it raised."""
    samples = tuple(value * 1e3 for value in seconds)
    return Timing(samples) if error is None else Timing(samples, error=said_by(error), ending=ending_of(error))


@dataclass(frozen=True, slots=True)
class Speedup:
    """How many times faster than the baseline: the median of the ratios of all rounds, and its 95 % interval.

    Attributes:
        rounds: that it was worked out from.
    """

    ratio: float
    low: float
    high: float
    rounds: int = ENOUGH

    @property
    def verdict(self) -> str:
        """`faster`, `slower`, `same`, or `undecided` if the interval supports none of them."""
        if self.why_undecided:
            return UNDECIDED
        if self.low > 1.0:
            return "faster"
        return "slower" if self.high < 1.0 else "same"

    @property
    def why_undecided(self) -> str:
        """Why the interval decides nothing; empty when it does."""
        if self.rounds < ENOUGH:
            return f"{self.rounds} valid rounds are too few for a confidence interval"
        if not 0 < self.low <= self.high < math.inf or not math.isfinite(self.ratio):
            return "the measured times are invalid"
        if not self.low <= self.ratio * (1 + 1e-9) or not self.ratio <= self.high * (1 + 1e-9):
            return "the ratio is outside its confidence interval"
        is_open = self.low <= 1.0 <= self.high
        if self.high > self.low * (SAME if is_open else max(WIDE, self.low, 1 / self.high)):
            return f"the times vary too much: {self.low:.2f} to {self.high:.2f} times as fast as eager"
        return ""

    def __str__(self) -> str:
        digits = decimals(self.low if self.low > 1 else self.high if self.high < 1 else math.nan)
        return f"{self.ratio:.{digits}f}x [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def decimals(times: float) -> int:
    """How many decimals show on which side of 1 a number is, which is not 1: `1.00x` would be neither."""
    return next((digits for digits in (2, 3) if round(times, digits) != 1), 4)


def speedup(candidate: Timing, baseline: Timing, *, seed: int = 0, confidence: float = 95.0) -> Speedup:
    """The median of the ratios of all rounds, with a bootstrap interval (Efron and Tibshirani 1993, chapter 13).

    What slows the machine for a second slows both, so their ratio scatters less than their times do.

    Args:
        confidence: of the interval, in percent.

    A round in which either of the two has no positive, finite time does not count; without any the ratio is NaN.
    """
    ratios = _ratios(candidate, baseline)
    rounds = len(ratios)
    if not rounds:
        return Speedup(math.nan, math.nan, math.nan, 0)
    drawn = ratios[np.random.default_rng(seed).integers(rounds, size=(BOOTSTRAP, rounds))]
    tail = (100 - confidence) / 2
    low, high = np.percentile(np.median(drawn, axis=1), [tail, 100 - tail])
    return Speedup(float(np.median(ratios)), float(low), float(high), rounds)


def ratio(candidate: Timing, baseline: Timing) -> float:
    """The `ratio` of `speedup`, without its interval; NaN without a round in which both were timed."""
    found = _ratios(candidate, baseline)
    return float(np.median(found)) if len(found) else math.nan


def fastest_first(timings: Mapping[Name, Timing]) -> list[Name]:
    """The names, in the order of their worst `ratio` over any of the others.

    The gain over the baseline gives no such order: it contains the baseline's noise, and one that left early may have
    met it in its slow moments.
    """
    return by_worst(list(timings), lambda name, other: ratio(timings[name], timings[other]))


def by_worst(names: Sequence[Name], faster: Callable[[Name, Name], float]) -> list[Name]:
    """The names, in the order of their worst result against any of the others (Simpson and Kramer's rule of voting).

    One that beats each of the others comes first.

    Args:
        faster: how many times as fast as the second one the first one is; NaN where nobody knows.
    """

    def worst(name: Name) -> float:
        against = (faster(name, other) for other in names if other != name)
        return min((value for value in against if not math.isnan(value)), default=0.0)

    return sorted(names, key=worst, reverse=True)


def _ratios(candidate: Timing, baseline: Timing) -> np.ndarray:
    """Baseline over candidate, in each round in which both have a positive, finite time."""
    pairs = np.array(list(zip(candidate.samples, baseline.samples, strict=False)), dtype=float).reshape(-1, 2)
    mine, base = pairs[(np.isfinite(pairs) & (pairs > 0)).all(axis=1)].T
    return base / mine
