"""The race: candidates are compiled, verified and timed side by side with eager; the fastest correct one wins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tsopt.compiler.calls.example import Example, as_example
from tsopt.compiler.graph.program import Program
from tsopt.compiler.protect import protected
from tsopt.compiler.sizes.dims import sampled
from tsopt.compiler.sizes.specialize import sizes_in
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.checking.accuracy import Oracle
from tsopt.runtime.checking.inputs import InputSet, values_near
from tsopt.runtime.checking.judge import Judge
from tsopt.runtime.checking.made_up import why_near
from tsopt.runtime.checking.other_sizes import call_at
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
from tsopt.runtime.racing.preparation import prepare
from tsopt.runtime.racing.speedup import Timing, decimals, speedup
from tsopt.runtime.racing.timing import ratio_of_single_calls, seconds_of
from tsopt.runtime.racing.tournament import measure
from tsopt.runtime.report import EAGER, MODEL, Benchmark, Row
from tsopt.runtime.sandbox.isolated import Isolated
from tsopt.runtime.sandbox.processes import give_back_memory
from tsopt.runtime.sandbox.sandbox import Sandbox
from tsopt.runtime.thread_count import torch_threads

NEW_SIZES, FEWEST_NEW_SIZES = 16, 6  # calls that a winner for many sizes is timed with, each of other sizes
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
        with protected(model, written=captured.state.values()), mode_of(captured):
            eager_seconds = seconds_of(model, judge.inputs, device_wait(judge.inputs[0]))
        give_back_memory()  # of capture, and of eager's calls
        early = clock.but_for(FOR_THE_ROUNDS)
        rows, contenders, call_seconds = prepare(maker, judge, early, progress, eager_seconds)
        call_seconds[MODEL] = eager_seconds
        maker.limit(clock)
        limits = (min(settings.seconds, clock.left), clock.left)
        with first_interrupt_noted(settings.best_so_far) as interrupted:
            rows = _timed(
                *(model, captured, judge, rows, contenders, call_seconds, limits, progress),
                stop=interrupted,
                time_all=settings.time_all,
            )
            was_interrupted = interrupted()
        maker.limit(clock, least=TO_VERIFY)
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
            partial(_slow_at_new_sizes, model=model, captured=captured, example=example, seed=settings.seed)
            if eager_seconds < SHORT_CALL
            else lambda executable: "",
            progress,
        )
    reason = outcomes.stopped(found.rows)
    if reason and settings.warn:
        outcomes.warn(
            f"tsopt: {captured.name} runs in eager mode because no candidate could be tried: {reason}",
            outcomes.NoCandidate,
        )
    why = f"interrupted, best so far: {found.why}" if was_interrupted else found.why
    return replace(found, why=why, interrupted=was_interrupted, not_isolated_because=maker.not_isolated_because)


def _slow_at_new_sizes(
    executable: Executable, *, model: Callable[..., Any], captured: Program, example: Example, seed: int
) -> str:
    """Why an executable for many sizes is slower than eager where each call has other sizes; empty if it is not.

    The rounds repeat the sizes of the example. Engines that prepare a kernel for each size, and keep it, do so there
    only once.
    """
    signature = executable.signature
    drawn = sampled(signature.dims, sizes_in(signature, example), NEW_SIZES, seed)
    sizes = [item for item in drawn if signature.unmet(item) is None]
    if len(sizes) < FEWEST_NEW_SIZES:
        return ""
    calls = [InputSet("other sizes", call_at(signature, example, item)) for item in sizes]
    with protected(model, written=captured.state.values()), mode_of(captured):
        calls = [item for item in calls if _takes(model, item.clone())]
        if len(calls) < FEWEST_NEW_SIZES:
            return ""
        pairs = ((item.clone(), item.clone()) for item in calls)
        ratio = ratio_of_single_calls(model, executable, pairs, device_wait(example))
    return "" if ratio >= 1 else f"{ratio:.{decimals(ratio)}f}x as fast as eager when each call has new sizes"


def _takes(model: Callable[..., Any], call: Example) -> bool:
    try:
        model(*call.args, **call.kwargs)
    except Exception:  # sizes that the model takes one by one, and not together
        return False
    return True


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
) -> list[Row]:
    """Rows with what was measured.

    Args:
        call_seconds: of a call of the model and of each contender, about, by key.
        limits: how long to time, and how long at most, where that decides nothing.
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
            out=lambda name: retire(calls[name]),
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
