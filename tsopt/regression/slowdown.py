"""How much longer a call takes than in the baseline, with an interval over sessions.

One session of an engine differs from the next by a few percent however long it is timed (memory, threads), so sessions
are what scatters. Intervals are Student's t of the logarithms (Student 1908): of the difference of two means with equal
variances, or of one mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.99  # of the interval; it is looked at after each session, so 95 % would be wrong too often
DRAWN = 200_000  # values of Student's t, to read its quantile from
OK, SLOWER, UNDECIDED = "ok", "slower", "undecided"


@dataclass(frozen=True, slots=True)
class Slowdown:
    """By which fraction a call takes longer, with its interval; negative where it is faster."""

    estimate: float
    low: float
    high: float

    def verdict(self, limit: float) -> str:
        """`slower` beyond the limit and beyond noise, `ok` if the interval lies within the limit, or `undecided`."""
        if self.estimate > limit and self.low > 0:
            return SLOWER
        return OK if self.high <= limit else UNDECIDED

    def __str__(self) -> str:
        word = "slower" if self.estimate > 0 else "faster"
        return f"{abs(self.estimate):.1%} {word} [{self.low:+.1%}, {self.high:+.1%}]"


def between(before: Sequence[float], now: Sequence[float], work: float = 1.0) -> Slowdown:
    """The slowdown by the speed-ups of sessions over the same yardstick.

    Args:
        before: of the baseline. How far a single one may be off is told by the scatter of `now`.
        work: how many times as much work there is now, which the yardstick has too.
    """
    then, later = np.log(np.asarray(before, dtype=float)), np.log(np.asarray(now, dtype=float))
    squares = float(((then - then.mean()) ** 2).sum() + ((later - later.mean()) ** 2).sum())
    shift = float(then.mean() - later.mean()) + math.log(work)
    return _interval(shift, squares, len(then) + len(later) - 2, 1 / len(then) + 1 / len(later))


def paired(ratios: Sequence[float]) -> Slowdown:
    """The slowdown by sessions in which both were timed: how many times as long calls take now, in each."""
    found = np.log(np.asarray(ratios, dtype=float))
    return _interval(float(found.mean()), float(((found - found.mean()) ** 2).sum()), len(found) - 1, 1 / len(found))


def _interval(shift: float, squares: float, freedom: int, inverse_count: float) -> Slowdown:
    if freedom < 1:
        return Slowdown(math.expm1(shift), -1.0, math.inf)
    drawn = np.random.default_rng(0).standard_t(freedom, DRAWN)
    reach = math.sqrt(squares / freedom * inverse_count) * float(np.quantile(drawn, (1 + CONFIDENCE) / 2))
    return Slowdown(math.expm1(shift), math.expm1(shift - reach), math.expm1(shift + reach))
