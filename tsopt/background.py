"""Optimizes a model in another process while eager serves its calls here, and takes over the result.

A process, because tracers temporarily replace parameters, streams and warning filters of the process they run in, so
that no other thread could call the model. Started as `python -m tsopt.background DIRECTORY`; ends with its caller.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import nn

from tsopt.api import optimize
from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.signature import Signature
from tsopt.compiler.calls.structure import Structure, with_own_leaves
from tsopt.errors import AccuracyError, CaptureError, GraphBreakError, SignatureError, TsoptError, UsageError
from tsopt.runtime.bundles.store import load, save
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.calling.model_changes import Watch
from tsopt.runtime.calling.model_reads import reads_of
from tsopt.runtime.calling.optimized import MAX_CAPTURES, Optimized
from tsopt.runtime.calling.specializations import CallKey, Specializations, call_key
from tsopt.runtime.checking.accuracy import Oracle
from tsopt.runtime.report import Report
from tsopt.runtime.sandbox.processes import descendants, environment_of_child, kill

REQUEST, ANSWER, BUNDLE, OUTPUT = "request", "answer", "model.tsopt", "output"
TAIL = 300  # characters of what a process that has failed has printed


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a process for one signature.

    Attributes:
        written: the model's names for the state of the program, in its order.
        signature: of the winner, which is in a bundle next to the answer; None if eager won.
    """

    report: Report
    written: tuple[str, ...] = ()
    signature: Signature | None = None


class Job:
    """One call key, optimized in its own process."""

    def __init__(self, model: Callable[..., Any], example: Example, options: dict[str, Any]) -> None:
        """Raises TsoptError when the model cannot be sent."""
        # As they are now: the call that follows may change their contents.
        self.example, self.watch = example.renewed(), Watch(model)
        self.directory = Path(tempfile.mkdtemp(prefix=f"tsopt-{os.getpid()}-"))
        self._forget = weakref.finalize(self, _remove, self.directory, os.getpid())
        ambient = sys.path, torch.get_num_threads(), torch.get_default_dtype()
        _write(self.directory / REQUEST, ambient, (model, self.example, options))
        with (self.directory / OUTPUT).open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tsopt.background", str(self.directory)],
                stdin=subprocess.PIPE,  # never written to: its end tells that this process has ended
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C in the terminal is for the caller
                env=environment_of_child(),
            )
        self._stop = weakref.finalize(self, _end, self._process, os.getpid())

    def wait(self, seconds: float | None) -> bool:
        """Whether it has ended, after at most this many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def answer(self) -> Answer:
        """The result.

        Raises:
            TsoptError: what `optimize` raised; or the process ended without an answer.
        """
        self._stop()
        try:
            found: Answer | TsoptError = pickle.loads((self.directory / ANSWER).read_bytes())
        except Exception as error:  # no file, half a file
            printed = ""
            with contextlib.suppress(OSError):
                printed = (self.directory / OUTPUT).read_text(errors="replace")[-TAIL:].strip()
            why = f"exit status {self._process.returncode}; {printed or error}"
            raise CaptureError("the background process ended without a result", why=why) from error
        if isinstance(found, TsoptError):
            raise found
        return found

    def made(self, signature: Signature, structure: Structure) -> Executable:
        """The winner, for calls of this key here."""
        found = load(self.directory / BUNDLE, trust=True, probe=False)  # written by our own process
        own = structure if signature.aliasing else with_own_leaves(structure)
        return found.called_as(replace(signature, outer=own))


def _write(path: Path, *values: Any) -> None:
    """All or nothing."""
    try:
        with path.with_suffix(".part").open("wb") as file:
            for value in values:
                cloudpickle.dump(value, file)  # with classes of the user's script, which others cannot import
        path.with_suffix(".part").replace(path)
    except OSError:
        raise
    except Exception as error:  # objects that cannot be pickled raise anything
        raise CaptureError(
            "the model cannot be sent to another process",
            why=f"{type(error).__name__}: {str(error)[:200]}",
            fix="pass background=False to compile it in this process",
        ) from error


def _remove(directory: Path, owner: int) -> None:
    if os.getpid() == owner:  # a fork of the owner has the same finalizers
        shutil.rmtree(directory, ignore_errors=True)


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:
        return
    if process.poll() is None:
        for pid in (*descendants(process.pid), process.pid):
            kill(pid)
        process.wait()
    if process.stdin is not None:
        process.stdin.close()


class InBackground:
    """A model that eager serves until its compiled form is ready in another process.

    Attributes:
        reports: of the signatures that are ready, the newest last.
    """

    def __init__(self, model: Callable[..., Any], options: dict[str, Any], say: Callable[[str], None]) -> None:
        self.model, self.options, self.reports = model, options, list[Report]()
        self._say = say
        self._specializations = Specializations()
        # The files of a job are there for as long as what was made from them.
        self._files: weakref.WeakKeyDictionary[Executable, Job] = weakref.WeakKeyDictionary()
        self._latest: Executable | None = None
        self._job: tuple[Job, CallKey] | None = None
        self._started = 0
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
        learning, self._learning = self._learning, None
        found = served(*args, **kwargs)
        if learning is not None and served is self.model:
            learning.leave_out_changes()  # what the model itself changes when it is called does not count
            learning.renew()
        return found

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
        self._started += 1
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
        held = _tensors(self.model)
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


def _tensors(model: Callable[..., Any]) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers()) if isinstance(model, nn.Module) else {}


def main(directory: Path) -> None:
    """The other process: optimizes the model and leaves a bundle and the report, or the error."""
    threading.Thread(target=_end_with_the_caller, args=(directory,), daemon=True).start()
    found: Answer | TsoptError
    with (directory / REQUEST).open("rb") as file:
        sys.path[:], threads, dtype = pickle.load(file)
        model, example, options = pickle.load(file)
    (directory / REQUEST).unlink()  # as large as the model
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    try:
        fast = optimize(model, example, **{"frontend": "one-graph"} | options | {"progress": None})
        if not isinstance(fast, Optimized):
            why = fast.report.frontend
            raise GraphBreakError(
                "only a model captured as one graph can be compiled in the background",
                why=why,
                fix="pass background=False",
            )
        found = _answer(fast, model, directory)
    except TsoptError as error:
        found = error
    _write(directory / ANSWER, found)


def _answer(fast: Optimized, model: Callable[..., Any], directory: Path) -> Answer:
    executable = fast.executable
    if executable is None:
        return Answer(fast.report)
    names = {id(tensor): name for name, tensor in _tensors(model).items()}
    written = tuple(names[id(tensor)] for tensor in executable.state)
    # The nesting goes into the answer: bundles hold no objects.
    flat = executable.called_as(executable.signature.flat())
    save(flat, directory / BUNDLE, model, fast.example, fast.report)
    return Answer(fast.report, written, executable.signature)


def _end_with_the_caller(directory: Path) -> None:
    sys.stdin.buffer.read()
    for pid in descendants(os.getpid()):
        kill(pid)
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
