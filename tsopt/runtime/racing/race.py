"""The race: candidates are compiled, verified and timed side by side with eager; the fastest correct one wins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from tsopt.compiler.calls.example import Example, as_example
from tsopt.compiler.devices import is_on_gpu
from tsopt.compiler.graph.program import Program
from tsopt.compiler.precision_names import FP32
from tsopt.compiler.protect import protected
from tsopt.runtime.checking.accuracy import Oracle
from tsopt.runtime.checking.inputs import values_near
from tsopt.runtime.checking.judge import Judge
from tsopt.runtime.checking.made_up import why_near
from tsopt.runtime.checking.repeated_calls import unsteady
from tsopt.runtime.racing import outcomes
from tsopt.runtime.racing.choice import Race, choose
from tsopt.runtime.racing.contenders import (
    Clock,
    Contender,
    Maker,
    Progress,
    RaceSettings,
    Variants,
    device_wait,
    mode_of,
    retire,
)
from tsopt.runtime.racing.interrupt import first_interrupt_noted
from tsopt.runtime.racing.loops import timed_in_loops
from tsopt.runtime.racing.new_sizes import calls_of_new_sizes
from tsopt.runtime.racing.preparation import prepare
from tsopt.runtime.racing.row import EAGER, MODEL, Row
from tsopt.runtime.racing.speedup import Timing, speedup
from tsopt.runtime.racing.timing import seconds_of
from tsopt.runtime.racing.tournament import measure
from tsopt.runtime.report import Benchmark
from tsopt.runtime.sandbox.isolated import Isolated
from tsopt.runtime.sandbox.processes import give_back_memory
from tsopt.runtime.sandbox.sandbox import Sandbox
from tsopt.runtime.thread_count import torch_threads

SHORT_CALL = 0.05  # seconds: next to longer calls, what an engine does for a new size is nothing
FOR_THE_ROUNDS = 1 / 3  # of the budget: what is compiled and not timed is of no use
TO_VERIFY = 10.0  # seconds for an answer of the winner, even if the budget is used up: it has cost all of that
STREAK = 0.05  # of the time for timing, for calls of the winner in a row on fresh inputs


def race(
    model: Callable[..., Any],
    captured: Program,
    programs: Variants,
    example: Example,
    settings: RaceSettings,
    *,
    sandbox: Sandbox | None = None,
    progress: Progress | None = None,
) -> Race:
    """Runs the race.

    A candidate that cannot be compiled, fails or is wrong is a row with a reason and does not stop the race.
    The winner is opened in this process, or compiled again, and verified on inputs that the race did not use.

    Args:
        programs: the optimized program, and its other variants by name; NoGain where one would not be faster.
        sandbox: gives each candidate a process of its own; None: all of them run in this one.

    Raises:
        AccuracyError: the model itself fails on its example, or nothing about it can be verified.
    """
    progress = progress or (lambda text: None)
    clock = Clock(settings.budget)
    progress("eager")
    ask = partial(Oracle, model, example, captured, strict_specials=settings.strict_specials)
    judge = Judge(ask(seed=settings.seed), settings.held_out, settings.criterion)

    def last_judge(few: bool) -> Judge:
        if settings.again:  # a race with other inputs has been before this one
            return replace(judge, is_last=True)
        # Fresh inputs: what the race measured must not be all that is right.
        oracle = ask(seed=settings.seed + 1, few=few, known=judge.oracle)
        return Judge(oracle, () if few else settings.held_out, settings.criterion, is_last=True)

    with torch_threads(settings.threads):
        maker = Maker(programs, settings, sandbox)
        eager_seconds = _eager_seconds(model, captured, judge, settings.threads)
        give_back_memory()  # of capture, and of eager's calls
        early = clock.but_for(FOR_THE_ROUNDS)
        rows, contenders, call_seconds = prepare(maker, judge, early, progress, eager_seconds)
        call_seconds[MODEL] = eager_seconds
        is_short = eager_seconds < SHORT_CALL
        signature = cast(Program, programs[FP32]).signature
        known = [item.sizes for item in settings.held_out]
        new = calls_of_new_sizes(signature, example, known, settings.seed) if is_short else []
        # Of torch, that engines with threads of their own may meet.
        has_threads = is_short and not is_on_gpu(example) and torch.get_num_threads() > 1
        other_loops = bool(new) or has_threads
        maker.limit(clock)
        limits = (min(settings.seconds, clock.left), clock.left)
        with first_interrupt_noted(settings.best_so_far) as interrupted:
            rows = _timed(
                *(model, captured, judge, rows, contenders, call_seconds, limits, progress),
                stop=interrupted,
                time_all=settings.time_all,
                keep_all=other_loops,
            )
            was_interrupted = interrupted()
        maker.limit(clock, least=TO_VERIFY)
        if other_loops:  # whatever is left of the budget: nobody wins who loses there
            _retire([row for row in rows if row.verdict not in ("faster", "same")], contenders)
            between, wait = judge.inputs if has_threads else (), device_wait(example)
            with protected(model, written=captured.state.values()), mode_of(captured):
                rows = timed_in_loops(model, between, new, rows, contenders, wait, progress)
            _retire([row for row in rows if not row.is_faster], contenders)
        found = choose(
            maker,
            rows,
            contenders,
            last_judge,
            partial(
                unsteady,
                model=model,
                example=example,
                seed=settings.seed,
                seconds=STREAK * settings.seconds,
                draw=values_near if why_near(captured) else None,
            ),
            progress,
            takes_long=judge.takes_long,
        )
    reason = outcomes.stopped(found.rows)
    if reason and settings.warn:
        outcomes.warn(
            f"tsopt: {captured.name} runs in eager mode because no candidate could be tried: {reason}",
            outcomes.NoCandidate,
        )
    why = f"interrupted, best so far: {found.why}" if was_interrupted else found.why
    return replace(found, why=why, interrupted=was_interrupted, not_isolated_because=maker.not_isolated_because)


def _eager_seconds(model: Callable[..., Any], captured: Program, judge: Judge, threads: int | None) -> float:
    """About how long a call of the model takes. Where that is long, eager's answers have told it already."""
    is_known = threads is None and not is_on_gpu(judge.inputs[0])  # which answers before it is done
    if judge.takes_long and is_known:
        return judge.oracle.eager.call_seconds
    with protected(model, written=captured.state.values()), mode_of(captured):
        return seconds_of(model, judge.inputs, device_wait(judge.inputs[0]))


