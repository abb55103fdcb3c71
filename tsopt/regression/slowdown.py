"""How much longer a call takes than in the baseline, with an interval over sessions.

One session of an engine differs from the next by a few percent however long it is timed (memory, threads), so sessions
are what scatters. Intervals are those of Yuen's t-test (Biometrika 61, 1974), of the logarithms of the speed-ups. It is
Welch's of trimmed means: variances may differ, because one of the two may have been measured on a busy machine, and one
session in ten may be an outlier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

CONFIDENCE = 0.99  # of the interval; it is looked at after each session, so 95 % would be wrong too often
# A standard deviation between checks of the same model, on top of that between their sessions: sessions of one check
# share a process and a choice among candidates that are level.
BETWEEN_CHECKS = 0.01
TRIMMED = 0.1  # of the sessions, at each end
# Of the limit, which the interval has to exceed. In a simulation with sessions that scatter by 3 %, 0.6 % of the checks
# of the same model are "slower" with 0, less than 0.1 % with this; a slowdown of 10 % is found in 99 % of them.
CERTAIN_SHARE = 0.25
DRAWN = 200_000  # values of Student's t, to read its quantile from
FAR = 10.0  # the end of an interval over two sessions that differ: no number to show
OK, SLOWER, UNDECIDED = "ok", "slower", "undecided"


@dataclass(frozen=True, slots=True)
class Slowdown:
    """By which fraction a call takes longer, with its interval; negative where it is faster."""

    estimate: float
    low: float
    high: float

    def verdict(self, limit: float, drift: float = 0.0) -> str:
        """`slower` beyond the limit and beyond noise, `ok` if the interval lies within the limit, or `undecided`.

        Args:
            drift: by what fraction something else than what is compared may have moved it.
        """
        if self.estimate > limit and self.low - drift > CERTAIN_SHARE * limit:
            return SLOWER
        return OK if self.high + drift <= limit else UNDECIDED

    def __str__(self) -> str:
        if self.high > FAR:
            return f"{_said(self.estimate)}, not yet certain"
        if self.low * self.high > 0:
            low, high = sorted(map(abs, (self.low, self.high)))
            return f"{_said(self.estimate)} [{low:.1%}, {high:.1%}]"
        return f"{_said(self.estimate)} [{_said(self.low)}, {_said(self.high)}]"


def _said(slowdown: float) -> str:
    return f"{abs(slowdown):.1%} {'slower' if slowdown > 0 else 'faster'}"


def between(before: Sequence[float], now: Sequence[float]) -> Slowdown:
    """The slowdown by the speed-ups of sessions over the same yardstick.

    Args:
        before: of the baseline. How far a single one may be off is told by the scatter of `now`.
    """
    then, later = _logarithms(before), _logarithms(now)
    parts = [_Part.of(then), _Part.of(later)]
    if len(then) == 1:
        parts[0] = _Part(parts[0].mean, parts[1].variance * len(later), parts[1].freedom)
    return _interval(parts[0].mean - parts[1].mean, parts)


def paired(ratios: Sequence[float]) -> Slowdown:
    """The slowdown by sessions in which both were timed: how many times as long calls take now, in each."""
    part = _Part.of(_logarithms(ratios))
    return _interval(part.mean, [part])


def uncertainty(speedups: Sequence[float]) -> float:
    """By what fraction the mean over sessions may be off, as they scatter."""
    part = _Part.of(_logarithms(speedups))
    if not part.freedom:
        return math.inf
    return _quantile(float(part.freedom)) * math.sqrt(part.variance)


@dataclass(frozen=True, slots=True)
class _Part:
    """A trimmed mean, its variance, and the degrees of freedom of the variance."""

    mean: float
    variance: float
    freedom: int

    @classmethod
    def of(cls, values: np.ndarray) -> _Part:
        count = len(values)
        cut = int(TRIMMED * count)
        ordered = np.sort(values)
        kept = ordered[cut : count - cut]
        if len(kept) < 2:
            return cls(float(kept.mean()), math.inf, 0)
        # Winsorized: a trimmed value counts as the nearest one that is kept.
        squares = (count - 1) * float(np.clip(ordered, kept[0], kept[-1]).var(ddof=1))
        return cls(float(kept.mean()), squares / (len(kept) * (len(kept) - 1)), len(kept) - 1)


def _interval(shift: float, parts: Sequence[_Part]) -> Slowdown:
    variance = sum(part.variance for part in parts)
    if not math.isfinite(variance):
        return Slowdown(math.expm1(shift), -1.0, math.inf)
    # Welch and Satterthwaite's degrees of freedom.
    terms = sum(part.variance**2 / part.freedom for part in parts)
    freedom = variance**2 / terms if terms else float(sum(part.freedom for part in parts))
    reach = _quantile(round(freedom, 1)) * math.sqrt(variance + BETWEEN_CHECKS**2)
    return Slowdown(*(math.expm1(min(value, 100.0)) for value in (shift, shift - reach, shift + reach)))


@cache
def _quantile(freedom: float) -> float:
    """Of Student's t; drawn, because it has no closed form."""
    drawn = np.random.default_rng(0).standard_t(freedom, DRAWN)
    return float(np.quantile(drawn, (1 + CONFIDENCE) / 2))


def _logarithms(values: Sequence[float]) -> np.ndarray:
    return np.log(np.asarray(values, dtype=float))
