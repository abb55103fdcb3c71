"""Which calls of calibration data are kept: as many as are needed, and as memory and time allow."""

from __future__ import annotations

import time
from operator import itemgetter

import torch

from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.structure import flatten

MOST = 128  # calls; more hardly change the ranges
LEAST = 16  # of them that are kept where there are as many, however large or slow they are
LARGEST = 10**9  # bytes of all of them together, beyond these

Place = tuple[int, int]  # in the order of the data; of calls at the same place, the row of an item


def most_like(*calls: Example) -> int:
    """How many calls as large as these are kept."""
    return _most(sum(map(_bytes, calls)), len(calls))


def _most(size: int, count: int) -> int:
    return min(MOST, max(LEAST, LARGEST * count // size)) if size else MOST


def _bytes(call: Example) -> int:
    leaves, _ = flatten((call.args, call.kwargs))
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))


class Kept:
    """The calls that are kept: of each item its share, and of some items more, in case others hold less.

    Args:
        end: when reading should be over, by the monotonic clock.
    """

    def __init__(self, end: float) -> None:
        self._end = end
        self._shares: list[tuple[Place, Example]] = []
        self._spare: list[tuple[Place, Example]] = []
        self._size = 0

    @property
    def shares(self) -> int:
        """How many there are without the spare ones."""
        return len(self._shares)

    def has_room(self, is_spare: bool) -> bool:
        return (self._count if is_spare else self.shares) < self._most

    def add(self, place: Place, call: Example, is_spare: bool) -> None:
        (self._spare if is_spare else self._shares).append((place, call))
        self._size += _bytes(call)
        while self._spare and self._count > self._most:
            self._size -= _bytes(self._spare.pop()[1])

    @property
    def is_enough(self) -> bool:
        return self.shares >= self._most or (time.monotonic() >= self._end and self._count >= LEAST)

    def in_order(self) -> list[Example]:
        """In the order of the data, in which a state goes on."""
        return [call for _, call in sorted(self._shares + self._spare, key=itemgetter(0))]

    def why_no_more(self) -> str:
        """Why there are not more, for the report; empty where there are as many as are wanted."""
        if self._count >= MOST:
            return ""
        if self.shares < self._most:
            return "more would take too long for the budget"
        return f"more would take over {LARGEST / 1e9:g} GB of memory"

    @property
    def _count(self) -> int:
        return len(self._shares) + len(self._spare)

    @property
    def _most(self) -> int:
        return _most(self._size, self._count)
