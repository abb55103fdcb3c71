"""Contenders: candidates that are compiled, here or in separate processes; and what a race is asked for."""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol, cast

import torch

from tsopt.compiler.calls.example import Example
from tsopt.compiler.devices import gpus_of
from tsopt.compiler.graph.owned import owned
from tsopt.compiler.graph.program import Program
from tsopt.compiler.precision_names import FP32
from tsopt.errors import BackendError, NoGain
from tsopt.runtime.backends.backend import Reopens, compile, get_backend, race_options, reopen
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.checking.criterion import Criterion
from tsopt.runtime.checking.judge import HeldOut
from tsopt.runtime.racing.kept_files import packed, unpack
from tsopt.runtime.sandbox.isolated import CANDIDATE_SECONDS, Isolated
from tsopt.runtime.sandbox.processes import available_memory
from tsopt.runtime.sandbox.sandbox import Sandbox, can_isolate, directory_for

log = logging.getLogger("tsopt")
SHARE_OF_FREE = 0.8  # of the memory that is free: what the candidates of a race may take together
COPIES = 2.0  # times the bytes of the weights: what a compiled candidate takes, engines that pack them included
MANY = 32 << 20  # bytes of weights: copies of them in processes that are unlikely to be needed are too many
LEAST_SECONDS = 0.05  # for an answer, however little of the budget is left

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
        memory: bytes that the candidates may take together; None: a share of what is free.
        held_out: other sizes that every candidate has to be right at.
        criterion: how much accuracy a candidate in a lower precision may lose; None: the limits of its precision.
        check_indices: candidates look at the indices of each call, whatever that costs.
        strict_specials: a candidate that differs from eager on NaN and infinities is wrong.
        time_all: no candidate is left out or leaves because it cannot win.
        best_so_far: Ctrl-C ends the timing, and the best candidate until then is verified and returned.
        share_weights: let the winner read the model's weights where they are.
        warn: when no candidate could be tried.
        again: the only candidate has won before, and is verified once, after the rounds.
        files: those that it was compiled to then, if they were kept.
        keep_files: those of the winner are to be kept.
    """

    candidates: Sequence[Candidate]
    threads: int | None = None
    seconds: float = 10.0
    seed: int = 0
    budget: float | None = None
    memory: int | None = None
    held_out: Sequence[HeldOut] = ()
    criterion: Criterion | None = None
    check_indices: bool = False
    strict_specials: bool = False
    time_all: bool = False
    best_so_far: bool = False
    share_weights: bool = False
    warn: bool = True
    again: bool = False
    files: bytes | None = None
    keep_files: bool = False

    def candidate(self, key: str) -> Candidate:
        """The candidate with a key. Raises StopIteration: there is none."""
        return next(candidate for candidate in self.candidates if candidate.key == key)


class Clock:
    """What is left of a budget, in seconds."""

    def __init__(self, budget: float | None) -> None:
        self._budget = math.inf if budget is None else budget
        self._end = time.monotonic() + self._budget

    def but_for(self, share: float) -> Clock:
        """The same with a share of the budget taken from its end."""
        shorter = Clock(None)
        if self._budget < math.inf:
            shorter._budget, shorter._end = self._budget * (1 - share), self._end - self._budget * share
        return shorter

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
        memory: bytes that all candidates may take together; None if nobody knows how much is free.
        not_isolated_because: why candidates run in this process, where each was meant to have one of its own.
        files: by the key of a candidate that was opened here, what it was compiled to.
    """

    def __init__(self, programs: Variants, settings: RaceSettings, sandbox: Sandbox | None) -> None:
        self.settings = settings
        self.files: dict[str, bytes | None] = {}
        free = available_memory()
        self.memory = settings.memory or (None if free is None else int(SHARE_OF_FREE * free))
        self.not_isolated_because = _open(sandbox, programs, settings.memory)
        self.sandbox = None if self.not_isolated_because else sandbox
        if self.sandbox is None and not settings.share_weights:
            # Once for all candidates; those in other processes have read their own.
            programs = {name: owned(item) if isinstance(item, Program) else item for name, item in programs.items()}
        self._programs = programs

    def _weight_bytes(self, variant: str) -> int:
        program = self._programs[variant]
        return sum(weight.nbytes for weight in program.weights.values()) if isinstance(program, Program) else 0

    @property
    def is_heavy(self) -> bool:
        """Whether each candidate has a process of its own, which holds a lot of weights."""
        return self.sandbox is not None and self._weight_bytes(FP32) > MANY

    def bytes_of(self, candidate: Candidate) -> float:
        """About how many bytes a compiled candidate takes."""
        return COPIES * self._weight_bytes(candidate.variant)

    def fit(self, candidates: Sequence[Candidate]) -> int:
        """How many of these, the first ones, the memory is enough for at once, each in a process of its own."""
        if self.sandbox is None or self.memory is None:
            return len(candidates)
        taken = accumulate(map(self.bytes_of, candidates))
        return sum(size <= self.memory for size in taken)

    def make_room(self, others: Iterable[Contender]) -> None:
        """Before the winner is opened here: ends the processes of the others, if each holds a lot of weights.

        One that is needed after all is compiled here.
        """
        if self.is_heavy:
            for contender in others:
                retire(contender)

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
        files = None
        if isinstance(files_of, Isolated):
            files = files_of.files if files_of.retired else files_of.saved()
        made.begin(files)
        return made

    def suspend(self, contender: Contender, candidate: Candidate) -> None:
        """Ends the process of a contender for the time being: `begin` opens its files again, where it has any."""
        if isinstance(contender, Isolated) and not contender.retired:
            if self.reopens(contender, candidate):
                with suppress(BackendError):  # no room for files, or it has died: it is compiled once more
                    contender.saved()
            contender.retire(keep_files=True)

    def is_suspended(self, contender: Contender) -> bool:
        return isinstance(contender, Isolated) and contender.retired

    def finish(self, candidate: Candidate, begun: Isolated | None) -> tuple[Contender, float]:
        """The compiled candidate, and the seconds that compiling took."""
        if begun is not None:
            return begun, begun.finish()
        start = time.perf_counter()
        made = self._opened(candidate)
        if made is None:
            made = compile(self.program(candidate), candidate, share_weights=True, **self._options(candidate))
        return made, time.perf_counter() - start

    def _opened(self, candidate: Candidate) -> Executable | None:
        """A candidate, opened from the files kept in the cache. None if there are none, or if they cannot be used."""
        program, raw = self.program(candidate), self.settings.files
        if raw is None:
            return None
        try:
            with directory_for(program, self.settings.memory) as place:
                unpack(raw, candidate, program, place)
                return reopen(program, place, candidate, share_weights=True, **self._options(candidate))
        except Exception as error:  # whatever is wrong with a file: without it, the candidate is compiled
            log.info("the files of %s are not used: %s", candidate.title, " ".join(str(error).split()))
            return None

    def limit(self, clock: Clock, still_to_come: int = 1, least: float = LEAST_SECONDS) -> None:
        """Lets a candidate with a process of its own take its share of the time that is left for each answer.

        Args:
            least: seconds, however little is left.
        """
        if self.sandbox is not None:
            self.sandbox.seconds = min(CANDIDATE_SECONDS, max(least, clock.left / still_to_come))

    def here(self, contender: Contender, candidate: Candidate) -> Executable:
        """A contender in this process: itself, opened from the files that it has saved, or compiled once more."""
        if isinstance(contender, Executable):
            return contender
        options, program = self._options(candidate), self.program(candidate)
        isolated = cast(Isolated, contender)
        if self.reopens(contender, candidate):
            place = isolated.saved()
            if self.settings.keep_files:
                self.files[candidate.key] = packed(place, candidate, program)
            isolated.retire(keep_files=True)  # its weights and those of the executable are not held at the same time
            try:
                return reopen(program, place, candidate, share_weights=self.settings.share_weights, **options)
            finally:
                shutil.rmtree(place, ignore_errors=True)
        return compile(program, candidate, share_weights=self.settings.share_weights, **options)

    def reopens(self, contender: Contender, candidate: Candidate) -> bool:
        """Whether `here` opens the files of a contender, and does not compile the candidate once more."""
        alive = isinstance(contender, Isolated) and not contender.retired
        return alive and isinstance(get_backend(candidate, **self._options(candidate)), Reopens)

    def _options(self, candidate: Candidate) -> dict[str, Any]:
        return race_options(candidate, self.settings.threads, self.settings.check_indices)


