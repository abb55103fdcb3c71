"""Whether a compiled form is faster where it serves: now and then, the model itself serves some of the calls.

A race repeats a few calls. In service, each may have other sizes, and the rest of the process uses the same caches and
the same allocator. No measurement beside the calls can tell what that does to either form.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import fmean, stdev
from typing import Any

from tsopt.runtime.calling.audit import Audits
from tsopt.runtime.calling.own_work import LONG

UNTIMED, TIMED = (
    2,
    30,
)  # calls of a turn: the first ones, in which threads of the other form may still spin, do not count
TURN = UNTIMED + TIMED
FEWEST, MOST = 6, 12  # rounds: for a decision; after so many without one, none of them counts any more
NOTABLY = 1.03  # times as long as eager: a form that takes less is not given up
SURE = 3.5  # standard errors that the mean of the rounds is above that
LEAST = 0.02  # of the time of a round: what it counts as where eager costs nothing


class InService:
    """Rounds in which each form serves calls in its turn; every second round begins with the other one.

    What a call takes is divided by the number of elements of its inputs: sizes may change from call to call.

    Args:
        audits: of the same form. They estimate the time that its calls have taken. If eager is slower, a round costs at
            most their share of the time until the next one.
        clock: seconds.

    Attributes:
        is_on: whether a round has begun.
        largest: the most elements that the inputs of a call had.
    """

    def __init__(self, audits: Audits, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.audits, self._clock = audits, clock
        self.is_on, self.largest, self._count, self._call = False, 0, 0, 0
        self._ratios: list[float] = []  # times as long as eager, in each round
        self._next = math.nan  # seconds served, at which another round may begin
        self._seconds, self._elements = [0.0, 0.0], [0, 0]  # compiled, and in eager mode

    def begins(self, gain: Callable[[], float]) -> bool:
        """Whether a round may begin. It does not after a short call: to time such calls would take too long.

        Args:
            gain: returns how many times as fast as eager the form was in its race: an estimate of what a round costs.
        """
        audits = self.audits
        if not audits.share or audits.took < LONG:
            return False
        if math.isnan(self._next):
            return audits.served >= TURN * (gain() - 1) * audits.took / audits.share
        return audits.served >= self._next

    @property
    def is_eagers_turn(self) -> bool:
        """Whether the model itself serves the next call of a round."""
        return ((self._call if self.is_on else 0) // TURN + self._count) % 2 == 1

    def serve(self, call: Callable[[], Any], size: int) -> Any:
        """Makes a call of a round, and begins or ends the round with it. One that raises ends it without a result.

        Args:
            size: the number of elements of its inputs.
        """
        if not self.is_on:
            self.is_on, self._call, self._seconds, self._elements = True, 0, [0.0, 0.0], [0, 0]
        turn, counts = int(self.is_eagers_turn), self._call % TURN >= UNTIMED
        self.largest = max(self.largest, size)
        start = self._clock()
        try:
            result = call()
        except BaseException:
            self.stop()
            raise
        if counts:
            self._seconds[turn] += self._clock() - start
            self._elements[turn] += max(size, 1)
        self._call += 1
        if self._call == 2 * TURN:
            self._end()
        return result

    def stop(self) -> None:
        """Ends a round, if there is one, without a result."""
        if self.is_on:
            self._postpone(0.5 * self._seconds[1])

    def _end(self) -> None:
        ours, eager = (max(t, 1e-9) / n for t, n in zip(self._seconds, self._elements, strict=True))
        if len(self._ratios) == MOST:
            self._ratios = []
        self._ratios.append(ours / eager)
        self._postpone((1 - min(ours / eager, 1.0)) * self._seconds[1] * TURN / TIMED)

    def _postpone(self, lost: float) -> None:
        """Waits with the next round until calls have taken enough time to pay for this one.

        Args:
            lost: seconds that the round took longer because of eager.
        """
        self.is_on, self._count = False, self._count + 1
        self._next = self.audits.served + max(lost, LEAST * sum(self._seconds)) / (self.audits.share or 1.0)

    @property
    def loss(self) -> str:
        """Why eager should serve the calls; empty if it is not known to be faster."""
        logs = [math.log(ratio) for ratio in self._ratios]
        if len(logs) < FEWEST or fmean(logs) - SURE * stdev(logs) / math.sqrt(len(logs)) < math.log(NOTABLY):
            return ""
        times = math.exp(fmean(logs))
        return f"in service, calls take {times:.2f} times as long compiled as in eager mode ({len(logs)} comparisons)"
