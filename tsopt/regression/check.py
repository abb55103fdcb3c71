"""`tsopt.check`: measures an optimized model anew, and compares it with a baseline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tsopt.api import optimize
from tsopt.compiler.calls.example import Example, as_example
from tsopt.compiler.graph.values import flat_inputs
from tsopt.compiler.protect import protected
from tsopt.errors import UsageError
from tsopt.regression.baseline import CREATE, Baseline, read_baseline
from tsopt.regression.outcome import Check
from tsopt.regression.sessions import FEWEST, LEAST, MOST, Sessions
from tsopt.regression.slowdown import OK, SLOWER, UNDECIDED, Slowdown, between, paired
from tsopt.runtime.bundles.members import MANIFEST
from tsopt.runtime.bundles.store import load
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.calling.optimized import Optimized
from tsopt.runtime.checking.criterion import COSINE, check_metric, value_of
from tsopt.runtime.checking.inputs import OF_THE_SAME_SIZE, input_sets
from tsopt.runtime.profiling.work import OpWork
from tsopt.runtime.racing.environment import environment

SESSIONS_OF_A_BASELINE = 10
OTHER_STATE = 1.3  # times as long as eager took on the same machine: the machine is in another state


def check(
    model: Callable[..., Any],
    example_input: Any,
    baseline: str | Path | Baseline,
    *,
    candidate: Callable[..., Any] | None = None,
    max_slowdown: float = 0.05,
    metric: Callable[[Any], Any] | str | None = None,
    max_drop: float = 0.005,
    compare_seconds: float = 60.0,
    update: bool = False,
    trust: bool = False,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Check:
    """Compares the optimized form of a model with a baseline: its speed, measured anew, and its accuracy.

    Speed is compared as a speed-up over eager, so that a baseline from another machine says something here. Because
    eager cannot show that the model itself has become larger, multiply-accumulates that it has gained count as time.
    Sessions of two seconds are added until the slowdown is decided or the time is over.

    Args:
        baseline: what `update` wrote; the JSON of a report; or the bundle of the earlier model, which is timed in the
            same moments and is the safest of the three.
        candidate: what is compared with eager; by default, what `optimize` returns.
        max_slowdown: the largest fraction by which a call may take longer.
        metric: more is better. The name of a built-in one, or a function of what is called like the model; the cosine
            of the outputs with eager's by default.
        max_drop: how far the metric may be below that of the baseline.
        compare_seconds: time limit for the sessions, of which there are three at least; `seconds` is that of the
            race, as in `optimize`.
        update: write the baseline instead of comparing with it.
        trust: execute code from the bundle, if it contains code.
        progress: called with the name of each step.
        options: options of `optimize`.

    Raises:
        UsageError: the baseline cannot be read, or an option is invalid.
        BundleError: the bundle cannot be opened, or the baseline cannot be written.
        BackendError: what is compared fails on the example.
    """
    check_metric(metric, max_drop)
    _check_numbers(max_slowdown, compare_seconds)
    tell = progress or (lambda text: None)
    example, seed = as_example(example_input), options.get("seed", 0)
    then, bundle = (None, None) if update else _opened(baseline, trust)
    fast = candidate
    if fast is None:
        lossy: dict[str, Any] = {"metric": metric, "max_drop": max_drop} if options.get("precision") else {}
        fast = optimize(model, example, progress=progress, **lossy, **options)
    sessions = Sessions(model, example, fast, bundle, seed)
    macs = _macs(fast, example)
    work = macs / then.macs if macs and then is not None and then.macs else 1.0
    end, slowdown = time.monotonic() + compare_seconds, None
    with _threads(options.get("threads")):
        while not _is_enough(sessions, slowdown, max_slowdown, end, update=update):
            tell(f"session {len(sessions) + 1}" + ("" if slowdown is None else f", {slowdown}"))
            sessions.add()
            if not update:
                slowdown = paired(sessions.ratios) if then is None else between(then.speedups, sessions.speedups, work)
    tell("accuracy")
    score = _Score(metric, model, example, seed)
    now = Baseline(
        model=_name(model, fast),
        winner=_title(fast),
        speedups=tuple(sessions.speedups),
        eager_ms=median(sessions.eager_ms),
        macs=macs,
        metric=score.name,
        score=score.of(fast),
        machine=str(environment()),
    )
    limits: dict[str, Any] = {"max_slowdown": max_slowdown, "max_drop": max_drop}
    if update:
        if not isinstance(baseline, Baseline):
            now.save(baseline)
        return Check(now=now, baseline=None, slowdown=None, speed=OK, **limits)
    if then is None and bundle is not None:
        found = (now.model, _title(bundle), tuple(sessions.before), now.eager_ms, None, score.name, score.of(bundle))
        then = Baseline(*found, machine=now.machine)
    assert then is not None
    assert slowdown is not None
    speed, remarks = _judged(now, then, slowdown, max_slowdown, paired=bundle is not None)
    return Check(now=now, baseline=then, slowdown=slowdown, speed=speed, remarks=remarks, **limits)


def _check_numbers(max_slowdown: float, compare_seconds: float) -> None:
    if not 0 <= max_slowdown < math.inf:
        raise UsageError(
            f"max_slowdown must be 0 or more, got {max_slowdown}", fix="pass a fraction, e.g. 0.05 for 5 %"
        )
    if not 0 < compare_seconds < math.inf:
        raise UsageError(
            f"compare_seconds must be positive and finite, got {compare_seconds}", fix="pass a number greater than 0"
        )


def _opened(baseline: str | Path | Baseline, trust: bool) -> tuple[Baseline | None, Executable | None]:
    """The numbers of a baseline, or its bundle."""
    if isinstance(baseline, Baseline):
        return baseline, None
    place = Path(baseline)
    if not place.is_dir():
        return read_baseline(place), None
    if not (place / MANIFEST).is_file():
        raise UsageError("the baseline is a directory, and not a bundle", where=str(place), fix=CREATE)
    return None, load(place, trust=trust)


def _is_enough(sessions: Sessions, slowdown: Slowdown | None, max_slowdown: float, end: float, *, update: bool) -> bool:
    """Whether more sessions would say nothing, or there is no time for one more."""
    count = len(sessions)
    if count >= LEAST and time.monotonic() + sessions.longest > end:
        return True
    if slowdown is not None and count >= FEWEST and slowdown.verdict(max_slowdown) != UNDECIDED:
        return True
    return count >= (SESSIONS_OF_A_BASELINE if update else MOST)


def _judged(
    now: Baseline, then: Baseline, slowdown: Slowdown, limit: float, *, paired: bool
) -> tuple[str, tuple[str, ...]]:
    """The verdict on the speed, and what a reader should know beside it."""
    speed, remarks = slowdown.verdict(limit), []
    same_machine = then.machine == now.machine
    if speed == SLOWER and same_machine and not paired and then.eager_ms and now.eager_ms:
        times = now.eager_ms / then.eager_ms
        if not 1 / OTHER_STATE < times < OTHER_STATE and then.macs == now.macs:
            speed = UNDECIDED
            remarks.append(
                f"a call in eager mode takes {now.eager_ms:.3g} ms, and took {then.eager_ms:.3g} ms for the baseline:"
                " this machine is in another state than then. Check again later, or against a bundle, which is timed in"
                " the same moments"
            )
    if speed == UNDECIDED and not remarks:
        remarks.append(
            f"the {len(now.speedups)} sessions differ too much to decide; give them more time (compare_seconds), or a"
            " quiet machine"
        )
    if then.winner and then.winner != now.winner:
        remarks.append(f"{now.winner} runs now; in the baseline it was {then.winner}")
    if then.machine and not same_machine:
        remarks.append(f"the baseline is from another machine or other versions: {then.machine}")
    if then.metric and then.metric != now.metric:
        remarks.append(f"accuracy is not compared: the metric of the baseline is {then.metric}")
    return speed, tuple(remarks)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        if count is not None:
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


class _Score:
    """The metric of what is called like the model."""

    def __init__(self, metric: Callable[[Any], Any] | str | None, model: Any, example: Example, seed: int) -> None:
        self._metric, self._model = metric or COSINE, model
        self.name = self._metric if isinstance(self._metric, str) else getattr(self._metric, "__name__", "metric")
        kinds = ("example", *OF_THE_SAME_SIZE)
        self._data = [item.example for item in input_sets(example, seed) if item.kind.startswith(kinds)]

    def of(self, called: Callable[..., Any]) -> float:
        with protected(self._model):
            return value_of(self._metric, self._model, called, self._data)


def _macs(fast: Callable[..., Any], example: Example) -> int | None:
    if not isinstance(fast, Optimized):
        return None
    with protected(fast.model, written=fast.program.state.values()):
        work = OpWork(fast.program, [value.clone() for value in flat_inputs(fast.program, example)])
    return work.of(list(work)).macs


def _name(model: Callable[..., Any], fast: Callable[..., Any]) -> str:
    report = getattr(fast, "report", None)
    return str(getattr(report, "model", None) or getattr(model, "__name__", type(model).__name__))


def _title(called: Callable[..., Any]) -> str:
    """Who runs: the title of a race's winner, the backend of a bundle, or the name of something of the user's own."""
    report = getattr(called, "report", None)
    found = getattr(report, "winner", None) or getattr(called, "backend", None)
    return str(found or getattr(called, "__name__", type(called).__name__))