def _open(sandbox: Sandbox | None, programs: Variants, memory: int | None) -> str:
    """Why candidates cannot have processes of their own, although they were meant to."""
    made = {name: item for name, item in programs.items() if isinstance(item, Program)}
    reason = "" if sandbox is None else can_isolate(made[FP32])
    if sandbox is None or reason:
        return reason
    try:
        sandbox.open(made, torch.get_num_threads(), memory=memory)
    except BackendError as error:  # a custom op, which another process does not know; no room for the weights
        return error.why or error.what
    return ""


def retire(contender: Callable[..., Any]) -> None:
    """Gives back what a candidate holds that is not needed any more, where that is a process, and its files."""
    if isinstance(contender, Isolated):
        contender.retire()


def mode_of(program: Program) -> AbstractContextManager[None]:
    """Inference mode for all candidates: it is eager at its best, and costs the compiled ones nothing.

    A model that asks for it is timed in the mode of its example.
    """
    return torch.inference_mode(dict(program.signature.modes).get("inference mode", True))


def device_wait(example: Example) -> Callable[[], None]:
    """What waits for the device that an example is on: kernels on a GPU run behind the call's back."""
    gpus = gpus_of(example)

    def wait() -> None:
        for device in gpus:
            torch.cuda.synchronize(device)

    return wait
