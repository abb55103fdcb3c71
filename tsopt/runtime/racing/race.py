"""The race: candidates compiled, checked, timed side by side with eager; the fastest that is right wins."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import torch

from tsopt.compiler.calls.example import Example, as_example
from tsopt.compiler.devices import is_on_gpu
from tsopt.compiler.graph.owned import owned
from tsopt.compiler.graph.program import Program
from tsopt.compiler.precisions import FP32
from tsopt.compiler.protect import protected
from tsopt.errors import BackendError, NoGain, TsoptError
from tsopt.runtime.backends.backend import Reopens, compile, get_backend, named, race_options
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.checking.accuracy import Oracle, is_exact
from tsopt.runtime.checking.held_out import HeldOut, Judge
from tsopt.runtime.checking.streak import unsteady
from tsopt.runtime.racing import endings
from tsopt.runtime.racing.isolation import CANDIDATE_SECONDS, Isolated, Lost, Workshop, can_isolate
from tsopt.runtime.racing.timing import UNDECIDED, Timing, cold_start, measure, seconds_of, speedup
from tsopt.runtime.report import MODEL, Benchmark, Row

EAGER = "eager"  # the name of the row of the model itself
EQUAL = 1.03  # times the fastest median: no more than that between candidates that noise cannot tell apart
STREAK = 0.05  # of the time for timing, for calls of the winner in a row on fresh inputs
SMALL = 5e-3  # seconds: a call that takes longer gains nothing from fewer threads

Progress = Callable[[str], None]
Variants = Mapping[str, Program | NoGain]


@dataclass(frozen=True)
class Race:
    """The outcome: a row for everybody, and the winner's executable (None: eager).

    winner: the key of its row.
    candidate: the winner; None: eager.
    together: why candidates ran in the caller's process, where each was meant to have one of its own.
    cached: when the rows were measured, where that was not now, and what was checked since.
    """

    rows: tuple[Row, ...]
    winner: str
    why: str
    executable: Executable | None
    candidate: Candidate | None = None
    together: str = ""
    cached: str = ""

    @property
    def row(self) -> Row:
        """The winner's."""
        return next(row for row in self.rows if row.key == self.winner)


class Contender(Protocol):
    """A candidate that has been compiled: in this process, or in one of its own."""

    notes: tuple[str, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def race(
    model: Callable[..., Any],
    captured: Program,
    programs: Variants,
    example: Example,
    *,
    candidates: Sequence[Candidate],
    threads: int | None = None,
    seconds: float = 10.0,
    seed: int = 0,
    workshop: Workshop | None = None,
    budget: float | None = None,
    progress: Progress | None = None,
    elsewhere: Sequence[HeldOut] = (),
    check_indices: bool = False,
    strict_specials: bool = False,
    share_weights: bool = False,
    warn: bool = True,
) -> Race:
    """Runs the race.

    A candidate that cannot be compiled, fails or is wrong costs itself alone and is a row with its reason.
    The winner is made once more in this process, and verified on inputs that the race did not use.

    Args:
        programs: the optimized program, and its other variants by name; NoGain where one would not be faster.
        workshop: gives each candidate a process of its own; None: all of them run in this one.
        budget: seconds for all candidates together; eager takes part whatever it costs. A candidate with a process of
            its own gets an equal share of what is left, one in this process is not begun when nothing is.
        elsewhere: other sizes that every candidate has to be right at.
        check_indices: candidates look at the indices of each call, whatever that costs.
        strict_specials: a candidate that differs from eager on NaN and infinities is wrong.
        share_weights: let the winner read the model's weights where they are.

    Raises:
        AccuracyError: the model itself fails on its example, or nothing about it can be verified.
    """
    tell = progress or (lambda text: None)
    clock = _Clock(budget)
    tell("eager")
    ask = partial(Oracle, model, example, captured, strict_specials=strict_specials)
    judge = Judge(ask(seed=seed), elsewhere)
    before = torch.get_num_threads()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        together = _open(workshop, programs)
        if not share_weights and (together or workshop is None):
            # Once for all candidates; those in other processes have read their own.
            programs = {name: owned(item) if isinstance(item, Program) else item for name, item in programs.items()}
        make = _maker(programs, threads, None if together else workshop, check_indices)
        rows, contenders = _prepare(programs, judge, candidates, make, clock, workshop, tell)
        rows = _timed(model, captured, judge, rows, contenders, (min(seconds, clock.left), clock.left), tell)
        known = {candidate.key: candidate for candidate in candidates}
        found = _choose(
            lambda: Judge(ask(seed=seed + 1), elsewhere),
            partial(unsteady, model=model, example=example, seed=seed, seconds=STREAK * seconds),
            *(programs, rows, contenders, known, threads, share_weights, tell, check_indices),
        )
    finally:
        torch.set_num_threads(before)
    reason = endings.stopped(found.rows)
    if reason and warn:
        endings.warn(f"tsopt: {captured.name} runs eager, no candidate could be tried: {reason}", endings.NoCandidate)
    return replace(found, together=together)


class _Clock:
    """What is left of a budget, in seconds."""

    def __init__(self, budget: float | None) -> None:
        self._end = math.inf if budget is None else time.monotonic() + budget

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())


