"""The race: candidates compiled, checked, timed side by side with eager; the fastest that is right wins."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol, cast

import torch

from tsopt.compiler.example import Example, as_example
from tsopt.compiler.owned import owned
from tsopt.compiler.program import Program
from tsopt.compiler.protect import protected
from tsopt.compiler.structure import flatten
from tsopt.errors import BackendError, NoGain, TsoptError, UsageError
from tsopt.runtime import endings
from tsopt.runtime.accuracy import Oracle, is_exact
from tsopt.runtime.backend import (
    BACKENDS,
    CODE,
    PRECISIONS,
    Reopens,
    can_compute_in,
    compile,
    get_backend,
    precision_of,
    race_options,
    split_spec,
)
from tsopt.runtime.executable import FULL, Executable
from tsopt.runtime.held_out import HeldOut, Judge
from tsopt.runtime.isolation import CANDIDATE_SECONDS, Isolated, Lost, Workshop, can_isolate
from tsopt.runtime.report import Benchmark, Row
from tsopt.runtime.streak import unsteady
from tsopt.runtime.timing import UNDECIDED, Timing, cold_start, measure, seconds_of, speedup

EAGER = "eager"
AUTO = "auto"  # every precision
PASSES = "eager + passes"
TITLES = {
    "eager": PASSES,
    "onednn": "torch + oneDNN",
    "torchscript": "TorchScript",
    "onnxruntime": "ONNX Runtime",
    "inductor": "Inductor",
    "openvino": "OpenVINO",
    "cudagraph": "CUDA graph",
    "null": "null",
}
STANDARD_BACKENDS = ("eager", "onednn", "torchscript", "onnxruntime", "onnxruntime?threads=1")
EXTRA_BACKENDS = ("openvino",)  # they race where they are installed
ON_GPU = ("cudagraph",)  # for models on a GPU
ALL_ON_GPU = (*ON_GPU, "inductor?cuda_graph=true")
ALL_BACKENDS = tuple(dict.fromkeys((*STANDARD_BACKENDS, *(n for n in BACKENDS if n not in ("null", *ON_GPU)))))
EQUAL = 1.03  # times the fastest median: no more than that between candidates that noise cannot tell apart
STREAK = 0.05  # of the time for timing, for calls of the winner in a row on fresh inputs
SMALL = 5e-3  # seconds: a call that takes longer gains nothing from fewer threads

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Race:
    """The outcome: a row for everybody, and the winner's executable (None: eager).

    backend: the winner's, as it was asked for.
    together: why candidates ran in the caller's process, where each was meant to have one of its own.
    cached: when the rows were measured, where that was not now, and what was checked since.
    """

    rows: tuple[Row, ...]
    winner: str
    why: str
    executable: Executable | None
    backend: str = "eager"
    together: str = ""
    cached: str = ""


class Candidate(Protocol):
    """Somebody who may win: in this process, or in one of its own."""

    notes: tuple[str, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def race(
    model: Callable[..., Any],
    captured: Program,
    optimized: Program,
    example: Example,
    *,
    backends: Sequence[str] = STANDARD_BACKENDS,
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
        together = _open(workshop, optimized)
        if not share_weights and (together or workshop is None):
            optimized = owned(optimized)  # once for all candidates; those in other processes have read their own
        make = _maker(optimized, threads, None if together else workshop, check_indices)
        rows, candidates = _prepare(optimized, judge, backends, make, clock, workshop, tell)
        rows = _timed(model, captured, judge, rows, candidates, (min(seconds, clock.left), clock.left), tell)
        specs = {title_of(backend): backend for backend in backends}
        found = _choose(
            lambda: Judge(ask(seed=seed + 1), elsewhere),
            partial(unsteady, model=model, example=example, seed=seed, seconds=STREAK * seconds),
            *(optimized, rows, candidates, specs, threads, share_weights, tell, check_indices),
        )
    finally:
        torch.set_num_threads(before)
    reason = endings.stopped(found.rows)
    if reason and warn:
        endings.warn(f"tsopt: {captured.name} runs eager, no candidate could be tried: {reason}")
    return replace(found, together=together)


class _Clock:
    """What is left of a budget, in seconds."""

    def __init__(self, budget: float | None) -> None:
        self._end = math.inf if budget is None else time.monotonic() + budget

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())


def _open(workshop: Workshop | None, program: Program) -> str:
    """Why candidates cannot have processes of their own, although they were meant to."""
    reason = "" if workshop is None else can_isolate(program)
    if workshop is None or reason:
        return reason
    try:
        workshop.open(program, torch.get_num_threads())
    except BackendError as error:  # a custom op, which another process does not know; no room for the weights
        return error.why or error.what
    return ""


def _maker(
    program: Program, threads: int | None, workshop: Workshop | None, check_indices: bool
) -> Callable[[str], Candidate]:
    def apart(backend: str) -> Candidate:
        assert workshop is not None
        candidate = workshop.candidate(backend, **race_options(backend, threads, check_indices))
        candidate.compile()
        return candidate

    def here(backend: str) -> Candidate:
        options = race_options(backend, threads, check_indices)
        return compile(program, backend, share_weights=True, **options)

    return here if workshop is None else apart


def _prepare(
    program: Program,
    judge: Judge,
    backends: Sequence[str],
    make: Callable[[str], Candidate],
    clock: _Clock,
    workshop: Workshop | None,
    tell: Progress,
) -> tuple[list[Row], dict[str, Candidate]]:
    rows: list[Row] = [Row(EAGER)]
    candidates: dict[str, Candidate] = {}
    for number, backend in enumerate(backends):
        title = title_of(backend)
        if _is_needless(backend, backends, candidates, program, judge):
            continue
        if not clock.left:
            rows.append(Row(title, "timed out", "nothing was left of the budget"))
            continue
        if workshop is not None:
            workshop.seconds = min(CANDIDATE_SECONDS, clock.left / (len(backends) - number))
        tell(f"compile {title}")
        start = time.perf_counter()
        try:
            found = get_backend(backend)
        except BackendError as error:
            rows.append(Row(title, "missing", error.why or error.what))
            continue
        try:
            refused = found.unsupported(program)
            if refused:
                reason = f"{refused[0].why}{f' ({refused[0].where})' if refused[0].where else ''}"
                rows.append(Row(title, "unsupported", reason))
                continue
            candidate = make(backend)
            took = time.perf_counter() - start
            tell(f"check {title}")
            inputs = judge.inputs
            # NOTE: not in inference mode: what a candidate allocates in its first call must be of use in every mode.
            with protected(None, written=program.state.values()), torch.no_grad():
                cold = cold_start(candidate, inputs, device_wait(inputs[0]))
            verdict = judge.judge(candidate, exact=is_exact(program, backend), precision=precision_of(backend))
            if not verdict.ok and is_exact(program, backend):
                verdict = judge.judge(candidate)
                candidate.notes += ("not bit-equal to eager, which has kernels of its own for this model",)
            candidate.notes += verdict.notes
        except NoGain as error:
            rows.append(Row(title, "no gain", error.what))
            continue
        except TsoptError as error:
            rows.append(Row(title, error.kind if isinstance(error, Lost) else endings.ending_of(error), _reason(error)))
            continue
        except Exception as error:  # a candidate may raise anything; it costs the candidate alone
            rows.append(Row(title, endings.ending_of(error), f"{type(error).__name__}: {str(error)[:200]}"))
            continue
        if not verdict.ok:
            rows.append(Row(title, "wrong", verdict.reason, accuracy=verdict, compile_seconds=took, cold=cold))
            continue
        candidates[title] = candidate
        rows.append(Row(title, accuracy=verdict, compile_seconds=took, cold=cold, notes=candidate.notes))
    return rows, candidates


def backends_for(
    example: Example, wanted: Sequence[str] | Literal["all"] | None, precision: str = FULL
) -> tuple[str, ...]:
    """Who races.

    Args:
        wanted: names; `all` for every engine; None for what compiles in seconds, and the extras that are installed.
        precision: one of PRECISIONS that those who have it race in as well; `auto` for all of them.

    Raises:
        UsageError: an unknown precision, or one that no selected backend supports.
    """
    on_gpu = is_on_gpu(example)
    if wanted is None:
        extras = (name for name in EXTRA_BACKENDS if importlib.util.find_spec(name) is not None)
        racing: tuple[str, ...] = (*STANDARD_BACKENDS, *(ON_GPU if on_gpu else ()), *extras)
    else:
        racing = (*ALL_BACKENDS, *(ALL_ON_GPU if on_gpu else ())) if wanted == "all" else tuple(wanted)
    return (*racing, *_in_precision(racing, precision))


def _in_precision(racing: Sequence[str], precision: str) -> tuple[str, ...]:
    """The backends that have lower precisions, once more in each that is asked for."""
    if precision not in (*PRECISIONS, AUTO):
        raise UsageError(f"precision={precision!r}", fix=f"one of: {', '.join((*PRECISIONS, AUTO))}")
    asked = PRECISIONS[1:] if precision == AUTO else (precision,) if precision != FULL else ()
    found = [(name, item) for item in asked for name in racing if "?" not in name and can_compute_in(name, item)]
    if asked and not found:
        able = sorted({name for name in BACKENDS for item in asked if can_compute_in(name, item)})
        raise UsageError(f"no selected backend supports {precision}", fix=f"those that do: {', '.join(able)}")
    return tuple(f"{name}?precision={item}" for name, item in found)


def title_of(backend: str) -> str:
    """The name of a backend in tables, with its options: `ONNX Runtime, threads 1`."""
    name, options = split_spec(backend)
    return ", ".join([TITLES.get(name, name), *(f"{key} {value}" for key, value in options.items())])


def _is_needless(
    backend: str, backends: Sequence[str], candidates: Mapping[str, Candidate], program: Program, judge: Judge
) -> bool:
    """Whether one thread needs no try: there is but one, a GPU computes, or the same backend keeps several busy."""
    name, options = split_spec(backend)
    if options != {"threads": 1} or name not in backends:
        return False
    if is_on_gpu(judge.inputs[0]) or torch.get_num_threads() == 1 or title_of(name) not in candidates:
        return True
    try:
        with protected(None, written=program.state.values()), _mode_of(program):
            return seconds_of(candidates[title_of(name)], judge.inputs) > SMALL
    except Exception:  # whatever it raises now, it raises again when it is timed, and is a row then
        return True


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
    candidates: Mapping[str, Candidate],
    limits: tuple[float, float],
    tell: Progress,
) -> list[Row]:
    """Args: limits: how long to time, and how long at most, where that decides nothing."""
    inputs, (seconds, longest) = judge.inputs, limits
    calls: dict[str, Callable[..., Any]] = {EAGER: model, **candidates}
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
    lost = {name: candidate.lost for name, candidate in candidates.items() if isinstance(candidate, Isolated)}
    return [row if (end := lost.get(row.name)) is None else replace(row, status=end.kind) for row in timed]


def device_wait(example: Example) -> Callable[[], None]:
    """What waits for the device that an example is on: kernels on a GPU run behind the call's back."""
    return torch.cuda.synchronize if is_on_gpu(example) else lambda: None


