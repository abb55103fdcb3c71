"""Contenders: candidates that were compiled, here or in separate processes, and checked against eager."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch

from tsopt.compiler.calls.example import Example
from tsopt.compiler.devices import is_on_gpu
from tsopt.compiler.graph.owned import owned
from tsopt.compiler.graph.program import Program
from tsopt.compiler.precision_names import FP32
from tsopt.compiler.protect import protected
from tsopt.errors import BackendError, NoGain, TsoptError
from tsopt.runtime.backends.backend import Reopens, compile, get_backend, named, race_options
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.checking.accuracy import is_exact
from tsopt.runtime.checking.held_out_sizes import HeldOut, Judge
from tsopt.runtime.racing import outcomes
from tsopt.runtime.racing.isolation import CANDIDATE_SECONDS, CandidateDied, Isolated, Sandbox, can_isolate
from tsopt.runtime.racing.outcomes import NOT_CHECKED
from tsopt.runtime.racing.timing import ColdStart, first_calls, seconds_of
from tsopt.runtime.report import EAGER, Row

SINGLE_THREAD_SECONDS = 5e-3  # a call that takes longer gains nothing from fewer threads
HOPELESS = 4.0  # times slower than the best in the first calls: not worth a check

Progress = Callable[[str], None]
Variants = Mapping[str, Program | NoGain]


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceSettings:
    """What a race is asked for.

    Attributes:
        threads: intra-op threads of the candidates; None takes torch's own number.
        seconds: about how long to time.
        budget: seconds for all candidates together; eager takes part whatever it costs. A candidate with a process of
            its own gets an equal share of what is left, one in this process is not begun when nothing is.
        held_out: other sizes that every candidate has to be right at.
        check_indices: candidates look at the indices of each call, whatever that costs.
        strict_specials: a candidate that differs from eager on NaN and infinities is wrong.
        time_all: no candidate is left out or leaves because it cannot win.
        share_weights: let the winner read the model's weights where they are.
        warn: when no candidate could be tried.
    """

    candidates: Sequence[Candidate]
    threads: int | None = None
    seconds: float = 10.0
    seed: int = 0
    budget: float | None = None
    held_out: Sequence[HeldOut] = ()
    check_indices: bool = False
    strict_specials: bool = False
    time_all: bool = False
    share_weights: bool = False
    warn: bool = True

    def candidate(self, key: str) -> Candidate:
        """The candidate with a key. Raises StopIteration: there is none."""
        return next(candidate for candidate in self.candidates if candidate.key == key)


class Clock:
    """What is left of a budget, in seconds."""

    def __init__(self, budget: float | None) -> None:
        self._end = math.inf if budget is None else time.monotonic() + budget

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())


class Contender(Protocol):
    """A candidate that has been compiled: in this process, or in one of its own."""

    notes: tuple[str, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class Maker:
    """Compiles candidates, each in a process of its own where that is wanted and possible.

    Attributes:
        not_isolated_because: why candidates run in this process, where each was meant to have one of its own.
    """

    def __init__(self, programs: Variants, settings: RaceSettings, sandbox: Sandbox | None) -> None:
        self.settings = settings
        self.not_isolated_because = _open(sandbox, programs)
        self.sandbox = None if self.not_isolated_because else sandbox
        if self.sandbox is None and not settings.share_weights:
            # Once for all candidates; those in other processes have read their own.
            programs = {name: owned(item) if isinstance(item, Program) else item for name, item in programs.items()}
        self._programs = programs

    def program(self, candidate: Candidate) -> Program:
        """The program that a candidate runs. Raises NoGain where there is none."""
        found = self._programs[candidate.variant]
        if isinstance(found, NoGain):
            raise found
        return found

    def begin(self, candidate: Candidate, files_of: Contender | None = None) -> Isolated | None:
        """Has a candidate compiled in a process of its own; None where it is compiled here, by `finish`.

        Args:
            files_of: opens the files of this contender instead, which differs in options that they do not hold.
        """
        if self.sandbox is None:
            return None
        made = self.sandbox.contender(candidate, **self._options(candidate))
        made.begin(files_of if isinstance(files_of, Isolated) else None)
        return made

    def finish(self, candidate: Candidate, begun: Isolated | None) -> tuple[Contender, float]:
        """The compiled candidate, and the seconds that compiling took."""
        if begun is not None:
            return begun, begun.finish()
        start = time.perf_counter()
        made = compile(self.program(candidate), candidate, share_weights=True, **self._options(candidate))
        return made, time.perf_counter() - start

    def here(self, contender: Contender, candidate: Candidate) -> Executable:
        """A contender in this process: itself, opened from the files that it has saved, or compiled once more."""
        if isinstance(contender, Executable):
            return contender
        options, program = self._options(candidate), self.program(candidate)
        backend = get_backend(candidate, **options)
        if isinstance(backend, Reopens) and not self.settings.share_weights and not was_retired(contender):
            return named(backend.reopen(program, cast(Isolated, contender).saved()), backend, candidate)
        return compile(program, candidate, share_weights=self.settings.share_weights, **options)

    def _options(self, candidate: Candidate) -> dict[str, Any]:
        return race_options(candidate, self.settings.threads, self.settings.check_indices)


def _open(sandbox: Sandbox | None, programs: Variants) -> str:
    """Why candidates cannot have processes of their own, although they were meant to."""
    made = {name: item for name, item in programs.items() if isinstance(item, Program)}
    reason = "" if sandbox is None else can_isolate(made[FP32])
    if sandbox is None or reason:
        return reason
    try:
        sandbox.open(made, torch.get_num_threads())
    except BackendError as error:  # a custom op, which another process does not know; no room for the weights
        return error.why or error.what
    return ""


@dataclass
class _Entry:
    """A candidate on its way into the race: its row, and what has been made of it so far.

    Attributes:
        begun: the process that compiles it.
        contender: compiled, and not known to be wrong.
        call_seconds: about how long a call takes, once its first calls are over.
    """

    candidate: Candidate
    row: Row
    begun: Isolated | None = None
    contender: Contender | None = None
    call_seconds: float = math.inf


def prepare(
    maker: Maker, judge: Judge, clock: Clock, progress: Progress, eager_seconds: float
) -> tuple[list[Row], dict[str, Contender]]:
    """A row for each candidate, and those that are right and fast enough to be timed, by key.

    Candidates are compiled side by side, one for each core; then their first calls are watched, when nothing else
    computes; then they are checked, the fastest first, as far as they can still win.

    Args:
        eager_seconds: about how long a call of the model takes.
    """
    settings = maker.settings
    entries = [_Entry(item, Row(item.title, key=item.key)) for item in settings.candidates]
    first = [entry for entry in entries if not _is_second(entry.candidate, settings)]
    _compile_all(first, maker, clock, progress, len(entries))
    progress("first calls")
    for entry in first:
        _start(entry, maker, judge)
    by_key = {entry.candidate.key: entry for entry in first}
    for entry in entries:
        if _is_second(entry.candidate, settings):
            plain = by_key[Candidate(entry.candidate.backend).key]
            if _is_needless(plain, judge):
                entries = [item for item in entries if item is not entry]
                continue
            _compile_all([entry], maker, clock, progress, len(entries), plain.contender)
            _start(entry, maker, judge)
    best = eager_seconds
    for entry in sorted(entries, key=lambda entry: entry.call_seconds):
        if entry.contender is None:
            continue
        if entry.call_seconds > HOPELESS * best and not settings.time_all:
            reason = f"about {entry.call_seconds / best:.1f} times slower than the best"
            entry.row = replace(entry.row, status=NOT_CHECKED, reason=reason)
            if isinstance(entry.contender, Isolated):
                entry.contender.retire()
            entry.contender = None
            continue
        progress(f"check {entry.row.name}")
        _check(entry, maker, judge)
        if entry.contender is not None:
            best = min(best, entry.call_seconds)
    found = {entry.row.key: entry.contender for entry in entries if entry.contender is not None}
    return [Row(EAGER), *(entry.row for entry in entries)], found


def _compile_all(
    entries: Sequence[_Entry],
    maker: Maker,
    clock: Clock,
    progress: Progress,
    total: int,
    files_of: Contender | None = None,
) -> None:
    """Compiles candidates, as many at a time as there are cores; one that measures while it compiles by itself."""
    under_way: list[_Entry] = []
    side_by_side = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ordered = sorted(entries, key=lambda entry: entry.candidate.info.measures)
    for number, entry in enumerate(ordered):
        if maker.sandbox is not None:
            maker.sandbox.seconds = min(CANDIDATE_SECONDS, clock.left / (len(ordered) - number))
        while under_way and (len(under_way) >= side_by_side or entry.candidate.info.measures):
            _finish(under_way.pop(0), maker)
        place = f"{number + 1} of {total}"
        if _begin(entry, maker, clock, progress, place, files_of):
            under_way.append(entry)
    for entry in under_way:
        _finish(entry, maker)


def _begin(
    entry: _Entry, maker: Maker, clock: Clock, progress: Progress, place: str, files_of: Contender | None
) -> bool:
    """Starts to compile a candidate; False where there is a reason not to, which its row has then."""
    if not clock.left:
        entry.row = replace(entry.row, status="timed out", reason="the budget was used up")
        return False
    progress(f"compile {entry.row.name} ({place})")
    try:
        backend = get_backend(entry.candidate)
    except BackendError as error:
        entry.row = replace(entry.row, status="missing", reason=error.why or error.what)
        return False
    with _costs_the_candidate_alone(entry):
        refused = backend.unsupported(maker.program(entry.candidate))
        if refused:
            reason = f"{refused[0].why}{f' ({refused[0].where})' if refused[0].where else ''}"
            entry.row = replace(entry.row, status="unsupported", reason=reason)
            return False
        entry.begun = maker.begin(entry.candidate, files_of)
        return True
    return False


def _finish(entry: _Entry, maker: Maker) -> None:
    with _costs_the_candidate_alone(entry):
        entry.contender, seconds = maker.finish(entry.candidate, entry.begun)
        entry.row = replace(entry.row, compile_seconds=seconds)


def _start(entry: _Entry, maker: Maker, judge: Judge) -> None:
    """The first calls of a candidate, timed."""
    made = entry.contender
    if made is None:
        return
    inputs = judge.inputs
    with _costs_the_candidate_alone(entry):
        # NOTE: not in inference mode: what a candidate allocates in its first call must be of use in every mode.
        with protected(None, written=maker.program(entry.candidate).state.values()), torch.no_grad():
            spent = first_calls(made, inputs, device_wait(inputs[0]))
            entry.call_seconds = min(min(spent), seconds_of(made, inputs))
        entry.row = replace(entry.row, cold=ColdStart.of(spent))


def _check(entry: _Entry, maker: Maker, judge: Judge) -> None:
    """Compares a candidate with eager."""
    made, candidate = entry.contender, entry.candidate
    assert made is not None
    with _costs_the_candidate_alone(entry):
        exact = is_exact(maker.program(candidate), candidate)
        verdict = judge.judge(made, exact=exact, precision=candidate.precision)
        if not verdict.ok and exact:
            verdict = judge.judge(made)
            made.notes += ("not bit-equal to eager, which uses different kernels for this model",)
        made.notes += verdict.notes
        entry.row = replace(entry.row, accuracy=verdict, notes=made.notes)
        if not verdict.ok:
            entry.row = replace(entry.row, status="wrong", reason=verdict.reason, notes=())
            entry.contender = None


@contextmanager
def _costs_the_candidate_alone(entry: _Entry) -> Iterator[None]:
    """Whatever a candidate raises becomes its row."""
    try:
        yield
        return
    except NoGain as error:
        status, reason = "no gain", error.what
    except TsoptError as error:
        status, reason = error.kind if isinstance(error, CandidateDied) else outcomes.ending_of(error), _reason(error)
    except Exception as error:  # a candidate may raise anything
        status, reason = outcomes.ending_of(error), f"{type(error).__name__}: {str(error)[:200]}"
    entry.row = replace(entry.row, status=status, reason=reason)
    entry.contender = None


def _is_second(candidate: Candidate, settings: RaceSettings) -> bool:
    """Whether the same backend takes part with several threads: what it does decides whether one is tried."""
    return is_on_one_thread(candidate) and Candidate(candidate.backend) in settings.candidates


def _is_needless(plain: _Entry, judge: Judge) -> bool:
    """Whether one thread needs no try: there is but one, a GPU computes, or the same backend keeps several busy."""
    alone = is_on_gpu(judge.inputs[0]) or torch.get_num_threads() == 1
    return alone or plain.contender is None or plain.call_seconds > SINGLE_THREAD_SECONDS


def is_on_one_thread(candidate: Candidate) -> bool:
    """Whether that is all that is asked of a candidate: such a one is not always tried."""
    return candidate == Candidate(candidate.backend, (("threads", 1),))


def _reason(error: TsoptError) -> str:
    return "; ".join(part for part in (error.what, error.where, error.why) if part)


def was_retired(contender: Contender) -> bool:
    """Whether the process of a contender has been ended because it was not needed any more."""
    return isinstance(contender, Isolated) and contender.retired


def mode_of(program: Program) -> AbstractContextManager[None]:
    """Inference mode for all candidates: it is eager at its best, and costs the compiled ones nothing.

    A model that asks for it is timed in the mode of its example.
    """
    return torch.inference_mode(dict(program.signature.modes).get("inference mode", True))


def device_wait(example: Example) -> Callable[[], None]:
    """What waits for the device that an example is on: kernels on a GPU run behind the call's back."""
    return torch.cuda.synchronize if is_on_gpu(example) else lambda: None