def _open(workshop: Workshop | None, programs: Variants) -> str:
    """Why candidates cannot have processes of their own, although they were meant to."""
    made = {name: item for name, item in programs.items() if isinstance(item, Program)}
    reason = "" if workshop is None else can_isolate(made[FP32])
    if workshop is None or reason:
        return reason
    try:
        workshop.open(made, torch.get_num_threads())
    except BackendError as error:  # a custom op, which another process does not know; no room for the weights
        return error.why or error.what
    return ""


def _maker(
    programs: Variants, threads: int | None, workshop: Workshop | None, check_indices: bool
) -> Callable[[Candidate], Contender]:
    def apart(candidate: Candidate) -> Contender:
        assert workshop is not None
        made = workshop.contender(candidate, **race_options(candidate, threads, check_indices))
        made.compile()
        return made

    def here(candidate: Candidate) -> Contender:
        options = race_options(candidate, threads, check_indices)
        return compile(_variant(programs, candidate), candidate, share_weights=True, **options)

    return here if workshop is None else apart


def _variant(programs: Variants, candidate: Candidate) -> Program:
    """The program that a candidate runs. Raises NoGain where there is none."""
    found = programs[candidate.variant]
    if isinstance(found, NoGain):
        raise found
    return found


def _prepare(
    programs: Variants,
    judge: Judge,
    candidates: Sequence[Candidate],
    make: Callable[[Candidate], Contender],
    clock: _Clock,
    workshop: Workshop | None,
    tell: Progress,
) -> tuple[list[Row], dict[str, Contender]]:
    """A row for each candidate, and those that are right, by key."""
    rows: list[Row] = [Row(EAGER)]
    contenders: dict[str, Contender] = {}
    for number, candidate in enumerate(candidates):
        if _is_needless(candidate, candidates, contenders, programs, judge):
            continue
        if workshop is not None:
            workshop.seconds = min(CANDIDATE_SECONDS, clock.left / (len(candidates) - number))
        row, contender = _prepared(programs, judge, candidate, make, clock, tell)
        rows.append(row)
        if contender is not None:
            contenders[candidate.key] = contender
    return rows, contenders


def _prepared(
    programs: Variants,
    judge: Judge,
    candidate: Candidate,
    make: Callable[[Candidate], Contender],
    clock: _Clock,
    tell: Progress,
) -> tuple[Row, Contender | None]:
    """The row of one candidate, and what was made of it, where that is right."""
    title = candidate.title
    row = Row(title, key=candidate.key)
    if not clock.left:
        return replace(row, status="timed out", reason="nothing was left of the budget"), None
    tell(f"compile {title}")
    start = time.perf_counter()
    try:
        backend = get_backend(candidate)
    except BackendError as error:
        return replace(row, status="missing", reason=error.why or error.what), None
    try:
        program = _variant(programs, candidate)
        refused = backend.unsupported(program)
        if refused:
            reason = f"{refused[0].why}{f' ({refused[0].where})' if refused[0].where else ''}"
            return replace(row, status="unsupported", reason=reason), None
        made = make(candidate)
        took = time.perf_counter() - start
        tell(f"check {title}")
        inputs, exact = judge.inputs, is_exact(program, candidate)
        # NOTE: not in inference mode: what a candidate allocates in its first call must be of use in every mode.
        with protected(None, written=program.state.values()), torch.no_grad():
            cold = cold_start(made, inputs, device_wait(inputs[0]))
        verdict = judge.judge(made, exact=exact, precision=candidate.precision)
        if not verdict.ok and exact:
            verdict = judge.judge(made)
            made.notes += ("not bit-equal to eager, which has kernels of its own for this model",)
        made.notes += verdict.notes
    except NoGain as error:
        return replace(row, status="no gain", reason=error.what), None
    except TsoptError as error:
        ending = error.kind if isinstance(error, Lost) else endings.ending_of(error)
        return replace(row, status=ending, reason=_reason(error)), None
    except Exception as error:  # a candidate may raise anything; it costs the candidate alone
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        return replace(row, status=endings.ending_of(error), reason=reason), None
    row = replace(row, accuracy=verdict, compile_seconds=took, cold=cold)
    if not verdict.ok:
        return replace(row, status="wrong", reason=verdict.reason), None
    return replace(row, notes=made.notes), made