def is_on_gpu(example: Example) -> bool:
    leaves, _ = flatten((example.args, example.kwargs))
    return any(leaf.is_cuda for leaf in leaves)


def with_timing(row: Row, timing: Timing | None, base: Timing) -> Row:
    """A row with what was measured, and its speed-up over the baseline."""
    if timing is None:
        return row
    if timing.error:
        return replace(row, status=timing.ending, reason=f"while it was timed: {timing.error}")
    if row.name == EAGER:
        return replace(row, timing=timing)
    gain = speedup(timing, base)
    return replace(row, timing=timing, speedup=gain, reason=gain.why_undecided)


def _choose(
    fresh: Callable[[], Judge],
    streak: Callable[[Executable], str],
    optimized: Program,
    rows: list[Row],
    candidates: Mapping[str, Candidate],
    backends: Mapping[str, str],
    threads: int | None,
    share_weights: bool,
    tell: Progress,
    check_indices: bool,
) -> Race:
    judge: Judge | None = None
    faster = sorted((row for row in rows if row.verdict == "faster"), key=_median)
    order = _simpler_first(faster, backends)
    for row in order:
        tell(f"verify {row.name}")
        # Fresh inputs: what the race measured must not be all that is right.
        judge = judge or fresh()
        try:
            candidate, precision = candidates[row.name], precision_of(backends[row.name])
            # The one that was timed first: state that the timing has corrupted shows there.
            verdict = judge.judge(candidate, precision=precision)
            executable = _here(candidate, optimized, threads, share_weights, check_indices)
            if executable is not candidate and verdict.ok:
                verdict = judge.judge(executable, precision=precision)
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
            return Race(tuple(rows), row.name, why, executable, backends[row.name])
        rows = [replace(r, status=status, reason=f"after timing: {failure}") if r is row else r for r in rows]
    return Race(tuple(rows), EAGER, _why_eager(rows), None)


