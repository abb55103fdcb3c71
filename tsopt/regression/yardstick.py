"""The yardsticks: eager, and fixed layers on the machine of the baseline; how far it may have moved a speed-up."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import Any

import torch

from tsopt.compiler.calls.example import Example
from tsopt.compiler.protect import protected
from tsopt.compiler.watching_mode import WatchingMode
from tsopt.regression.baseline import Baseline
from tsopt.regression.machine_state import LAYERS
from tsopt.regression.sessions import Sessions
from tsopt.regression.slowdown import Slowdown, between
from tsopt.runtime.checking.inputs import InputSet
from tsopt.runtime.profiling.work import macs_of_call

# How far a speed-up may move when eager takes a multiple of the time that it took: this, times the square of the
# logarithm of the multiple. Where calls take twice as long, engines and eager no longer wait for the same things.
PER_SQUARE = 0.35
# Where large layers could be a second yardstick, but the baseline has none, or was measured with other versions: this,
# times the logarithm. (In three runs of bench.check, it was 0.29, 0.34 and 0.65 for ResNet-18.)
PER_LOG = 0.3
# How far the mean of two yardsticks may be off: this, times the square of their distance, but no more than half of it,
# where one of them is right and the other one tells nothing.
PER_SQUARED_DISTANCE = 2.0
CALLS, LONG = 3, 1.0  # of the model that is looked at, the shortest counts: others fill caches; one, of so many seconds
SAME = 0.02  # of the functions, by which calls of the same code differ


@dataclass(frozen=True, slots=True)
class EagerWork:
    """What a call in eager mode does.

    Attributes:
        macs: multiply-accumulates.
        ops: of torch.
        functions: that Python calls, those of C among them; None if another profiler runs.
    """

    macs: int
    ops: int | None = None
    functions: int | None = None

    @classmethod
    def of(
        cls, model: Callable[..., Any], example: Example, state: list[torch.Tensor], *, only_macs: bool = False
    ) -> EagerWork:
        """Args: state: the tensors that calls write, which are put back."""
        asked, start = InputSet("example", example), time.perf_counter()
        with protected(model, written=state):
            call = asked.clone()
            macs = macs_of_call(model, *call.args, **call.kwargs)
        is_long = time.perf_counter() - start > LONG
        if only_macs:
            return cls(macs)
        counted: list[int] = []
        for _ in range(0 if sys.getprofile() else 1 if is_long else CALLS):
            call = asked.clone()
            with protected(model, written=state), torch.no_grad():
                counted.append(_functions_of(model, call))
        call, ops = asked.clone(), _Ops()
        with protected(model, written=state), torch.no_grad(), ops:
            model(*call.args, **call.kwargs)
        return cls(macs, ops.count, min(counted, default=None))


@dataclass(frozen=True, slots=True)
class Drift:
    """By what fraction the state of the machine may have moved a speed-up.

    Attributes:
        of_eager: because eager takes longer than for the baseline, or less long.
        of_distance: because the two yardsticks disagree, by this.
        of_meeting: because threads take longer to meet, or less long.
    """

    of_eager: float = 0.0
    of_distance: float = 0.0
    of_meeting: float = 0.0

    @property
    def share(self) -> float:
        """The sum of all."""
        return self.of_eager + self.of_distance + self.of_meeting


@dataclass(frozen=True, slots=True)
class Yardstick:
    """Eager, and fixed layers, beside a baseline.

    Attributes:
        is_single: the engine runs in one thread, which waits for no other.
    """

    then: Baseline
    machine: str
    versions: str
    work: EagerWork
    is_single: bool = False

    def slowdown(self, sessions: Sessions) -> Slowdown:
        """By the speed-ups over eager; on the same machine, by their mean with those over fixed layers.

        Other processes do not slow eager and an engine down equally. The two yardsticks are seldom off by as much, and
        in the same direction.
        """
        if not self._compares_with_layers(sessions):
            return between(self.then.speedups, sessions.speedups)
        return between(
            list(map(geometric_mean, zip(self.then.speedups, self.then.over_layers, strict=True))),
            list(map(geometric_mean, zip(sessions.speedups, sessions.over_layers, strict=True))),
        )

    def _compares_with_layers(self, sessions: Sessions) -> bool:
        """Whether fixed layers are a yardstick.

        Their time is that of the machine, the versions and several threads.
        """
        then = self.then
        is_same = then.versions == self.versions and then.macs == self.work.macs
        is_same_machine = then.machine == self.machine
        are_same_layers = bool(then.over_layers) and then.are_short == sessions.are_short
        return is_same_machine and is_same and are_same_layers and self._layers_are_comparable(sessions)

    def _layers_are_comparable(self, sessions: Sessions) -> bool:
        """Whether calls do the work of these layers: short ones, or such as take longer, on several threads."""
        if not sessions.over_layers:
            return False
        return sessions.are_short or (median(sessions.over_layers) < 1 and not self.is_single)

    def drift(self, sessions: Sessions) -> Drift:
        """By how much the state of the machine may have moved the speed-up; by nothing on another machine.

        Of an engine, each op may be where its threads meet.
        """
        then, of_eager, of_distance, of_meeting = self.then, 0.0, 0.0, 0.0
        if then.machine != self.machine:
            return Drift()
        eager_ms, meeting_us = median(sessions.eager_ms), median(sessions.meetings) if sessions.meetings else None
        call_ms = eager_ms / median(sessions.speedups)
        is_beside_layers = self._compares_with_layers(sessions)
        if then.eager_ms and then.macs in (None, self.work.macs):
            times = math.log(eager_ms / then.eager_ms)
            of_eager = PER_SQUARE * times**2
            if self._layers_are_comparable(sessions) and not sessions.are_short and not is_beside_layers:
                of_eager = max(of_eager, PER_LOG * abs(times))
        if is_beside_layers:
            both = ((then.speedups, sessions.speedups), (then.over_layers, sessions.over_layers))
            by_eager, by_layers = (math.log(median(before) / median(now)) for before, now in both)
            apart = abs(by_eager - by_layers)
            of_distance = min(apart / 2, PER_SQUARED_DISTANCE * apart**2)
        if then.meeting_us and meeting_us and not self.is_single:
            meetings = (self.work.ops or 0) / LAYERS / (1e3 * call_ms)  # of a microsecond each, as a fraction of a call
            # If they alone took longer than the call, its threads do not meet: an engine computes little in one thread.
            is_met = min(meeting_us, then.meeting_us) * meetings < 1
            of_meeting = abs(meeting_us - then.meeting_us) * meetings * is_met
        return Drift(of_eager, of_distance, of_meeting)

    @property
    def is_same_work(self) -> bool:
        """Whether eager does what it did, by the same versions: it takes as long, if the machine is as fast."""
        then = self.then
        is_same_code = self._is_same_code()
        return bool(is_same_code) and then.versions == self.versions and then.macs == self.work.macs

    @property
    def is_other_work(self) -> bool:
        """Whether eager does something else, or by other versions. Of neither is anything known of an old baseline."""
        return self._is_same_code() is False or self.then.versions not in ("", self.versions)

    def _is_same_code(self) -> bool | None:
        then, now = self.then, self.work
        if then.functions is None or now.functions is None or then.ops is None:
            return None
        is_alike = abs(then.functions - now.functions) <= SAME * max(then.functions, now.functions)
        return is_alike and then.ops == now.ops


class _Ops(WatchingMode):
    """Counts the ops of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _functions_of(model: Callable[..., Any], call: Example) -> int:
    """How many functions Python calls in a call of the model, in this thread."""
    count = 0

    def saw(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(saw)
    try:
        model(*call.args, **call.kwargs)
    finally:
        sys.setprofile(None)
    return count