def _is_needless(
    candidate: Candidate,
    candidates: Sequence[Candidate],
    contenders: Mapping[str, Contender],
    programs: Variants,
    judge: Judge,
) -> bool:
    """Whether one thread needs no try: there is but one, a GPU computes, or the same backend keeps several busy."""
    plain = Candidate(candidate.backend)
    if not is_on_one_thread(candidate) or plain not in candidates:
        return False
    if is_on_gpu(judge.inputs[0]) or torch.get_num_threads() == 1 or plain.key not in contenders:
        return True
    program = _variant(programs, plain)
    try:
        with protected(None, written=program.state.values()), _mode_of(program):
            return seconds_of(contenders[plain.key], judge.inputs) > SMALL
    except Exception:  # whatever it raises now, it raises again when it is timed, and is a row then
        return True


def is_on_one_thread(candidate: Candidate) -> bool:
    """Whether that is all that is asked of a candidate: such a one is not always tried."""
    return candidate == Candidate(candidate.backend, (("threads", 1),))


def _reason(error: TsoptError) -> str:
    return "; ".join(part for part in (error.what, error.where, error.why) if part)


def _mode_of(program: Program) -> AbstractContextManager[None]:
    """Inference mode for all candidates: it is eager at its best, and costs the compiled ones nothing.

    A model that asks for it is timed in the mode of its example.
    """
    return torch.inference_mode(dict(program.signature.modes).get("inference mode", True))


def _timed(
    model: Callable[..., Any],
    captured: Program,
    judge: Judge,
    rows: list[Row],
    contenders: Mapping[str, Contender],
    limits: tuple[float, float],
    tell: Progress,
) -> list[Row]:
    """Args: limits: how long to time, and how long at most, where that decides nothing."""
    inputs, (seconds, longest) = judge.inputs, limits
    names = {row.key: row.name for row in rows}
    calls: dict[str, Callable[..., Any]] = {EAGER: model}
    calls |= {names[key]: contender for key, contender in contenders.items()}
    with protected(model, written=captured.state.values()), _mode_of(captured):
        timings = measure(
            *(calls, inputs),
            seconds=seconds,
            extra=min(seconds, longest - seconds),
            wait=device_wait(inputs[0]),
            progress=lambda text: tell(f"time: {text}"),
        )
    base = timings[EAGER]
    timed = [with_timing(row, timings.get(row.name), base) for row in rows]
    lost = {key: contender.lost for key, contender in contenders.items() if isinstance(contender, Isolated)}
    return [row if (end := lost.get(row.key)) is None else replace(row, status=end.kind) for row in timed]


def device_wait(example: Example) -> Callable[[], None]:
    """What waits for the device that an example is on: kernels on a GPU run behind the call's back."""
    return torch.cuda.synchronize if is_on_gpu(example) else lambda: None


def with_timing(row: Row, timing: Timing | None, base: Timing) -> Row:
    """A row with what was measured, and its speed-up over the baseline."""
    if timing is None:
        return row
    if timing.error:
        return replace(row, status=timing.ending, reason=f"while it was timed: {timing.error}")
    if row.key == MODEL:
        return replace(row, timing=timing)
    gain = speedup(timing, base)
    return replace(row, timing=timing, speedup=gain, reason=gain.why_undecided)


