"""Contenders: candidates that were compiled, here or in separate processes, and checked against eager."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
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
from tsopt.runtime.racing.timing import cold_start, seconds_of
from tsopt.runtime.report import EAGER, Row

SINGLE_THREAD_SECONDS = 5e-3  # a call that takes longer gains nothing from fewer threads

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

    def make(self, candidate: Candidate) -> Contender:
        options = self._options(candidate)
        if self.sandbox is None:
            return compile(self.program(candidate), candidate, share_weights=True, **options)
        made = self.sandbox.contender(candidate, **options)
        made.compile()
        return made

    def here(self, contender: Contender, candidate: Candidate) -> Executable:
        """A contender in this process: itself, opened from the files that it has saved, or compiled once more."""
        if isinstance(contender, Executable):
            return contender
        options, program = self._options(candidate), self.program(candidate)
        backend = get_backend(candidate, **options)
        if isinstance(backend, Reopens):
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


def prepare(maker: Maker, judge: Judge, clock: Clock, progress: Progress) -> tuple[list[Row], dict[str, Contender]]:
    """A row for each candidate, and those that are right, by key."""
    rows: list[Row] = [Row(EAGER)]
    contenders: dict[str, Contender] = {}
    candidates = maker.settings.candidates
    for number, candidate in enumerate(candidates):
        if _is_needless(candidate, maker, contenders, judge):
            continue
        if maker.sandbox is not None:
            maker.sandbox.seconds = min(CANDIDATE_SECONDS, clock.left / (len(candidates) - number))
        place = f"{number + 1} of {len(candidates)}"
        row, contender = _prepared(candidate, place, maker, judge, clock, progress)
        rows.append(row)
        if contender is not None:
            contenders[candidate.key] = contender
    return rows, contenders


def _prepared(
    candidate: Candidate, place: str, maker: Maker, judge: Judge, clock: Clock, progress: Progress
) -> tuple[Row, Contender | None]:
    """The row of one candidate, and what was made of it, where that is right."""
    title = candidate.title
    row = Row(title, key=candidate.key)
    if not clock.left:
        return replace(row, status="timed out", reason="the budget was used up"), None
    progress(f"compile {title} ({place})")
    start = time.perf_counter()
    try:
        backend = get_backend(candidate)
    except BackendError as error:
        return replace(row, status="missing", reason=error.why or error.what), None
    try:
        program = maker.program(candidate)
        refused = backend.unsupported(program)
        if refused:
            reason = f"{refused[0].why}{f' ({refused[0].where})' if refused[0].where else ''}"
            return replace(row, status="unsupported", reason=reason), None
        made = maker.make(candidate)
        took = time.perf_counter() - start
        progress(f"check {title} ({place})")
        inputs, exact = judge.inputs, is_exact(program, candidate)
        # NOTE: not in inference mode: what a candidate allocates in its first call must be of use in every mode.
        with protected(None, written=program.state.values()), torch.no_grad():
            cold = cold_start(made, inputs, device_wait(inputs[0]))
        verdict = judge.judge(made, exact=exact, precision=candidate.precision)
        if not verdict.ok and exact:
            verdict = judge.judge(made)
            made.notes += ("not bit-equal to eager, which uses different kernels for this model",)
        made.notes += verdict.notes
    except NoGain as error:
        return replace(row, status="no gain", reason=error.what), None
    except TsoptError as error:
        ending = error.kind if isinstance(error, CandidateDied) else outcomes.ending_of(error)
        return replace(row, status=ending, reason=_reason(error)), None
    except Exception as error:  # a candidate may raise anything; it costs the candidate alone
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        return replace(row, status=outcomes.ending_of(error), reason=reason), None
    row = replace(row, accuracy=verdict, compile_seconds=took, cold=cold)
    if not verdict.ok:
        return replace(row, status="wrong", reason=verdict.reason), None
    return replace(row, notes=made.notes), made


def _is_needless(candidate: Candidate, maker: Maker, contenders: Mapping[str, Contender], judge: Judge) -> bool:
    """Whether one thread needs no try: there is but one, a GPU computes, or the same backend keeps several busy."""
    plain = Candidate(candidate.backend)
    if not is_on_one_thread(candidate) or plain not in maker.settings.candidates:
        return False
    if is_on_gpu(judge.inputs[0]) or torch.get_num_threads() == 1 or plain.key not in contenders:
        return True
    program = maker.program(plain)
    try:
        with protected(None, written=program.state.values()), mode_of(program):
            return seconds_of(contenders[plain.key], judge.inputs) > SINGLE_THREAD_SECONDS
    except Exception:  # whatever it raises now, it raises again when it is timed, and is a row then
        return True


def is_on_one_thread(candidate: Candidate) -> bool:
    """Whether that is all that is asked of a candidate: such a one is not always tried."""
    return candidate == Candidate(candidate.backend, (("threads", 1),))


def _reason(error: TsoptError) -> str:
    return "; ".join(part for part in (error.what, error.where, error.why) if part)


def mode_of(program: Program) -> AbstractContextManager[None]:
    """Inference mode for all candidates: it is eager at its best, and costs the compiled ones nothing.

    A model that asks for it is timed in the mode of its example.
    """
    return torch.inference_mode(dict(program.signature.modes).get("inference mode", True))


def device_wait(example: Example) -> Callable[[], None]:
    """What waits for the device that an example is on: kernels on a GPU run behind the call's back."""
    return torch.cuda.synchronize if is_on_gpu(example) else lambda: None
