"""Finds by bisection how many layers must stay in float32."""

from __future__ import annotations

from collections.abc import Callable


def fewest_kept(count: int, at_least: int, is_accepted: Callable[[int], bool]) -> int:
    """The smallest number of layers to keep in float32 so that the result is accepted, in about log2(count) trials.

    Assumes that accuracy does not drop when more layers stay in float32. The returned number has been tried, unless
    it is `count`, which quantizes nothing.

    Args:
        count: of all layers.
        at_least: what is kept in any case.
        is_accepted: whether the accuracy is good enough with so many kept, those that lose most first.
    """
    if at_least >= count or is_accepted(at_least):
        return min(at_least, count)
    low, high = at_least, count  # `low` is too few, `high` is enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_accepted(middle) else (middle, high)
    return high
