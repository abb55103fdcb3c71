"""What a hybrid counts: its calls, those that the model itself has served, and the seconds spent on compiling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from tsopt.background.in_background import InBackground
from tsopt.compiler.calls.snapshot import Behind
from tsopt.compiler.capture.names import name_of
from tsopt.runtime.calling.optimized import Optimized
from tsopt.runtime.calling.partitioned import Partitioned
from tsopt.runtime.calling.refused import Pauses
from tsopt.runtime.calling.served import HybridReport, Told
from tsopt.runtime.report import Report


class Counts(Behind):
    """Counts the calls of a hybrid, and for which reasons the model itself has served some.

    A base class, because a count is raised in each call.

    Attributes:
        model: the original one.
        fast: the result of `optimize`; None before the first call and while eager runs.
    """

    def __init__(self, model: Callable[..., Any]) -> None:
        self.model = model
        self.fast: Optimized | Partitioned | InBackground | None = None
        self._calls, self._seconds = 0, 0.0
        self._stepped_back = ""  # why no compiled form is used although there is one
        self._of_before = 0, 0  # calls of compiled forms that were given up, and how many of them eager has served
        self._in_eager: Counter[str] = Counter()
        # Calls that the model serves before the next look; what for.
        self._pauses, self._unseen, self._paused_for = Pauses(), 0, ""
        told = Told(model)
        self._warn, self._say, self._say_once = told.warn, told.eager, told.once

    def report(self) -> HybridReport:
        """Which calls are compiled, and why others are not."""
        fast, seconds, in_eager = self.fast, self._seconds, Counter(self._in_eager)
        reports: tuple[Report, ...] = ()
        if isinstance(fast, InBackground):
            in_eager, seconds, reports = in_eager + fast.in_eager, seconds + fast.seconds, tuple(fast.reports)
        elif fast is not None:
            reports = (fast.report,)
        if self._stepped_back:
            calls, of_these = self._of_before
            in_eager[self._stepped_back] += self._calls - calls - (in_eager.total() - of_these)
        elif isinstance(fast, Optimized):
            in_eager, seconds = in_eager + fast.in_eager, seconds + fast.new_signatures.seconds
        elif self._unseen:  # which are counted already
            in_eager = in_eager - Counter({self._paused_for: self._unseen})
        return HybridReport(name_of(self.model), self._calls, in_eager, seconds, reports)

    def _settle(self) -> None:
        """What has been counted so far stays, whatever becomes of the compiled form."""
        known, fast = self.report(), self.fast
        self._in_eager, self._seconds = Counter(known.in_eager), known.compile_seconds
        self._of_before = self._calls, self._in_eager.total()
        if isinstance(fast, InBackground):  # whose counts are now among these
            fast.in_eager, fast.seconds = Counter(), 0.0

    def _pause(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """After a call that was refused: how many of the next ones are the model's without a look."""
        self._unseen, self._paused_for = self._pauses.after(args, kwargs), reason
        self._in_eager[reason] += self._unseen
        return self._unseen

    def _look_again(self) -> None:
        """Ends a pause."""
        unseen, self._unseen = self._unseen, 0
        self._in_eager[self._paused_for] -= unseen
