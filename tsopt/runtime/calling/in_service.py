"""Whether a compiled form is faster where it serves: now and then, a real call is timed in both forms.

A race repeats a few calls. In service, each may have other sizes, and the caches hold what else the process does.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from statistics import fmean, stdev
from typing import Any

from tsopt.compiler.calls.example import Example
from tsopt.compiler.outside import kept_outside
from tsopt.compiler.protect import protected
from tsopt.runtime.calling.audit import Audits
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.calling.own_work import LONG, size_of
from tsopt.runtime.checking.inputs import InputSet
from tsopt.runtime.racing.contenders import device_wait
from tsopt.runtime.racing.timing import seconds_of_both

log = logging.getLogger("tsopt")
FEWEST, LATEST = 10, 32  # calls timed in both forms: for a decision, and at most
NOTABLY = 1.03  # times as long as eager: a form that takes less is not given up
SURE = 4.0  # standard errors that the mean of the differences is above zero


class InService:
    """Real calls that were timed in both forms.

    Args:
        audits: of the same form. They say how long the calls that were served took; timing may take as large a share of
            that as they do.
        clock: seconds.

    Attributes:
        largest: the most elements that the inputs of a timed call had.
    """

    def __init__(self, audits: Audits, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.audits, self.largest, self._clock = audits, 0, clock
        self._pairs = deque[tuple[float, float]](maxlen=LATEST)
        self._spent, self._expected, self._count, self._is_timing = 0.0, 0.0, 0, False

    @property
    def is_affordable(self) -> bool:
        """Whether one more call may be timed. Short ones are not: after a rest, they take longer than in a row."""
        audits = self.audits
        return (
            not self._is_timing and audits.took >= LONG and self._spent + self._expected <= audits.share * audits.served
        )

    def time(
        self, model: Callable[..., Any], served: Callable[..., Any], executable: Executable, call: Example
    ) -> None:
        """Times a call in both forms, on copies of its inputs. What the calls change is restored.

        Never raises an Exception: the caller has not asked for it.

        Args:
            served: a call with all that is done around it.
            executable: what serves it.
        """
        start, self._is_timing = self._clock(), True  # the model may call itself
        try:
            copies = [InputSet("call", call).clone() for _ in range(2)]
            with kept_outside(model), protected(model, written=executable.state):
                pair = seconds_of_both(model, served, copies, self._count % 2, device_wait(call))
            self._pairs.append(pair)
            self.largest = max(self.largest, size_of(call.args, call.kwargs))
        except Exception as error:  # of the model, which the call itself will raise; or inputs that cannot be copied
            log.info("a call could not be timed in both forms: %r", error)
        finally:
            self._is_timing = False
        self._count += 1
        took = self._clock() - start
        self._spent, self._expected = self._spent + took, min(took, self._expected or took)  # the first one is cold

    @property
    def loss(self) -> str:
        """Why eager should serve the calls; empty if it is not known to be faster."""
        if len(self._pairs) < FEWEST:
            return ""
        eager, ours = (fmean(item) for item in zip(*self._pairs, strict=True))
        differences = [mine - theirs for theirs, mine in self._pairs]
        if ours < NOTABLY * eager or ours - eager < SURE * stdev(differences) / math.sqrt(len(differences)):
            return ""
        return (
            f"in service, a call takes {eager * 1e3:.1f} ms in eager mode and {ours * 1e3:.1f} ms compiled "
            f"(means of {len(differences)} calls)"
        )
