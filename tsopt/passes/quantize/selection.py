"""Finds in few trials how many layers must stay in float32."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate


def fewest_kept(
    count: int, at_least: int, is_accepted: Callable[[int], bool], guess: Callable[[], int] | None = None
) -> int:
    """The smallest number of layers to keep in float32 so that the result is accepted.

    Takes two trials where the guess is right, and otherwise a step to the next guess, or twice as long as the last step
    where that is farther. A step past what is known already is a bisection instead, as all of them are without a guess.
    Assumes that accuracy does not drop when more layers stay in float32. The returned number has been tried, unless
    it is `count`, which quantizes nothing.

    Args:
        count: of all layers.
        at_least: what is kept in any case.
        is_accepted: whether the accuracy is good enough with so many kept, those that lose most first.
        guess: a number that is probably near, by all that has been tried.
    """
    if at_least >= count:
        return count
    low, high, step = at_least - 1, count, 1  # `low` is too few, or not wanted; `high` is enough
    tried = at_least if guess is None else min(max(guess(), at_least), count - 1)
    while True:
        is_enough = is_accepted(tried)
        low, high = (low, tried) if is_enough else (tried, high)
        if high - low <= 1:
            return high
        farther = 0 if guess is None else min(guess(), high - step) if is_enough else max(guess(), low + step)
        tried = farther if guess is not None and low < farther < high else (low + high) // 2
        step *= 2


class ExpectedError:
    """The error of the outputs that is expected of many layers together: their effects add up.

    Args:
        effects: squared relative errors, in the order in which layers are kept in float32.
        limit: of the relative error of the outputs.
    """

    def __init__(self, effects: Sequence[float], limit: float) -> None:
        self._of_the_last = list(accumulate(reversed(effects)))  # of the last one, of the last two, ...
        self._limit = limit**2
        self._factor = 1.0  # what was measured, over what was expected

    def correct(self, kept: int, error: float | None) -> None:
        """Takes the relative error that was measured with so many layers in float32; None if it is not known."""
        expected = self._of_the_last[-kept - 1]
        if error and expected and math.isfinite(error):
            self._factor = error**2 / expected

    def fewest(self) -> int:
        """How many layers have to stay in float32."""
        return len(self._of_the_last) - bisect_right(self._of_the_last, self._limit / self._factor)
