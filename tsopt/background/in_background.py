"""A model that eager serves until its compiled form is ready."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from tsopt.background.job import Answer, Job, named_tensors
from tsopt.compiler.calls.example import Example
from tsopt.errors import AccuracyError, CaptureError, SignatureError, TsoptError, UsageError
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.calling.model_changes import Watch
from tsopt.runtime.calling.model_reads import reads_of
from tsopt.runtime.calling.new_signatures import MAX_CAPTURES
from tsopt.runtime.calling.served import COMPILING, NOT_COMPILED, NOT_FASTER
from tsopt.runtime.calling.specializations import CallKey, Specializations, call_key
from tsopt.runtime.checking.accuracy import Oracle
from tsopt.runtime.report import Report


class InBackground:
    """A model that eager serves until its compiled form is ready in another process.

    Attributes:
        reports: of the signatures that are ready, the newest last.
        seconds: that the processes have taken to compile them.
        in_eager: calls that the model itself has served, by reason.
    """

    def __init__(self, model: Callable[..., Any], options: dict[str, Any], say: Callable[[str], None]) -> None:
        self.model, self.options, self.reports = model, options, list[Report]()
        self._say = say
        self._specializations = Specializations()
        # The files of a job are there for as long as what was made from them.
        self._files: weakref.WeakKeyDictionary[Executable, Job] = weakref.WeakKeyDictionary()
        self._latest: Executable | None = None
        self._job: tuple[Job, CallKey] | None = None
        self._started, self._begun = 0, 0.0
        self.seconds, self.in_eager = 0.0, Counter[str]()
        self._refused: UsageError | None = None
        self._lock = threading.Lock()
        self._watch: Watch | None = None
        self._learning: Watch | None = None
        self.asks = reads_of(model).names

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        latest = self._latest
        if latest is not None:
            leaves = latest.accepts(args, kwargs)
            if leaves is not None:
                return latest.run_leaves(leaves, args, kwargs)
        served = self._served(args, kwargs)
        if isinstance(served, Executable):
            try:
                served.bind(args, kwargs)
            except SignatureError:  # what the model asks of this call was answered otherwise for the one before
                served = self.model
        if served is self.model:
            self.in_eager[self._why_eager(args, kwargs)] += 1
        learning, self._learning = self._learning, None
        found = served(*args, **kwargs)
        if learning is not None and served is self.model:
            learning.leave_out_changes()  # what the model itself changes when it is called does not count
            learning.renew()
        return found

    def _why_eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why the model itself serves a call."""
        job = self._job
        try:
            key = call_key(args, kwargs)
            kept = self._specializations.get(key)
        except (TypeError, CaptureError):
            return NOT_COMPILED
        if kept is self.model:
            return NOT_FASTER
        return COMPILING if job is not None and job[1] == key else NOT_COMPILED

    def serving(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Executable | None:
        """The executable that would serve a call; None if the model itself would."""
        latest = self._latest
        if latest is None or latest.accepts(args, kwargs) is not None:
            return latest
        try:
            found = self._specializations.get(call_key(args, kwargs))
        except (TypeError, CaptureError):  # what cannot be told is not served by what was made
            return None
        return found if isinstance(found, Executable) else None

    def training_changed(self) -> bool:
        """Whether a training flag of a module has changed."""
        return self._watch is not None and self._watch.training_changed()

    def changed(self) -> bool:
        """Whether the weights differ from those of the compiled forms."""
        return self._watch is not None and self._watch.changed()

    def wait(self, seconds: float | None) -> bool:
        """Whether nothing is being compiled any more, after at most this many seconds."""
        end = None if seconds is None else time.monotonic() + seconds
        with self._lock:
            job = self._job
            if job is not None and not job[0].wait(None if end is None else max(0.0, end - time.monotonic())):
                return False
            self._take_over()
        return True

    def _served(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        try:
            key = call_key(args, kwargs)
            found = self._specializations.get(key)
        except (TypeError, CaptureError):  # what cannot be hashed, or told, cannot be recognized again
            return self.model
        # Where another thread is at it, it does so for all.
        if found is None and self._lock.acquire(blocking=False):
            try:
                self._take_over()
                if self._job is None and self._specializations.get(key) is None:
                    self._start(key, Example(args, kwargs))
            finally:
                self._lock.release()
            found = self._specializations.get(key)
        return self.model if found is None else found

    def _start(self, key: CallKey, example: Example) -> None:
        if self._started >= MAX_CAPTURES:
            self._say(f"{MAX_CAPTURES} signatures were compiled; dynamic= captures one program for many sizes")
            return
        self._started, self._begun = self._started + 1, time.monotonic()
        try:
            self._job = Job(self.model, example, self.options), key
            self._learning = self._job[0].watch
        except (TsoptError, OSError) as error:
            self._fail(key, error)

    def _take_over(self) -> None:
        """Takes over the result of the process once it has ended."""
        if self._refused is not None:
            raise self._refused
        if self._job is None or not self._job[0].ended:
            return
        job, key = self._job
        self._job = None
        self.seconds += time.monotonic() - self._begun
        try:
            answer = job.answer()
            executable = None
            if answer.signature is not None:
                executable = self._checked(job, answer, job.made(answer.signature, key[0]))
                accuracy = answer.report.winning.accuracy
                if accuracy is not None and accuracy.test not in ("bits", "element"):
                    executable.precision = "bf16"  # for audits: nothing here says what is only rounding
        except UsageError as error:
            self._refused = error
            raise
        except Exception as error:  # of files, of engines: eager serves
            self._fail(key, error)
            return
        if executable is None:
            self._specializations.keep(key, self.model)
        elif job.watch.changed():
            return  # it was made of other weights: the next call of this key begins again
        else:
            self._files[executable] = job
            self._specializations.keep(key, executable)
            self._latest, self._watch = executable, job.watch
        self.reports.append(answer.report)

    def _checked(self, job: Job, answer: Answer, executable: Executable) -> Executable:
        """Checks that it computes what the model computes here: globals and modes are not sent.

        The other process has checked how exactly; here it only has to be the same model.
        """
        held = named_tensors(self.model)
        executable.state[:] = [held[name] for name in answer.written]  # those of the file are copies
        job.watch.leave_out(executable.state)
        if not job.watch.changed():
            verdict = Oracle(self.model, job.example, None, state=executable.state, few=True).judge(
                executable, precision="bf16"
            )
            if not verdict.ok:
                raise AccuracyError("the model computes different values in the background process", why=verdict.reason)
        return executable

    def _fail(self, key: CallKey, error: Exception) -> None:
        told = (error.what, error.where, error.why) if isinstance(error, TsoptError) else (repr(error),)
        self._say("; ".join(filter(None, told)))
        self._specializations.keep(key, self.model)