def _choose(
    fresh: Callable[[], Judge],
    streak: Callable[[Executable], str],
    programs: Variants,
    rows: list[Row],
    contenders: Mapping[str, Contender],
    candidates: Mapping[str, Candidate],
    threads: int | None,
    share_weights: bool,
    tell: Progress,
    check_indices: bool,
) -> Race:
    judge: Judge | None = None
    faster = sorted((row for row in rows if row.verdict == "faster"), key=_median)
    order = _simpler_first(faster, candidates)
    for row in order:
        tell(f"verify {row.name}")
        # Fresh inputs: what the race measured must not be all that is right.
        judge = judge or fresh()
        try:
            contender, candidate = contenders[row.key], candidates[row.key]
            # The one that was timed first: state that the timing has corrupted shows there.
            verdict = judge.judge(contender, precision=candidate.precision)
            executable = _here(contender, _variant(programs, candidate), threads, share_weights, check_indices)
            if executable is not contender and verdict.ok:
                verdict = judge.judge(executable, precision=candidate.precision)
            executable.notes = tuple(dict.fromkeys((*executable.notes, *row.notes, *verdict.notes)))
            status, failure = "wrong", streak(executable) if verdict.ok else verdict.reason
        except Exception as error:  # whatever it raises, it is out
            ending = error.kind if isinstance(error, Lost) else endings.ending_of(error)
            status, failure = (
                ending if ending in endings.LOST else "wrong",
                f"{type(error).__name__}: {str(error)[:200]}",
            )
        if not failure:
            why = f"{row.speedup} as fast as eager"
            if order[0] is not faster[0] and row is order[0]:
                why += f"; {faster[0].name} is the same within noise, and its file would be code"
            return Race(tuple(rows), row.key, why, executable, candidate)
        rows = [replace(r, status=status, reason=f"after timing: {failure}") if r is row else r for r in rows]
    return Race(tuple(rows), MODEL, _why_eager(rows), None)


def _why_eager(rows: Sequence[Row]) -> str:
    """Why nobody has won."""
    late = " in the time that there was" if any(row.status == "timed out" for row in rows) else ""
    reason = endings.stopped(tuple(rows))
    if reason:
        return f"no candidate could be tried{late}: {reason}"
    if not any(row.key != MODEL and row.status == "ok" for row in rows):
        return f"no candidate could be used{late}"
    open_ones = [row.name for row in rows if row.verdict == UNDECIDED]
    return "no candidate is faster beyond noise" + (f"; undecided: {', '.join(open_ones)}" if open_ones else "")


def _simpler_first(ranked: Sequence[Row], candidates: Mapping[str, Candidate]) -> list[Row]:
    """Where noise cannot tell a candidate whose file is code from one whose file is data, data comes first."""
    found = list(ranked)
    if not found or not candidates[found[0].key].info.code:
        return found
    best = found[0]
    for row in found[1:]:
        is_data = not candidates[row.key].info.code
        if is_data and _median(row) <= EQUAL * _median(best) and not _is_slower(row, best):
            return [row, *(other for other in found if other is not row)]
    return found


def _is_slower(row: Row, best: Row) -> bool:
    assert row.timing is not None
    assert best.timing is not None
    return speedup(best.timing, row.timing).verdict == "faster"


def _here(
    contender: Contender, program: Program, threads: int | None, share_weights: bool, check_indices: bool
) -> Executable:
    """The contender in this process."""
    if isinstance(contender, Executable):
        return contender
    isolated = cast(Isolated, contender)
    options = race_options(isolated.candidate, threads, check_indices)
    backend = get_backend(isolated.candidate, **options)
    if isinstance(backend, Reopens):
        return named(backend.reopen(program, isolated.saved()), backend, isolated.candidate)
    return compile(program, isolated.candidate, share_weights=share_weights, **options)


def _median(row: Row) -> float:
    return row.timing.p50 if row.timing is not None else float("inf")


def benchmark(
    model: Callable[..., Any],
    candidates: Mapping[str, Callable[..., Any]],
    example_input: Any,
    *,
    seconds: float = 5.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Benchmark:
    """Times a model and candidates side by side: interleaved rounds, the same warm-up, medians, intervals.

    Args:
        candidates: callables by name; each is called as the model is.
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
