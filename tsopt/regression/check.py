"""`tsopt.check`: measures an optimized model again and compares it with a baseline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from tsopt.api import names_of_options, optimize, who_races
from tsopt.compiler.calls.example import Example, as_examples
from tsopt.compiler.precision_names import FP32
from tsopt.errors import UsageError
from tsopt.regression.baseline import (
    CREATE,
    Baseline,
    check_replaceable,
    machine_of,
    read_baseline,
    versions_of,
)
from tsopt.regression.names import inputs_of, name_for, outputs_of, title_of, winner_of
from tsopt.regression.outcome import Check
from tsopt.regression.score import NAMELESS, Score, metric_for, state_of
from tsopt.regression.sessions import FEWEST, LEAST, MOST, Sessions
from tsopt.regression.slowdown import OK, SLOWER, UNDECIDED, Slowdown, paired, uncertainty
from tsopt.regression.yardstick import Drift, EagerWork, Yardstick
from tsopt.runtime.backends.candidate import ONE_THREAD, Candidate
from tsopt.runtime.bundles.members import MANIFEST
from tsopt.runtime.bundles.store import load
from tsopt.runtime.calling.optimized import Optimized
from tsopt.runtime.checking.criterion import check_metric
from tsopt.runtime.racing.environment import environment
from tsopt.runtime.rendering import three_digits
from tsopt.runtime.thread_count import check_threads, torch_threads

# Sessions of a baseline, with which later ones are compared many times: more while they scatter, up to so many; fewer
# if the time is over.
FEWEST_OF_A_BASELINE, MOST_OF_A_BASELINE = 20, 40
PRECISE = 0.25  # of the limit: how far the mean of a baseline may be off
MAX_DROP = 0.005
FOR_A_CANDIDATE = {"seed", "threads"}  # the options of `optimize` that have a meaning beside `candidate`


def check(
    model: Callable[..., Any],
    example_input: Any,
    baseline: str | Path | Baseline,
    *,
    candidate: Callable[..., Any] | None = None,
    max_slowdown: float = 0.05,
    metric: Callable[[Any], Any] | str | None = None,
    max_drop: float | None = None,
    compare_seconds: float = 60.0,
    update: bool = False,
    trust: bool = False,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Check:
    """Compares the speed, work and accuracy of an optimized model with a baseline. Speed is measured again.

    Speed is compared as a speed-up over eager, so that a baseline from another machine can be compared with; on the
    same machine, also over layers that are always the same. Eager does not show that the model itself has become
    larger, so its multiply-accumulates are compared as well. Sessions of two seconds, or of one for calls of less than
    a tenth of a millisecond, are added until the slowdown is decided or the time is over.

    Args:
        baseline: what `update` wrote; the JSON of a report; or the bundle of the earlier model, which is timed in the
            same moments.
        candidate: what is compared with eager; by default, what `optimize` returns.
        max_slowdown: the largest fraction by which a call may take longer, or have more multiply-accumulates.
        metric: more is better. The name of a built-in one, or a function of what is called like the model; by default,
            the agreement of the outputs with eager's: their cosine, or less where they are larger or smaller.
        max_drop: how far the metric may be below that of the baseline, or of the model where the baseline has none;
            0.005 by default.
        compare_seconds: time limit for the sessions, of which there are three at least; `seconds` is that of the
            race, as in `optimize`.
        update: write the baseline instead of comparing with it.
        trust: execute code from the bundle, if it contains code.
        progress: called with the name of each step.
        options: options of `optimize`.

    Raises:
        UsageError: the baseline cannot be read, is that of other inputs, has a score by another metric, or an option is
            invalid.
        BundleError: the bundle cannot be opened, or the baseline cannot be written.
        BackendError: what is compared fails on the example.
    """
    tell, examples = progress or (lambda text: None), as_examples(example_input)
    example, seed = examples[0], options.get("seed", 0)
    _check_options(max_slowdown, metric, max_drop, compare_seconds, candidate, options)
    if update and not isinstance(baseline, Baseline):
        check_replaceable(baseline)
    then, bundle = (None, None) if update else _opened(baseline, trust)
    if then is not None and then.inputs not in ("", inputs_of(example)):
        raise UsageError(
            "the baseline was measured with other inputs",
            why=f"it was measured with {then.inputs}; this example is {inputs_of(example)}",
            fix="pass the same example, or measure a new baseline (--update, update=True)",
        )
    metric = metric_for(metric, then)
    fast: Any = candidate
    if fast is None:
        judged: dict[str, Any] = {"metric": metric, "max_drop": max_drop} if _may_lose(example, options) else {}
        fast = optimize(model, example_input, progress=progress, **judged, **options)
    eager = getattr(fast, "model", model) if candidate is None else model
    tell("accuracy")
    state = list(fast.program.state.values()) if isinstance(fast, Optimized) else []
    score = Score(metric, eager, example, seed, state)
    scores = [score.of(fast)]
    of_eager = score.of(eager) if then is not None and then.score is None else None
    others = ""
    if bundle is not None:
        opened = bundle()
        written = [*state, *state_of(opened)]
        were, are = (outputs_of(called, eager, example, written) for called in (opened, eager))
        others = "" if were == are else f"the outputs of the bundle are {were}, and those of the model are {are}"
        scores.append(score.of(eager if others else opened))
    tell("work")
    work = EagerWork.of(eager, example, state, only_macs=bundle is not None)
    with torch_threads(options.get("threads")):
        sessions, where = Sessions(eager, example, fast, bundle, seed), environment()
        machine, versions = machine_of(where), versions_of(where)
        yardstick = None if then is None else Yardstick(then, machine, versions, work, is_single=_is_single(fast))
        slowdown, drift = _run(sessions, yardstick, max_slowdown, compare_seconds, tell, update=update)
    now = Baseline(
        model=name_for(model, fast),
        winner=title_of(fast),
        speedups=tuple(sessions.speedups),
        over_layers=tuple(sessions.over_layers),
        are_short=sessions.are_short,
        inputs=inputs_of(example),
        eager_ms=median(sessions.eager_ms),
        meeting_us=median(sessions.meetings) if sessions.meetings else None,
        macs=work.macs,
        ops=work.ops,
        functions=work.functions,
        metric=score.name,
        score=scores[0],
        machine=machine,
        versions=versions,
    )
    limits: dict[str, Any] = {"max_slowdown": max_slowdown, "max_drop": MAX_DROP if max_drop is None else max_drop}
    stopped = _stopped(fast)
    if update:
        if stopped:
            raise UsageError("no baseline was written, because no candidate could be tried", why=stopped)
        replaced: tuple[str, ...] = ()
        if not isinstance(baseline, Baseline):
            replaced = _replaced(Path(baseline), now, max_slowdown)
            now.save(baseline)
        known = (*replaced, *_uncertain(now, max_slowdown))
        return Check(now=now, baseline=None, slowdown=None, speed=OK, remarks=known, **limits)
    assert slowdown is not None
    remarks: list[str] = []
    if then is None or yardstick is None:
        then = Baseline(
            model=now.model,
            winner=winner_of(Path(str(baseline))),
            speedups=tuple(sessions.before),
            metric=score.name,
            score=scores[1],
            machine=now.machine,
        )
        speed = slowdown.verdict(max_slowdown)
        remarks += [f"{others}: accuracy is compared with that of eager"] if others else []
    else:
        speed, said = _judged(now, yardstick, slowdown, max_slowdown, drift)
        remarks += said
    if of_eager is not None:
        then = replace(then, metric=score.name, score=of_eager)
        remarks.append("the baseline has no score: accuracy is compared with that of eager")
    if then.winner != now.winner:
        remarks.append(f"{now.winner} runs now; in the baseline it was {then.winner}")
    if slowdown.verdict(max_slowdown) == UNDECIDED:
        remarks.append(
            f"the {len(now.speedups)} sessions differ too much to decide; give them more time (compare_seconds), or a"
            " quiet machine"
        )
    return Check(
        now=now, baseline=then, slowdown=slowdown, speed=speed, remarks=tuple(remarks), stopped=stopped, **limits
    )


def _run(
    sessions: Sessions,
    yardstick: Yardstick | None,
    max_slowdown: float,
    compare_seconds: float,
    tell: Callable[[str], None],
    *,
    update: bool,
) -> tuple[Slowdown | None, Drift]:
    """Adds sessions until the slowdown is decided or the time is over; for an update, until they tell enough.

    Returns:
        The slowdown, and by how much the state of the machine may have moved it.
    """
    end, slowdown, drift = time.monotonic() + compare_seconds, None, Drift()
    while not _is_enough(sessions, slowdown, max_slowdown, drift, end, update=update):
        tell(f"session {len(sessions) + 1}" + ("" if slowdown is None else f", {slowdown}"))
        sessions.add()
        if yardstick is not None:
            slowdown = yardstick.slowdown(sessions)
            drift = yardstick.drift(sessions)
        elif not update:
            slowdown = paired(sessions.ratios)
    return slowdown, drift


def _replaced(place: Path, now: Baseline, max_slowdown: float) -> tuple[str, ...]:
    """What is to be said of a baseline that this one replaces; nothing if there is none that can be read."""
    if not place.is_file() or not place.stat().st_size:
        return ()
    try:
        then = read_baseline(place)
    except UsageError:  # of another version of tsopt
        return ()
    before, after = median(then.speedups), median(now.speedups)
    said = f"it replaces a baseline of {before:.2f}x with {then.winner}"
    if before > (1 + max_slowdown) * after:
        said += "; later checks will accept slower calls; measure again if the machine was busy"
    return (said,)


def _uncertain(now: Baseline, max_slowdown: float) -> tuple[str, ...]:
    """What is to be said of a baseline whose sessions differ so much that it tells little."""
    off = uncertainty(now.speedups)
    if off <= max_slowdown:
        return ()
    said = f"{off:.0%}" if off < 1 else "100% or more"
    return (
        f"its {len(now.speedups)} sessions differ so much that their mean may be off by {said}: most checks will be "
        "undecided; measure it again on a quieter machine, or for longer (compare_seconds)",
    )


def _check_options(
    max_slowdown: float,
    metric: Callable[[Any], Any] | str | None,
    max_drop: float | None,
    compare_seconds: float,
    candidate: Callable[..., Any] | None,
    options: dict[str, Any],
) -> None:
    check_metric(metric, max_drop)
    if not 0 <= max_slowdown < math.inf:
        raise UsageError(
            f"max_slowdown must be 0 or more, got {max_slowdown}", fix="pass a fraction, e.g. 0.05 for 5 %"
        )
    if not 0 < compare_seconds < math.inf:
        raise UsageError(
            f"compare_seconds must be positive and finite, got {compare_seconds}", fix="pass a number greater than 0"
        )
    unknown = sorted(set(options) - names_of_options())
    if unknown:
        raise UsageError(
            f"unknown option {unknown[0]!r}",
            fix="use those of tsopt.check, such as max_slowdown, and of tsopt.optimize",
        )
    useless = sorted(set(options) - FOR_A_CANDIDATE) if candidate is not None else []
    if useless:
        raise UsageError(
            f"{', '.join(useless)} cannot be combined with candidate",
            why="they are options of optimize, which is not called",
            fix="leave out one of them",
        )
    check_threads(options.get("threads"))


def _may_lose(example: Example, options: dict[str, Any]) -> bool:
    """Whether candidates in lower precisions race, which `optimize` judges by a metric."""
    asked = {"backends": None, "precision": None, "level": 2} | options
    kept = bool(asked.get("keep_float"))
    racing = who_races(example, asked["backends"], asked["precision"], asked["level"], keep_float=kept)
    return any(candidate.precision != FP32 for candidate in racing)


def _opened(
    baseline: str | Path | Baseline, trust: bool
) -> tuple[Baseline | None, Callable[[], Callable[..., Any]] | None]:
    """The numbers of a baseline, or what opens its bundle."""
    if isinstance(baseline, Baseline):
        return baseline, None
    place = Path(baseline)
    try:
        if not place.is_dir():
            return read_baseline(place), None
    except ValueError:  # a name that no file can have
        return read_baseline(place), None
    if not (place / MANIFEST).is_file():
        raise UsageError("the baseline is a directory, and not a bundle", where=str(place), fix=CREATE)
    load(place, trust=trust)
    return None, partial(load, place, trust=trust)


def _is_enough(
    sessions: Sessions, slowdown: Slowdown | None, max_slowdown: float, drift: Drift, end: float, *, update: bool
) -> bool:
    """Whether the slowdown is decided, or no time is left for another session."""
    count = len(sessions)
    if count >= LEAST and time.monotonic() + sessions.longest > end:
        return True
    if update:
        is_precise = count >= FEWEST_OF_A_BASELINE and uncertainty(sessions.speedups) <= PRECISE * max_slowdown
        return is_precise or count >= MOST_OF_A_BASELINE
    verdict = UNDECIDED if slowdown is None else slowdown.verdict(max_slowdown, drift.share)
    return count >= MOST or (count >= FEWEST and verdict != UNDECIDED)


def _judged(
    now: Baseline, yardstick: Yardstick, slowdown: Slowdown, limit: float, drift: Drift
) -> tuple[str, list[str]]:
    """The verdict on the speed by a yardstick, and what a reader should know of the yardstick."""
    then, speed, remarks = yardstick.then, slowdown.verdict(limit, drift.share), []
    is_same = then.machine == now.machine
    if speed == UNDECIDED and slowdown.verdict(limit) != UNDECIDED:
        remarks.append(_of_another_state(now, then, drift))
    if is_same and now.eager_ms and then.eager_ms:
        took, takes = then.eager_ms / median(then.speedups), now.eager_ms / median(now.speedups)
        takes_longer = takes > (1 + limit) * took
        if speed == SLOWER and not takes_longer and not yardstick.is_same_work:
            speed = UNDECIDED
            remarks.append(f"{_calls(now, then)}: eager may have become faster, and not the optimized model slower")
        elif speed == OK and takes_longer and yardstick.is_other_work and then.macs in (None, now.macs):
            speed = UNDECIDED
            remarks.append(f"{_calls(now, then)}: eager may have become slower, and the optimized model with it")
    if not then.machine:
        remarks.append("the baseline does not say on which machine it was measured")
    elif not is_same:
        remarks.append(f"the baseline was measured on another machine ({then.machine}); speed-ups carry over roughly")
    if then.versions not in ("", now.versions):
        remarks.append(f"the baseline was measured with other versions: {then.versions}")
    if len(then.speedups) == 1:
        remarks.append("the baseline is a single session, so its own scatter is not known")
    if then.model != now.model:
        remarks.append(f"the baseline is of a model with another name, {then.model}")
    if then.score is not None and then.metric in NAMELESS:
        remarks.append("the baseline has a metric without a name, so it may be another one; use a function with a name")
    if then.macs is None:
        remarks.append("multiply-accumulates are not compared: the baseline does not have them")
    return speed, remarks


def _of_another_state(now: Baseline, then: Baseline, drift: Drift) -> str:
    """That the machine may be why a slowdown is undecided, by so large a fraction."""
    takes, took = (three_digits(item.meeting_us or 0.0) for item in (now, then))
    said = f"threads take {takes} us to meet, and took {took} us for the baseline"
    if drift.of_eager > drift.of_meeting:
        said = _calls(now, then)
    if drift.of_distance > max(drift.of_eager, drift.of_meeting):
        said = "the speed-up over eager has changed, and that over fixed layers has not done so by as much"
    return (
        f"{said}: this machine is in a different state than for the baseline, which may account for "
        f"{min(drift.share, 1.0):.0%}; check again later, or against a bundle, which is timed in the same moments"
    )


def _calls(now: Baseline, then: Baseline) -> str:
    takes, took = (three_digits(item.eager_ms or 0.0) for item in (now, then))
    return f"a call in eager mode takes {takes} ms, and took {took} ms for the baseline"


def _is_single(fast: Any) -> bool:
    """Whether what is compared with eager runs in one thread, or is eager itself."""
    if not isinstance(fast, Optimized):
        return False
    return fast.executable is None or ONE_THREAD[0] in Candidate.parse(fast.report.winner_key).options


def _stopped(fast: Any) -> str:
    return str(getattr(getattr(fast, "report", None), "stopped", ""))
