"""Whether a compiled form is faster where it serves: now and then, the model itself serves some of the calls.

A race repeats a few calls. In service, each may have other sizes, and the rest of the process uses the same caches and
the same allocator. No measurement beside the calls can tell what that does to either form.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import fmean, stdev
from typing import Any

from tsopt.runtime.calling.audit import Audits
from tsopt.runtime.calling.own_work import LONG

UNTIMED, TIMED = 2, 14  # calls of a turn: those that still find the other form's threads awake, and those that count
FEWEST, LATEST = 6, 10  # rounds: for a decision, and at most
NOTABLY = 1.03  # times as long as eager: a form that takes less is not given up
SURE = 3.0  # standard errors that the mean of the rounds is above that
LEAST = 0.05  # of the time of a round: what it costs, where eager costs nothing


class InService:
    """Rounds in which each form serves calls in its turn; every second round begins with the other one.

    What a call takes is divided by the number of elements of its inputs: sizes may change from call to call.

    Args:
        audits: of the same form. They say how long the calls that were served took. The time that rounds cost, because
            the model itself is slower, may be as large a share of it as that of audits.
        gain: how many times as fast as eager the race has found it to be.
        clock: seconds.

    Attributes:
        is_on: whether a round has begun.
        largest: the most elements that the inputs of a call had.
    """

    def __init__(self, audits: Audits, gain: float, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.audits, self._gain, self._clock = audits, gain, clock
        self.is_on, self.largest, self._count, self._call = False, 0, 0, 0
        self._ratios = deque[float](maxlen=LATEST)  # times as long as eager, in each round
        self._spent, self._expected = 0.0, 0.0
        self._seconds, self._elements = [0.0, 0.0], [0, 0]  # compiled, and in eager mode

    @property
    def begins(self) -> bool:
        """Whether a round may begin. Short calls are not compared: what times them would matter."""
        audits = self.audits
        expected = self._expected if self._ratios else (UNTIMED + TIMED) * (self._gain - 1) * audits.took
        return audits.took >= LONG and self._spent + expected <= audits.share * audits.served

    @property
    def is_eagers_turn(self) -> bool:
        """Whether the model itself serves the next call of a round."""
        call = self._call if self.is_on else 0
        return (call // (UNTIMED + TIMED) + self._count) % 2 == 1

    def time(self, call: Callable[[], Any], size: int) -> Any:
        """Makes a call of a round, and begins or ends the round with it. One that raises ends it without a result.

        Args:
            size: the number of elements of its inputs.
        """
        if not self.is_on:
            self.is_on, self._call, self._seconds, self._elements = True, 0, [0.0, 0.0], [0, 0]
        turn, counts = int(self.is_eagers_turn), self._call % (UNTIMED + TIMED) >= UNTIMED
        self.largest = max(self.largest, size)
        self.is_on, start = False, self._clock()
        result = call()
        took, self.is_on = self._clock() - start, True
        if counts:
            self._seconds[turn] += took
            self._elements[turn] += max(size, 1)
        self._call += 1
        if self._call == 2 * (UNTIMED + TIMED):
            self._end()
        return result

    def stop(self) -> None:
        """Ends a round without a result."""
        self.is_on = False

    def _end(self) -> None:
        ours, eager = (max(t, 1e-9) / n for t, n in zip(self._seconds, self._elements, strict=True))
        self._ratios.append(ours / eager)
        lost = (1 - min(ours / eager, 1.0)) * self._seconds[1] * (UNTIMED + TIMED) / TIMED
        self._spent, self._expected = self._spent + lost, max(lost, LEAST * sum(self._seconds))
        self.is_on, self._count = False, self._count + 1

    @property
    def loss(self) -> str:
        """Why eager should serve the calls; empty if it is not known to be faster."""
        logs = [math.log(ratio) for ratio in self._ratios]
        if len(logs) < FEWEST or fmean(logs) - SURE * stdev(logs) / math.sqrt(len(logs)) < math.log(NOTABLY):
            return ""
        times = math.exp(fmean(logs))
        return f"in service, calls take {times:.2f} times as long compiled as in eager mode ({len(logs)} comparisons)"