def _why_eager(rows: Sequence[Row]) -> str:
    """Why nobody has won."""
    late = " in the time that there was" if any(row.status == "timed out" for row in rows) else ""
    reason = endings.stopped(tuple(rows))
    if reason:
        return f"no candidate could be tried{late}: {reason}"
    if not any(row.name != EAGER and row.status == "ok" for row in rows):
        return f"no candidate could be used{late}"
    open_ones = [row.name for row in rows if row.verdict == UNDECIDED]
    return "no candidate is faster beyond noise" + (f"; undecided: {', '.join(open_ones)}" if open_ones else "")


def _simpler_first(ranked: Sequence[Row], backends: Mapping[str, str]) -> list[Row]:
    """Where noise cannot tell a candidate whose file is code from one whose file is data, data comes first."""
    found = list(ranked)
    if not found or split_spec(backends[found[0].name])[0] not in CODE:
        return found
    best = found[0]
    for row in found[1:]:
        is_data = split_spec(backends[row.name])[0] not in CODE
        if is_data and _median(row) <= EQUAL * _median(best) and not _is_slower(row, best):
            return [row, *(other for other in found if other is not row)]
    return found


def _is_slower(row: Row, best: Row) -> bool:
    assert row.timing is not None
    assert best.timing is not None
    return speedup(best.timing, row.timing).verdict == "faster"


def _here(
    candidate: Candidate, program: Program, threads: int | None, share_weights: bool, check_indices: bool
) -> Executable:
    """The candidate in this process."""
    if isinstance(candidate, Executable):
        return candidate
    isolated = cast(Isolated, candidate)
    options = race_options(isolated.backend, threads, check_indices)
    backend = get_backend(isolated.backend, **options)
    if isinstance(backend, Reopens):
        return backend.reopen(program, isolated.saved())
    return compile(program, isolated.backend, share_weights=share_weights, **options)


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
    return Benchmark(tuple(with_timing(Row(name), timings[name], timings[EAGER]) for name in timings))