def _retire(rows: Sequence[Row], contenders: Mapping[str, Contender]) -> None:
    for row in rows:
        if row.key in contenders:
            retire(contenders[row.key])


def _timed(
    model: Callable[..., Any],
    captured: Program,
    judge: Judge,
    rows: list[Row],
    contenders: Mapping[str, Contender],
    call_seconds: Mapping[str, float],
    limits: tuple[float, float],
    progress: Progress,
    *,
    stop: Callable[[], bool],
    time_all: bool,
    keep_all: bool,
) -> list[Row]:
    """Rows with what was measured.

    Args:
        call_seconds: of a call of the model and of each contender, about, by key.
        limits: how long to time, and how long at most, where that decides nothing.
        keep_all: contenders that leave the rounds are needed once more.
    """
    inputs, (seconds, longest) = judge.inputs, limits
    names = {row.key: row.name for row in rows}
    calls: dict[str, Callable[..., Any]] = {EAGER: model}
    calls |= {names[key]: contender for key, contender in contenders.items()}
    with protected(model, written=captured.state.values()), mode_of(captured):
        timings = measure(
            *(calls, inputs),
            seconds=seconds,
            extra=min(seconds, longest - seconds),
            wait=device_wait(inputs[0]),
            progress=lambda text: progress(f"time: {text}"),
            known={row.name: call_seconds[row.key] for row in rows if row.name in calls},
            until_decided=not time_all,
            out=(lambda name: None) if keep_all else (lambda name: retire(calls[name])),
            stop=stop,
        )
    base = timings[EAGER]
    timed = [with_timing(row, timings.get(row.name), base) for row in rows]
    lost = {key: contender.lost for key, contender in contenders.items() if isinstance(contender, Isolated)}
    return [row if (end := lost.get(row.key)) is None else replace(row, status=end.kind) for row in timed]


def with_timing(row: Row, timing: Timing | None, base: Timing) -> Row:
    """A row with what was measured, and its speed-up over the baseline."""
    if timing is None:
        return row
    if timing.error:
        return replace(row, status=timing.ending, reason=f"during timing: {timing.error}")
    if row.key == MODEL:
        return replace(row, timing=timing)
    gain = speedup(timing, base)
    return replace(row, timing=timing, speedup=gain, reason=gain.why_undecided)


def benchmark(
    model: Callable[..., Any],
    candidates: Mapping[str, Callable[..., Any]],
    example_input: Any,
    *,
    seconds: float = 5.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Benchmark:
    """Times a model and candidates side by side: interleaved rounds, equal warm-up, medians with intervals.

    Args:
        candidates: callables by name; each is called like the model.
        seconds: approximate time to spend.
        seed: seed of the generated inputs.
        progress: called with the name of each step.
    """
    example = as_example(example_input)
    # NOTE: no program here to say which parameters the model writes, so all of them are kept safe.
    written = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    inputs = Judge(Oracle(model, example, None, seed=seed, state=written)).inputs
    with protected(model, written=written), torch.inference_mode():
        timings = measure(
            {EAGER: model, **candidates}, inputs, seconds=seconds, wait=device_wait(example), progress=progress
        )
    rows = [Row(name, key=MODEL if name == EAGER else name) for name in timings]
    return Benchmark(tuple(with_timing(row, timings[row.name], timings[EAGER]) for row in rows))
