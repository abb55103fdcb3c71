"""The yardstick, which is eager: what it does in a call, and how far the machine's state may have moved a speed-up."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tsopt.compiler.calls.example import Example
from tsopt.compiler.protect import protected
from tsopt.compiler.watching_mode import WatchingMode
from tsopt.regression.baseline import Baseline
from tsopt.regression.machine_state import LAYERS
from tsopt.runtime.checking.inputs import InputSet
from tsopt.runtime.profiling.work import macs_of_call

# How far a speed-up moves when eager takes a multiple of the time that it took: this, times the square of the logarithm
# of the multiple. On a virtual machine whose calls take 1.4 times as long for minutes it is 1 to 3 %; where they take
# twice as long, engines and eager no longer wait for the same things.
PER_SQUARE = 0.35
CALLS = 3  # of the model that is looked at, of which the shortest counts: others fill caches
SAME = 0.02  # of the functions, by which calls of the same code differ


@dataclass(frozen=True, slots=True)
class EagerWork:
    """What a call in eager mode does.

    Attributes:
        macs: multiply-accumulates.
        ops: of torch.
        functions: that Python calls, those of C among them.
    """

    macs: int
    ops: int
    functions: int

    @classmethod
    def of(cls, model: Callable[..., Any], example: Example, state: list[torch.Tensor]) -> EagerWork:
        """Args: state: the tensors that calls write, which are put back."""
        asked = InputSet("example", example)
        with protected(model, written=state):
            call = asked.clone()
            macs = macs_of_call(model, *call.args, **call.kwargs)
        counted = []
        for _ in range(CALLS):
            call = asked.clone()
            with protected(model, written=state), torch.no_grad():
                counted.append(_functions_of(model, call))
        call, ops = asked.clone(), _Ops()
        with protected(model, written=state), torch.no_grad(), ops:
            model(*call.args, **call.kwargs)
        return cls(macs, ops.count, min(counted))


@dataclass(frozen=True, slots=True)
class Drift:
    """By which fraction the state of the machine may have moved a speed-up.

    Attributes:
        of_eager: as eager takes longer, or less, than for the baseline.
        of_meeting: as threads do to meet.
    """

    of_eager: float = 0.0
    of_meeting: float = 0.0

    @property
    def total(self) -> float:
        return self.of_eager + self.of_meeting


@dataclass(frozen=True, slots=True)
class Yardstick:
    """Eager beside a baseline.

    Attributes:
        is_single: the engine runs in one thread, which waits for no other.
    """

    then: Baseline
    machine: str
    versions: str
    work: EagerWork
    is_single: bool = False

    def drift(self, eager_ms: float, meeting_us: float | None, call_ms: float) -> Drift:
        """By how much the state of the machine may have moved the speed-up; by nothing on another machine.

        Of an engine, each op may be where its threads meet.

        Args:
            eager_ms, meeting_us: as in a baseline, of now.
            call_ms: milliseconds of a call of the engine.
        """
        then, of_eager, of_meeting = self.then, 0.0, 0.0
        if then.machine != self.machine:
            return Drift()
        if then.eager_ms and then.macs in (None, self.work.macs):
            of_eager = PER_SQUARE * math.log(eager_ms / then.eager_ms) ** 2
        if then.meeting_us and meeting_us and not self.is_single:
            of_meeting = abs(meeting_us - then.meeting_us) / LAYERS * self.work.ops / (1e3 * call_ms)
        return Drift(of_eager, of_meeting)

    @property
    def is_same_work(self) -> bool:
        """Whether eager does what it did, by the same versions: it takes as long, if the machine is as fast."""
        then, work = self.then, self.work
        if then.functions is None or then.versions != self.versions:
            return False
        is_same_code = abs(then.functions - work.functions) <= SAME * max(then.functions, work.functions)
        return is_same_code and (then.macs, then.ops) == (work.macs, work.ops)


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
    count, before = 0, sys.getprofile()

    def saw(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(saw)
    try:
        model(*call.args, **call.kwargs)
    finally:
        sys.setprofile(before)
    return count
