"""Before the rounds: candidates are compiled side by side, called a few times, and checked, the fastest first."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from tsopt.compiler.devices import is_on_gpu
from tsopt.compiler.protect import protected
from tsopt.errors import BackendError, NoGain, TsoptError
from tsopt.runtime.backends.backend import get_backend
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.checking.accuracy import is_exact
from tsopt.runtime.checking.held_out_sizes import Judge
from tsopt.runtime.racing import outcomes
from tsopt.runtime.racing.contenders import Clock, Contender, Maker, Progress, RaceSettings, device_wait
from tsopt.runtime.racing.outcomes import NOT_CHECKED
from tsopt.runtime.racing.timing import SHORT, ColdStart, first_calls, seconds_of
from tsopt.runtime.report import EAGER, Row
from tsopt.runtime.sandbox.isolated import CandidateDied, Isolated

SINGLE_THREAD_SECONDS = 5e-3  # a call that takes longer gains nothing from fewer threads
AT_ONCE = 2  # candidates that are kept where memory is tight
USED_UP = "the budget was used up"
# Times slower than the best in the first calls: not worth a check. Those of a call of at least LONG seconds tell more,
# if they are made in several moments: a machine that is shared is almost twice as slow in some of them.
HOPELESS, HOPELESS_IF_LONG, LONG = 4.0, 1.3, 20e-3
LOOKS = 2


@dataclass(eq=False)
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

    def leave(self, status: str, reason: str) -> None:
        """It is out of the race, and its process ends."""
        self.row = replace(self.row, status=status, reason=reason)
        self.contender = None
        if self.begun is not None:
            self.begun.retire()


def prepare(
    maker: Maker, judge: Judge, clock: Clock, progress: Progress, eager_seconds: float
) -> tuple[list[Row], dict[str, Contender]]:
    """A row for each candidate, and those that are right and fast enough to be timed, by key.

    Candidates are compiled side by side, one for each core; then their first calls are watched, when nothing else
    computes; then they are checked, the fastest first, as far as they can still win. Where memory is tight, they are
    compiled one after the other, and only the fastest ones are kept.

    Args:
        eager_seconds: about how long a call of the model takes.
    """
    settings = maker.settings
    entries = [_Entry(item, Row(item.title, key=item.key)) for item in settings.candidates]
    total = len(entries)
    places = (f"{number + 1} of {total}" for number in range(total))
    first = [entry for entry in entries if not _is_second(entry.candidate, settings)]
    if maker.is_tight(len(first)):
        for entry in first:
            _compile_all([entry], maker, clock, progress, places)
            _start(entry, maker, clock, judge)
            _keep_the_fastest(first)
    else:
        _compile_all(first, maker, clock, progress, places)
        progress("first calls")
        for entry in first:
            _start(entry, maker, clock, judge)
    by_key = {entry.candidate.key: entry for entry in first}
    for entry in [entry for entry in entries if entry not in first]:
        plain = by_key[Candidate(entry.candidate.backend).key]
        if _is_needless(plain, judge):
            entries.remove(entry)
            continue
        _compile_all([entry], maker, clock, progress, places, plain.contender)
        _start(entry, maker, clock, judge)
    if not settings.time_all:
        _look_again(entries, maker, judge, eager_seconds)
    best = eager_seconds
    for entry in sorted(entries, key=lambda entry: entry.call_seconds):
        if entry.contender is None:
            continue
        if entry.call_seconds > best * _hopeless(best) and not settings.time_all:
            entry.leave(NOT_CHECKED, f"about {entry.call_seconds / best:.1f} times slower than the best")
            continue
        progress(f"check {entry.row.name}")
        _check(entry, maker, clock, judge)
        if entry.contender is not None:
            best = min(best, entry.call_seconds)
    found = {entry.row.key: entry.contender for entry in entries if entry.contender is not None}
    return [Row(EAGER), *(entry.row for entry in entries)], found


def _hopeless(best: float) -> float:
    """How many times slower than the best is too slow."""
    return HOPELESS_IF_LONG if best > LONG else HOPELESS


def _look_again(entries: Sequence[_Entry], maker: Maker, judge: Judge, eager_seconds: float) -> None:
    """More calls of those that would not be checked, in other moments."""
    for _ in range(LOOKS):
        best = min([eager_seconds, *(entry.call_seconds for entry in entries)])
        for entry in entries:
            made = entry.contender
            if made is not None and best * _hopeless(best) < entry.call_seconds <= best * HOPELESS:
                with _called_to_be_timed(entry, maker):
                    entry.call_seconds = min(entry.call_seconds, seconds_of(made, judge.inputs))


def _keep_the_fastest(entries: Sequence[_Entry]) -> None:
    """Lets go of all compiled candidates but for the fastest ones."""
    alive = sorted((entry for entry in entries if entry.contender is not None), key=lambda entry: entry.call_seconds)
    for entry in alive[AT_ONCE:]:
        behind = f"about {entry.call_seconds / alive[0].call_seconds:.1f} times slower than the best"
        entry.leave(NOT_CHECKED, f"{behind}, and memory is short")


def _compile_all(
    entries: Sequence[_Entry],
    maker: Maker,
    clock: Clock,
    progress: Progress,
    places: Iterator[str],
    files_of: Contender | None = None,
) -> None:
    """Compiles candidates: those that export to ONNX first, one for each core, then the others by themselves.

    These run kernels while they compile: oneDNN's are timed, and the threads of TorchScript wait for each other, for
    six times as long where an export takes one of two cores.
    """
    under_way: list[_Entry] = []
    side_by_side = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ordered = sorted(entries, key=lambda entry: not _keeps_to_one_core(entry.candidate))
    for number, entry in enumerate(ordered):
        while under_way and (len(under_way) >= side_by_side or not _keeps_to_one_core(entry.candidate)):
            _finish(under_way.pop(0), maker)
        maker.limit(clock, len(ordered) - number)
        if _begin(entry, maker, clock, progress, next(places), files_of):
            under_way.append(entry)
    for entry in under_way:
        _finish(entry, maker)


def _keeps_to_one_core(candidate: Candidate) -> bool:
    """Whether a candidate is compiled by one thread, for the most part."""
    return candidate.info.through_onnx


def _begin(
    entry: _Entry, maker: Maker, clock: Clock, progress: Progress, place: str, files_of: Contender | None
) -> bool:
    """Starts to compile a candidate; False where there is a reason not to, which its row has then."""
    if not clock.left:
        entry.leave("timed out", USED_UP)
        return False
    progress(f"compile {entry.row.name} ({place})")
    try:
        backend = get_backend(entry.candidate)
    except BackendError as error:
        entry.leave("missing", error.why or error.what)
        return False
    with _failing_only_the_candidate(entry):
        refused = backend.unsupported(maker.program(entry.candidate))
        if refused:
            reason = f"{refused[0].why}{f' ({refused[0].where})' if refused[0].where else ''}"
            entry.leave("unsupported", reason)
            return False
        entry.begun = maker.begin(entry.candidate, files_of)
        return True
    return False


def _finish(entry: _Entry, maker: Maker) -> None:
    with _failing_only_the_candidate(entry):
        entry.contender, seconds = maker.finish(entry.candidate, entry.begun)
        entry.row = replace(entry.row, compile_seconds=seconds)


def _start(entry: _Entry, maker: Maker, clock: Clock, judge: Judge) -> None:
    """The first calls of a candidate, timed."""
    made = entry.contender
    if made is None or not _in_time(entry, maker, clock):
        return
    inputs = judge.inputs
    with _called_to_be_timed(entry, maker):
        spent = first_calls(made, inputs, device_wait(inputs[0]))
        entry.call_seconds = min(spent) if min(spent) > SHORT else min(*spent, seconds_of(made, inputs))
        entry.row = replace(entry.row, cold=ColdStart.of(spent))


def _check(entry: _Entry, maker: Maker, clock: Clock, judge: Judge) -> None:
    """Compares a candidate with eager."""
    made, candidate = entry.contender, entry.candidate
    if made is None or not _in_time(entry, maker, clock):
        return
    with _failing_only_the_candidate(entry):
        exact = is_exact(maker.program(candidate), candidate)
        verdict = judge.judge(made, exact=exact, precision=candidate.precision)
        if not verdict.ok and exact:
            verdict = judge.judge(made)
            made.notes += ("not bit-equal to eager, which uses different kernels for this model",)
        made.notes += verdict.notes
        entry.row = replace(entry.row, accuracy=verdict)
        if not verdict.ok:
            entry.leave("wrong", verdict.reason)
            return
        entry.row = replace(entry.row, notes=made.notes)


def _in_time(entry: _Entry, maker: Maker, clock: Clock) -> bool:
    """Whether there is time left for a candidate; otherwise it is out."""
    if not clock.left:
        entry.leave("timed out", USED_UP)
    maker.limit(clock)
    return entry.contender is not None


@contextmanager
def _called_to_be_timed(entry: _Entry, maker: Maker) -> Iterator[None]:
    # NOTE: not in inference mode: what a candidate allocates in its first call must be of use in every mode.
    state = maker.program(entry.candidate).state.values()
    with _failing_only_the_candidate(entry), protected(None, written=state), torch.no_grad():
        yield


@contextmanager
def _failing_only_the_candidate(entry: _Entry) -> Iterator[None]:
    """Records an exception of a candidate in its row; the race continues."""
    try:
        yield
        return
    except NoGain as error:
        status, reason = "no gain", error.what
    except TsoptError as error:
        status, reason = error.kind if isinstance(error, CandidateDied) else outcomes.ending_of(error), _reason(error)
    except Exception as error:  # a candidate may raise anything
        status, reason = outcomes.ending_of(error), f"{type(error).__name__}: {str(error)[:200]}"
    entry.leave(status, reason)


def _is_second(candidate: Candidate, settings: RaceSettings) -> bool:
    """Whether the same backend takes part with several threads: what it does decides whether one is tried."""
    return candidate.is_on_one_thread and Candidate(candidate.backend) in settings.candidates


def _is_needless(plain: _Entry, judge: Judge) -> bool:
    """Whether to skip one thread: there is only one, a GPU computes, or the same backend keeps several busy."""
    if is_on_gpu(judge.inputs[0]) or torch.get_num_threads() == 1:
        return True
    return plain.contender is None or plain.call_seconds > SINGLE_THREAD_SECONDS


def _reason(error: TsoptError) -> str:
    return "; ".join(part for part in (error.what, error.where, error.why) if part)
