"""Finds in few trials how many layers must stay in float32."""

from __future__ import annotations

from collections.abc import Callable


def fewest_kept(count: int, at_least: int, is_accepted: Callable[[int], bool], guess: int | None = None) -> int:
    """The smallest number of layers to keep in float32 so that the result is accepted.

    Takes two trials where the guess is right, about 2 log2(distance) where it is not, about log2(count) without one.
    Assumes that accuracy does not drop when more layers stay in float32. The returned number has been tried, unless
    it is `count`, which quantizes nothing.

    Args:
        count: of all layers.
        at_least: what is kept in any case.
        is_accepted: whether the accuracy is good enough with so many kept, those that lose most first.
        guess: a number that is probably near.
    """
    if at_least >= count:
        return count
    low, high = at_least - 1, count  # `low` is too few, or not wanted; `high` is enough
    if guess is not None:
        step, middle = 1, min(max(guess, at_least), count - 1)
        while low < middle < high:
            accepted = is_accepted(middle)
            low, high = (low, middle) if accepted else (middle, high)
            middle, step = (middle - step, 2 * step) if accepted else (middle + step, 2 * step)
    else:
        low, high = (low, at_least) if is_accepted(at_least) else (at_least, high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_accepted(middle) else (middle, high)
    return high
