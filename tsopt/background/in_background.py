"""A model that eager serves until its compiled form is ready."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tsopt.background.job import Job, named_tensors
from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.snapshot import iterator_in
from tsopt.compiler.model_reads import reads_of
from tsopt.compiler.outside import kept_outside
from tsopt.compiler.precision_names import FP32
from tsopt.compiler.sizes.dims import Place, resized
from tsopt.errors import AccuracyError, NotReady, SignatureError, TsoptError, UsageError
from tsopt.runtime import forks
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.calling.model_changes import Watch
from tsopt.runtime.calling.new_signatures import MAX_CAPTURES, MAX_COUNTED, MAX_FAILURES
from tsopt.runtime.calling.refused import settled
from tsopt.runtime.calling.served import COMPILING, NOT_COMPILED, NOT_FASTER
from tsopt.runtime.calling.specializations import (
    UNTOLD,
    CallKey,
    Form,
    ForSizes,
    Specializations,
    call_key,
    form_of,
    sizes_of,
)
from tsopt.runtime.checking.accuracy import Oracle
from tsopt.runtime.racing.rehearsal import StandIn, rehearsal_of, stand_in
from tsopt.runtime.report import Report

log = logging.getLogger("tsopt")
MUCH_LARGER = 2  # times as large as the sizes that a job failed for: it may do for these
SAME_MODEL = 1e-3  # relative error: rounding in float32 stays below, another value of a constant rarely does


@dataclass(frozen=True, slots=True)
class _Running:
    """A job, the call that it was begun for, and the earlier one with other sizes that it is for as well."""

    job: Job
    key: CallKey
    partner: CallKey | None = None


class InBackground:
    """A model that eager serves until its compiled form is ready in another process.

    Args:
        say: tells the user why the model itself serves a call.
        why_not: why what was made, nothing if eager has won, will not serve calls such as the one that it was made
            for, by this model as it is watched, empty if it will; and whether that holds for calls of other sizes as
            well. Called in the thread of a call.
        pause: told of a call that the model serves, and why, while nothing serves any call, nor is being compiled.

    Attributes:
        reports: of the signatures that are ready, the newest last.
        seconds: that the processes have taken to compile them.
        in_eager: calls that the model itself has served, by reason.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        options: dict[str, Any],
        say: Callable[[str], None],
        why_not: Callable[[Executable | None, Watch, Example, StandIn | None], tuple[str, bool]],
        pause: Callable[[str, tuple[Any, ...], dict[str, Any]], object],
    ) -> None:
        self.model, self.options, self.reports = model, options, list[Report]()
        self._say, self._why_not, self._pause = say, why_not, pause
        self._reasons: dict[CallKey, str] = {}  # why eager serves calls for which there was a job
        self._of_all_sizes: dict[Form, str] = {}  # the same, for calls that only differ in their sizes from those
        self._of_sizes: dict[Form, tuple[str, dict[Place, int]]] = {}  # the same, for sizes up to these
        self._specializations = Specializations()
        # The files of a job are there for as long as what was made from them.
        self._files: weakref.WeakKeyDictionary[Executable, Job] = weakref.WeakKeyDictionary()
        self._job: _Running | None = None
        self._started, self._begun = 0, 0.0
        self._counts: Counter[CallKey] = Counter()  # of calls that nothing serves yet
        self.seconds, self.in_eager = 0.0, Counter[str]()
        self._refused: UsageError | None = None
        self._lock = threading.Lock()
        self._watch: Watch | None = None
        self._searched: Watch | None = None  # for tensors, while nothing is compiled
        self._learning: Watch | None = None
        self._refused_as: Watch | None = None  # the model for which a job has made nothing that may serve
        self._unsettled: Watch | None = None  # the same, while it is not known what calls change in it
        self.asks = reads_of(model).names
        forks.tell(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        accepting = self._specializations.accepting(args, kwargs)
        if accepting is not None:
            executable, leaves = accepting
            return executable.run_leaves(leaves, args, kwargs)
        served = self._served(args, kwargs)
        if isinstance(served, Executable):
            try:
                served.bind(args, kwargs)
            except SignatureError:  # what the model asks of this call was answered otherwise for the one before
                served = self.model
        if served is self.model:
            reason = self._why_eager(args, kwargs)
            self.in_eager[reason] += 1
            if reason not in (COMPILING, NOT_COMPILED) and self._job is None and not self.has_made_any:
                self._pause(reason, args, kwargs)
        learning, self._learning = self._learning, None
        unsettled, self._unsettled = self._unsettled, None
        found = served(*args, **kwargs) if unsettled is None else settled(unsettled, served, args, kwargs)
        if learning is not None and served is self.model:
            # What the model itself changes when it is called does not count. Of tensors, the answer says which:
            # others may have been written by another thread.
            learning.leave_out_changes()
            learning.renew(but_writes=True)
        return found

    def _why_eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why the model itself serves a call."""
        job = self._job
        try:
            key = call_key(args, kwargs)
            if self._specializations.get(key) is self.model:
                return self._reasons.get(key, NOT_FASTER)
            if refused := self._refused_for(key):
                return refused
            return COMPILING if job is not None and form_of(job.key) == form_of(key) else NOT_COMPILED
        except UNTOLD:
            return NOT_COMPILED

    def serving(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Executable | None:
        """The executable that would serve a call; None if the model itself would."""
        accepting = self._specializations.accepting(args, kwargs)
        if accepting is not None:
            return accepting[0]
        try:
            found = self._specializations.serving(call_key(args, kwargs), args, kwargs)
        except UNTOLD:  # what cannot be told is not served by what was made
            return None
        return found if isinstance(found, Executable) else None

    @property
    def has_made_any(self) -> bool:
        """Whether anything compiled serves calls."""
        return bool(self._files)

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The tensors that the model computes with, wherever its code finds them."""
        job = self._job
        watch = self._watch or (self._searched if job is None else job.job.watch)
        if watch is None or (watch is self._searched and watch.changed()):
            watch = self._searched = Watch(self.model)
        return watch.tensors

    def training_changed(self) -> bool:
        """Whether a training flag of a module has changed."""
        return self._watch is not None and self._watch.training_changed()

    def changed(self) -> bool:
        """Whether the model differs from that of the compiled forms, or from the one that was refused."""
        watch = self._watch or self._refused_as
        return watch is not None and watch.changed()

    def doubt(self) -> None:
        """Before a call in training mode, which may write statistics: they are compared by value when it matters."""
        for watch in self._watches():
            watch.doubt()

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The modules of what is compiled, or being compiled."""
        return [module for watch in self._watches() for module in watch.modules]

    def _watches(self) -> list[Watch]:
        """The model as it was compiled, and as it is being compiled."""
        watch, job = self._watch, self._job
        return [*filter(None, (watch, None if job is None else job.job.watch))]

    def wait(self, seconds: float | None) -> bool:
        """Whether nothing is being compiled any more, after at most this many seconds."""
        end = None if seconds is None else time.monotonic() + seconds
        lock = self._lock
        if not lock.acquire(timeout=-1 if seconds is None else min(max(0.0, seconds), threading.TIMEOUT_MAX)):
            return False
        try:
            job = self._job
            if job is not None and not job.job.wait(None if end is None else max(0.0, end - time.monotonic())):
                return False
            self._take_over()
        finally:
            lock.release()
        return True

    def forked(self) -> None:
        """Neither the job is its own, nor is a thread there that may have held the lock."""
        self._lock, self._job, self._learning = threading.Lock(), None, None

    def _served(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        try:
            key = call_key(args, kwargs)
            found = self._specializations.serving(key, args, kwargs)
        except UNTOLD:  # what cannot be hashed, or told, cannot be recognized again
            return self.model
        if found is None and (self._refused_for(key) or iterator_in(args, kwargs) is not None):
            return self.model  # an iterator is not to be sent, nor called twice
        lock = self._lock
        # Where another thread is at it, it does so for all.
        if found is None and lock.acquire(blocking=False):
            try:
                self._take_over()
                found = self._specializations.serving(key, args, kwargs)
                if found is None:
                    self._wanted(key, Example(args, kwargs))
                    found = self._specializations.get(key)
            finally:
                lock.release()
        if isinstance(found, Executable):
            self._specializations.used(found, args, kwargs)
        return self.model if found is None else found

    def _wanted(self, key: CallKey, example: Example) -> None:
        """Begins a job for a call that nothing serves, unless one is running or such a call may not come again.

        Calls that differ in their sizes come again with others: the job is for two of them, and for the sizes between
        and around. Calls made while a job runs are counted too.
        """
        seen = self._specializations.seen(key)
        if any(key in item.keys for item in seen.several):  # refused because of strides or shared memory
            self._specializations.keep(key, self.model)
            return
        if len(self._counts) >= MAX_COUNTED:
            self._counts.clear()
        self._counts[key] += 1
        seen.calls += 1
        partner = seen.several[-1].partner_for(key) if seen.several and not seen.failures else seen.partner
        seen.partner = seen.partner or key
        if self._job is not None:
            return
        differs = partner is not None and sizes_of(partner) != sizes_of(key)
        if not differs or seen.failures >= MAX_FAILURES or self.options.get("dynamic") is not None:
            partner = None
        warm = not self._started or seen.calls > self.options.get("warmup", 0)
        if warm and (partner is not None or not seen.failures or self._counts[key] > 1):
            self._start(key, partner, example)

    def _start(self, key: CallKey, partner: CallKey | None, example: Example) -> None:
        if self._started >= MAX_CAPTURES:
            self._say(f"{MAX_CAPTURES} signatures were compiled; dynamic= captures one program for many sizes")
            return
        self._started, self._begun = self._started + 1, time.monotonic()
        try:
            if partner is None:
                job = Job(self.model, [example], self.options)
            else:
                other = resized(example, sizes_of(partner), partner[0])
                job = Job(self.model, [example, other], self.options)
            self._job = _Running(job, key, partner)
            self._learning = self._job.job.watch
        except (TsoptError, OSError) as error:
            self._failed(key, partner, error)

    def _take_over(self) -> None:
        """Takes over the result of the process once it has ended."""
        if self._refused is not None:
            raise self._refused
        if self._job is None or not self._job.job.ended:
            return
        running, self._job = self._job, None
        job = running.job
        self.seconds += time.monotonic() - self._begun
        state: list[torch.Tensor] | None = None
        try:
            answer = job.answer()
            state = job.state(self.model, answer.written)
            if state is None:
                return  # it was made of other weights: the next call of this key begins again
            executable: Executable | None = None
            apart: StandIn | None = None
            if answer.signature is not None:
                apart = stand_in(self.model, state, job.examples[0], always_compared=True)
                if job.watch.changed():  # another thread was faster: nor is the model to be compared with it
                    return
                executable = self._checked(job, state, job.made(answer.signature, running.key[0]), apart)
                executable.draws = answer.draws
                held = named_tensors(self.model)
                executable.share(None if name is None else held[name] for name in answer.returned)
                accuracy = answer.report.winning.accuracy
                if accuracy is not None and accuracy.test not in ("bits", "element"):
                    executable.precision = "bf16"  # for audits: nothing here says what is only rounding
        except UsageError as error:
            self._refused = error
            raise
        except Exception as error:  # of files, of engines: eager serves
            # Else it was compared with other weights, or was not ready then, as a lazy module before its first call.
            if (state is None and not isinstance(error, NotReady)) or not job.watch.changed():
                self._failed(running.key, running.partner, error)
            return
        # Recorded again, with what calls have changed by now.
        watch = job.watch if executable is None else Watch(self.model, executable.state)
        if job.watch.changed():
            return
        why, of_all_sizes = self._why_not(executable, watch, job.examples[0], apart)
        if why:
            self._reasons[running.key] = why
            if of_all_sizes:
                self._of_all_sizes[form_of(running.key)] = why
            if executable is not None:
                self._refused_as = self._unsettled = watch
            executable = None
        if executable is not None:
            self._files[executable], self._watch, self._searched = job, watch, None
            self._specializations.used(executable)
        self._keep(running, executable)
        self.reports.append(answer.report)

    def _refused_for(self, key: CallKey) -> str:
        """Why nothing is made for a call, if that is known from calls of other sizes; empty otherwise."""
        form = form_of(key)
        reason, largest = self._of_sizes.get(form, ("", {}))
        fits = all(size <= MUCH_LARGER * largest.get(place, size) for place, size in sizes_of(key).items())
        return self._of_all_sizes.get(form) or (reason if fits else "")

    def _keep(self, running: _Running, executable: Executable | None) -> None:
        """Keeps what was made, or that eager is the fastest, for the calls that it serves."""
        key, partner = running.key, running.partner
        seen = self._specializations.seen(key)
        if executable is not None and executable.signature.dims:
            keys = (key,) if partner is None else (key, partner)  # one, where the user has said what is dynamic
            seen.several = [item for item in seen.several if partner not in item.keys]
            seen.several.append(ForSizes(executable, keys))
            seen.failures, seen.calls = 0, 0
            return
        if partner is not None:  # not for many sizes, for whatever reason
            seen.failures, seen.partner = seen.failures + 1, key
        self._specializations.keep(key, executable or self.model)

    def _failed(self, key: CallKey, partner: CallKey | None, error: Exception) -> None:
        """After a job without a result: if it was for many sizes, one for a single size may have one."""
        reason = _told(error)
        of_form = [other for other, why in self._reasons.items() if why == reason and form_of(other) == form_of(key)]
        if isinstance(error, TsoptError) and any(sizes_of(other) != sizes_of(key) for other in of_form):
            # It is not about these sizes, for all that is known; it may be about small ones.
            last, other = sizes_of(key), sizes_of(partner or key)
            smaller = {place: min(last[place], other[place]) for place in last}  # it may be this one that is refused
            failed = [*map(sizes_of, of_form), smaller]
            self._of_sizes[form_of(key)] = reason, {place: max(each[place] for each in failed) for place in last}
        if partner is None or self._refused_for(key):
            self._fail(key, error)
            return
        seen = self._specializations.seen(key)
        seen.failures, seen.partner = seen.failures + 1, key
        log.info("calls are not compiled for several sizes in the background: %s", error)

    def _checked(
        self, job: Job, state: list[torch.Tensor], executable: Executable, apart: StandIn | None
    ) -> Executable:
        """Checks that it computes what the model computes here: globals and modes are not sent.

        The other process has checked how exactly; here it only has to be the same model. What stands in for it is
        called, because other threads call the model, or load weights.
        """
        rehearsal = rehearsal_of(self.model, executable.signature, None if apart is None else apart.shadow)
        executable.state[:] = map(rehearsal.twin, state)  # those of the file are copies
        for example in job.examples if executable.signature.dims else job.examples[:1]:
            tolerance = SAME_MODEL if executable.precision == FP32 else None
            with kept_outside(self.model):
                oracle = Oracle(rehearsal.model, example, None, state=executable.state, few=True)
                verdict = oracle.judge(executable, precision="bf16", tolerance=tolerance)
            if not verdict.ok:
                why = verdict.reason
                raise AccuracyError("the model computes different values in the background process", why=why)
        executable.state[:] = state
        return executable

    def _fail(self, key: CallKey, error: Exception) -> None:
        self._reasons[key] = reason = _told(error)
        self._say(reason)
        self._specializations.keep(key, self.model)
        self._refused_as = watch = Watch(self.model)
        # What makes a model ready may be its own call, as that of a lazy module.
        self._unsettled = None if isinstance(error, NotReady) else watch


def _told(error: Exception) -> str:
    told = (error.what, error.where, error.why) if isinstance(error, TsoptError) else (repr(error),)
    return "; ".join(filter(None, told))
