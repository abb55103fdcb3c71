"""Before the rounds: candidates are compiled side by side, called a few times, and checked, the fastest first."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from tsopt.compiler.devices import is_on_gpu
from tsopt.compiler.protect import protected
from tsopt.errors import BackendError, NoGain, TsoptError
from tsopt.runtime.backends.backend import get_backend
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.checking.accuracy import ONE_CALL, is_exact
from tsopt.runtime.checking.judge import Judge
from tsopt.runtime.racing import outcomes
from tsopt.runtime.racing.contenders import Clock, Contender, Maker, Progress, RaceSettings, device_wait, retire
from tsopt.runtime.racing.outcomes import NOT_CHECKED, NOT_TIMED
from tsopt.runtime.racing.row import EAGER, Row
from tsopt.runtime.racing.timing import LONG_CALL, ColdStart, first_calls, once_warm, seconds_of
from tsopt.runtime.sandbox.isolated import Isolated
from tsopt.runtime.sandbox.processes import give_back_memory

SINGLE_THREAD_SECONDS = 5e-3  # a call that takes longer gains nothing from fewer threads
AT_ONCE = 2  # candidates that are kept, however tight memory is, and however large the model
USED_UP = "the budget was used up"
# Times slower than the best in the first calls: not worth a check. Those of a call of at least LONG seconds tell more,
# and of a large model few are kept. A machine that is shared is almost twice as slow in some moments, so that calls are
# made in LOOKS more of them, unless one is more than ALMOST_TWICE too slow.
HOPELESS, HOPELESS_IF_LONG, LONG = 2.5, 1.3, 20e-3
LOOKS, ALMOST_TWICE = 2, 1.9


@dataclass(eq=False)
class _Entry:
    """A candidate on its way into the race: its row, and what has been made of it so far.

    Attributes:
        begun: the process that compiles it.
        contender: compiled, and not known to be wrong.
        call_seconds: about how long a call takes, once its first calls are over.
        is_checked: it has been compared with eager, or need not be.
    """

    candidate: Candidate
    row: Row
    begun: Isolated | None = None
    contender: Contender | None = None
    call_seconds: float = math.inf
    is_checked: bool = False

    def leave(self, status: str, reason: str) -> None:
        """It is out of the race, and its process ends."""
        self.row = replace(self.row, status=status, reason=reason)
        self.contender = None
        if self.begun is not None:
            self.begun.retire()


def prepare(
    maker: Maker, judge: Judge, clock: Clock, progress: Progress, eager_seconds: float
) -> tuple[list[Row], dict[str, Contender], dict[str, float]]:
    """A row for each candidate; those that are right and fast enough to be timed, and about how long their calls take.

    Those that export to ONNX are compiled first, one for each core, then the others by themselves: these run kernels
    while they compile. oneDNN's are timed, and the threads of TorchScript wait for each other, for six times as long
    where an export takes one of two cores. What is compiled is called, when nothing else computes, and what can still
    win is checked. Each candidate of a large model has packed the weights once more: only the fastest one is alive
    while others are compiled or checked, and AT_ONCE of them get to the rounds. Where memory is tight it is the same,
    none is compiled beside another, and as many get to the rounds as fit.

    Args:
        eager_seconds: about how long a call of the model takes.

    Returns:
        The contenders and the seconds of their calls by key.
    """
    settings = maker.settings
    entries = [_Entry(item, Row(item.title, key=item.key)) for item in settings.candidates]
    first = [entry for entry in entries if not _is_second(entry.candidate, settings)]
    fit = maker.fit(sorted((entry.candidate for entry in first), key=maker.bytes_of, reverse=True))
    is_tight = fit < len(first)
    places, reason = len(entries), ""
    if is_tight:
        places, reason = max(fit, AT_ONCE), "memory is short"
    elif maker.is_heavy and not settings.time_all:
        places, reason = AT_ONCE, f"of a model of this size, only {AT_ONCE} candidates are timed"
    under_way = _Preparation(maker, judge, clock, progress, len(entries), eager_seconds, places, reason)
    for group in _groups(first, by_themselves=is_tight):
        under_way.admit(group)
    by_key = {entry.candidate.key: entry for entry in first}
    for entry in [entry for entry in entries if entry not in first]:
        plain = by_key[Candidate(entry.candidate.backend).key]
        if _is_needless(plain, judge):
            entries.remove(entry)
        else:
            under_way.admit([entry], plain.contender)
    under_way.keep_the_fastest()
    found = {entry.row.key: entry.contender for entry in entries if entry.contender is not None}
    seconds = {entry.row.key: entry.call_seconds for entry in entries}
    return [Row(EAGER), *(entry.row for entry in entries)], found, seconds


def _groups(entries: Sequence[_Entry], *, by_themselves: bool) -> list[list[_Entry]]:
    """Candidates that are compiled side by side."""
    together = [] if by_themselves else [entry for entry in entries if _keeps_to_one_core(entry.candidate)]
    return [*([together] if together else []), *([entry] for entry in entries if entry not in together)]


def _keeps_to_one_core(candidate: Candidate) -> bool:
    """Whether a candidate is compiled by one thread, for the most part."""
    return candidate.info.through_onnx


def _fastest_first(entries: Iterable[_Entry]) -> list[_Entry]:
    """Those that are still in the race."""
    return sorted((entry for entry in entries if entry.contender is not None), key=lambda entry: entry.call_seconds)


def _behind(entry: _Entry, best: float) -> str:
    return f"about {entry.call_seconds / best:.1f} times slower than the best"


@dataclass
class _Preparation:
    """Takes groups of candidates from their names to a verdict.

    Attributes:
        total: how many candidates there are; `begun` of them have had their turn.
        best: about how long a call of the fastest one takes that is known to be right; at first, of the model.
        places: how many get to the rounds. Where that is not all, only the fastest is alive while others are compiled.
        because: why it is not all.
        admitted: all that have had their turn.
    """

    maker: Maker
    judge: Judge
    clock: Clock
    progress: Progress
    total: int
    best: float
    places: int
    because: str
    begun: int = 0
    admitted: list[_Entry] = field(default_factory=list)

    def admit(self, group: Sequence[_Entry], files_of: Contender | None = None) -> None:
        """Compiles candidates side by side, calls them, and checks them, the fastest first, while they can win.

        Args:
            files_of: opens the files of this contender instead of compiling; it differs in options only.
        """
        if self._is_crowded and self.admitted:
            self._leave_alive(1)
        self._compile(group, files_of)
        self.progress("first calls")
        for entry in group:
            self._start(entry)
        if not self.maker.settings.time_all:
            self._look_again(group)
        if self._is_crowded:
            self._compare(group)
        self.admitted += group
        self._check_the_fastest(1 if self._is_crowded else self.total)

    @property
    def _is_crowded(self) -> bool:
        return self.places < self.total

    def keep_the_fastest(self) -> None:
        """All leave that get no place in the rounds."""
        self._check_the_fastest(self.places)
        ranked = _fastest_first(self.admitted)
        for entry in ranked[self.places :]:
            entry.leave(NOT_TIMED, f"{_behind(entry, ranked[0].call_seconds)}; {self.because}")

    def _check_the_fastest(self, count: int) -> None:
        """Checks the fastest candidates until `count` of them are correct, or none are left."""
        while True:
            self._drop_the_hopeless()
            self._leave_alive(count)
            entry = next((one for one in _fastest_first(self.admitted)[:count] if not one.is_checked), None)
            if entry is None:
                return
            entry.is_checked = True
            if not self.maker.settings.again:
                self.progress(f"check {entry.row.name}")
                self._check(entry)
                give_back_memory()  # of answers that were compared
            if entry.contender is not None:
                self.best = min(self.best, entry.call_seconds)

    def _drop_the_hopeless(self) -> None:
        for entry in self.admitted if not self.maker.settings.time_all else ():
            if entry.contender is not None and not entry.is_checked and self._is_hopeless(entry):
                entry.leave(NOT_CHECKED, _behind(entry, self.best))

    def _is_hopeless(self, entry: _Entry, times: float = 1.0) -> bool:
        """Whether it is so many times slower than one that can win."""
        decides = self.best > LONG or self.maker.is_heavy
        return entry.call_seconds > times * self.best * (HOPELESS_IF_LONG if decides else HOPELESS)

    def _look_again(self, group: Sequence[_Entry]) -> None:
        """More calls of those that would not be checked, in other moments."""
        for _ in range(LOOKS):
            for entry in group:
                if self._is_hopeless(entry) and not self._is_hopeless(entry, ALMOST_TWICE):
                    entry.call_seconds = min(entry.call_seconds, self._estimate(entry))

    def _compare(self, group: Sequence[_Entry]) -> None:
        """How long the calls of a group take, as a multiple of the best one's in the same moments.

        It is compared with others that will not be alive then, and the machine does not keep its speed.
        """
        best = next(iter(_fastest_first(self.admitted) or _fastest_first(group)), None)
        near = [entry for entry in group if entry.contender is not None and not self._is_hopeless(entry)]
        if best is None or not near or not self.clock.left:
            return
        self.maker.limit(self.clock)
        known, seconds = best.call_seconds, dict.fromkeys((best, *near), math.inf)
        for number in range(LOOKS):
            for entry, found in seconds.items():
                # One long call is enough, unless it would cost a candidate its place: it may have been held up.
                is_needed = number == 0 or self.best <= LONG_CALL or found > HOPELESS_IF_LONG * seconds[best]
                seconds[entry] = min(found, self._estimate(entry)) if is_needed else found
        if best.contender is not None and seconds[best] > 0:
            for entry, found in seconds.items():
                entry.call_seconds = known * found / seconds[best]

    def _leave_alive(self, few: int) -> None:
        """Of those that are in the race, the fastest have processes; those of the others end for the time being.

        The fastest one that is known to be right stays as well: it may be all that there is in the end.
        """
        ranked = _fastest_first(self.admitted)
        kept = [*ranked[:few], *[entry for entry in ranked if entry.is_checked][:1]]
        for entry in ranked:
            if entry.contender is not None and entry not in kept:
                self.maker.suspend(entry.contender, entry.candidate)
        while missing := next(filter(self._is_suspended, _fastest_first(self.admitted)[:few]), None):
            self._resume(missing)

    def _is_suspended(self, entry: _Entry) -> bool:
        return entry.contender is not None and self.maker.is_suspended(entry.contender)

    def _resume(self, entry: _Entry) -> None:
        made = entry.contender
        if made is None or not self._in_time(entry):
            return
        self.progress(f"compile {entry.row.name} once more")
        with _failing_only_the_candidate(entry):
            entry.begun = self.maker.begin(entry.candidate, made)
            entry.contender, _ = self.maker.finish(entry.candidate, entry.begun)
            retire(made)  # its files, which have been opened
            with _called_to_be_timed(entry, self.maker):
                first_calls(entry.contender, self.judge.inputs, device_wait(self.judge.inputs[0]))

    def _estimate(self, entry: _Entry) -> float:
        """About how long a call takes now, in seconds; infinite if it fails."""
        made, inputs = entry.contender, self.judge.inputs
        if made is not None:
            with _called_to_be_timed(entry, self.maker):
                return seconds_of(made, inputs, device_wait(inputs[0]))
        return math.inf

    def _compile(self, group: Sequence[_Entry], files_of: Contender | None) -> None:
        under_way: list[_Entry] = []
        side_by_side = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        for entry in group:
            if len(under_way) >= side_by_side:
                self._finish(under_way.pop(0))
            self.maker.limit(self.clock, self.total - self.begun)
            self.begun += 1
            if self._begin(entry, files_of):
                under_way.append(entry)
        for entry in under_way:
            self._finish(entry)

    def _begin(self, entry: _Entry, files_of: Contender | None) -> bool:
        """Starts to compile a candidate; False where there is a reason not to, which its row has then."""
        if not self.clock.left:
            entry.leave("timed out", USED_UP)
            return False
        self.progress(f"compile {entry.row.name} ({self.begun} of {self.total})")
        try:
            backend = get_backend(entry.candidate)
        except BackendError as error:
            entry.leave("missing", error.why or error.what)
            return False
        with _failing_only_the_candidate(entry):
            refused = backend.unsupported(self.maker.program(entry.candidate))
            if refused:
                reason = f"{refused[0].why}{f' ({refused[0].where})' if refused[0].where else ''}"
                entry.leave("unsupported", reason)
                return False
            entry.begun = self.maker.begin(entry.candidate, files_of)
            return True
        return False

    def _finish(self, entry: _Entry) -> None:
        with _failing_only_the_candidate(entry):
            entry.contender, seconds = self.maker.finish(entry.candidate, entry.begun)
            entry.row = replace(entry.row, compile_seconds=seconds)

    def _start(self, entry: _Entry) -> None:
        """The first calls of a candidate, timed."""
        made = entry.contender
        if made is None or not self._in_time(entry):
            return
        inputs = self.judge.inputs
        wait = device_wait(inputs[0])
        with _called_to_be_timed(entry, self.maker):
            spent = first_calls(made, inputs, wait)
            entry.call_seconds = once_warm(spent, made, inputs, wait)
            entry.row = replace(entry.row, cold=ColdStart.of(spent))

    def _check(self, entry: _Entry) -> None:
        """Compares a candidate with eager."""
        made, candidate = entry.contender, entry.candidate
        if made is None or not self._in_time(entry):
            return
        with _failing_only_the_candidate(entry):
            exact = is_exact(self.maker.program(candidate), candidate)
            # Where calls take long, the rest is judged of the winner only: see `choice`.
            part = ONE_CALL if self.judge.takes_long else ""
            verdict = self.judge.judge(made, exact=exact, precision=candidate.precision, part=part)
            if not verdict.ok and exact:
                verdict = self.judge.judge(made, part=part)
                made.notes += (outcomes.NOT_BIT_EQUAL,)
            made.notes += verdict.notes
            entry.row = replace(entry.row, accuracy=verdict)
            if not verdict.ok:
                entry.leave(verdict.status, verdict.reason)
                return
            entry.row = replace(entry.row, notes=made.notes)

    def _in_time(self, entry: _Entry) -> bool:
        """Whether there is time left for a candidate; otherwise it is out."""
        if not self.clock.left:
            entry.leave("timed out", USED_UP)
        self.maker.limit(self.clock)
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
        status, reason = outcomes.ending_of(error), _reason(error)
    except Exception as error:  # a candidate may raise anything
        status, reason = outcomes.ending_of(error), outcomes.said_by(error)
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
