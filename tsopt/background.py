"""Forms of a model, optimized in another process while eager serves them here; taken over when they are ready.

A process, because tracers put other parameters, streams and filters into the one that they run in, for a while: no
thread beside them could call the model. Started as `python -m tsopt.background DIRECTORY`; ends when its caller does.
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
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import nn

from tsopt.api import optimize
from tsopt.compiler.example import Example
from tsopt.errors import CaptureError, NotOneGraph, TsoptError, UsageError
from tsopt.runtime.artifact import load
from tsopt.runtime.backend import Executable
from tsopt.runtime.dispatch import MAX_CAPTURES, MAX_FORMS, Optimized, form_of
from tsopt.runtime.processes import descendants, kill
from tsopt.runtime.report import Report
from tsopt.runtime.watch import Watch

REQUEST, ANSWER, FORM, OUTPUT = "request", "answer", "form.tsopt", "output"
TAIL = 300  # characters of what a process that has failed has printed


class Job:
    """One form, in its process."""

    def __init__(self, model: Callable[..., Any], example: Example, options: dict[str, Any]) -> None:
        """Raises TsoptError when the model cannot be sent."""
        self.directory = Path(tempfile.mkdtemp(prefix=f"tsopt-{os.getpid()}-"))
        self._forget = weakref.finalize(self, shutil.rmtree, self.directory, ignore_errors=True)
        _write(self.directory / REQUEST, (sys.path, torch.get_num_threads()), (model, example, options))
        with (self.directory / OUTPUT).open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tsopt.background", str(self.directory)],
                stdin=subprocess.PIPE,  # never written to: its end tells that this process has ended
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C in the terminal is for the caller
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._stop = weakref.finalize(self, _end, self._process)

    def wait(self, seconds: float | None) -> bool:
        """Whether it has ended, after so many seconds at most."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def answer(self) -> tuple[Executable | None, Report, list[str]]:
        """What became of it: the winner, None where that is eager; the report; the tensors of the model it writes to.

        Raises:
            TsoptError: as `optimize` did; or the process has ended without an answer.
        """
        self._stop()
        try:
            found = pickle.loads((self.directory / ANSWER).read_bytes())
        except OSError as error:
            printed = (self.directory / OUTPUT).read_text(errors="replace")[-TAIL:].strip()
            why = f"status {self._process.returncode}; {printed or error}"
            raise CaptureError("the process that optimizes it has ended without an answer", why=why) from error
        if isinstance(found, TsoptError):
            raise found
        report, written = found
        if not (self.directory / FORM).exists():
            return None, report, written
        return load(self.directory / FORM, trust=True), report, written  # it comes from a process of one's own


def _write(path: Path, *values: tuple[Any, ...]) -> None:
    try:
        with path.open("wb") as file:
            for value in values:
                cloudpickle.dump(value, file)  # with the classes of the user's script, which nobody else can import
    except OSError:
        raise
    except Exception as error:  # whatever an object says that cannot be pickled
        raise CaptureError(
            "it cannot be sent to another process",
            why=f"{type(error).__name__}: {str(error)[:200]}",
            fix="background=False, which compiles it in this one",
        ) from error


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        for pid in (*descendants(process.pid), process.pid):
            kill(pid)
        process.wait()
    if process.stdin is not None:
        process.stdin.close()


class InBackground:
    """A model that eager serves until what was made of it elsewhere is ready.

    Attributes:
        reports: of the forms that are ready, the newest last.
    """

    def __init__(self, model: Callable[..., Any], options: dict[str, Any], say: Callable[[str], None]) -> None:
        self.model, self.options, self.reports = model, options, list[Report]()
        self._say = say
        self._forms: OrderedDict[Any, tuple[Callable[..., Any], Job | None]] = OrderedDict()
        self._latest: Executable | None = None
        self._job: tuple[Job, Any, Watch] | None = None  # with the form that it is for, and the weights then
        self._started = 0
        self._refused: UsageError | None = None
        self._lock = threading.Lock()
        self._watch: Watch | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        latest = self._latest
        if latest is not None:
            leaves = latest.accepts(args, kwargs)
            if leaves is not None:
                return latest.run_leaves(leaves, args, kwargs)
        return self._served(args, kwargs)(*args, **kwargs)

    def changed(self) -> bool:
        """Whether the weights are others than those of the forms that are ready."""
        return self._watch is not None and self._watch.changed()

    def wait(self, seconds: float | None) -> bool:
        """Whether nothing is on its way any more, after so many seconds at most."""
        end = None if seconds is None else time.monotonic() + seconds
        with self._lock:
            job = self._job
            if job is not None and not job[0].wait(None if end is None else max(0.0, end - time.monotonic())):
                return False
            self._take_over()
        return True

    def _served(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        form = form_of(args, kwargs)
        try:
            found = self._forms.get(form)
        except TypeError:  # a constant that cannot be hashed cannot be recognized again
            return self.model
        # Where another thread is at it, it does so for all.
        if found is None and self._lock.acquire(blocking=False):
            try:
                self._take_over()
                if self._job is None and form not in self._forms:
                    self._start(form, Example(args, kwargs))
            finally:
                self._lock.release()
            found = self._forms.get(form)
        return self.model if found is None else found[0]

    def _start(self, form: Any, example: Example) -> None:
        if self._started >= MAX_CAPTURES:
            self._say(f"{MAX_CAPTURES} forms of call were compiled; dynamic= makes one program for many")
            self._keep(form, self.model)
            return
        self._started += 1
        try:
            self._job = Job(self.model, example, self.options), form, Watch(self.model)
        except (TsoptError, OSError) as error:
            self._fail(form, error)

    def _take_over(self) -> None:
        """What the process has made, when it has ended."""
        if self._refused is not None:
            raise self._refused
        if self._job is None or not self._job[0].ended:
            return
        job, form, watch = self._job
        self._job = None
        try:
            executable, report, written = job.answer()
            if executable is not None:
                held = _tensors(self.model)
                executable.state[:] = [held[name] for name in written]  # those of the file are copies
                watch.leave_out(executable.state)
        except UsageError as error:
            self._refused = error
            raise
        except TsoptError as error:
            self._fail(form, error)
            return
        if executable is None:
            self._keep(form, self.model)
        elif watch.changed():
            return  # it was made of other weights: the next call of this form begins anew
        else:
            self._keep(form, executable, job)
            self._latest, self._watch = executable, watch
        self.reports.append(report)

    def _fail(self, form: Any, error: Exception) -> None:
        reason = "; ".join(filter(None, (error.what, error.where, error.why) if isinstance(error, TsoptError) else ()))
        self._say(reason or f"no process can be started: {error}")
        self._keep(form, self.model)

    def _keep(self, form: Any, served: Callable[..., Any], job: Job | None = None) -> None:
        """With its job, whose files are there for as long as that is."""
        if len(self._forms) >= MAX_FORMS:
            self._forms.popitem(last=False)
        self._forms[form] = served, job


def _tensors(model: Callable[..., Any]) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers()) if isinstance(model, nn.Module) else {}


def main(directory: Path) -> None:
    """The other side: optimizes what is asked for, leaves a bundle and the report, or the error."""
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    found: tuple[Report, list[str]] | TsoptError
    with (directory / REQUEST).open("rb") as file:
        sys.path[:], threads = pickle.load(file)
        model, example, options = pickle.load(file)
    torch.set_num_threads(threads)
    try:
        fast = optimize(model, example, **{"frontend": "one-graph"} | options)
        if not isinstance(fast, Optimized):
            raise NotOneGraph(
                "Python between graphs stays where it is", why=fast.report.frontend, fix="background=False"
            )
        if fast.backend != "eager":
            fast.save(directory / FORM)
        found = fast.report, _written(fast, model)
    except TsoptError as error:
        found = error
    (directory / ANSWER).write_bytes(pickle.dumps(found))


def _written(fast: Optimized, model: Callable[..., Any]) -> list[str]:
    """The names that the model has for the state of a program, in its order."""
    names = {id(tensor): name for name, tensor in _tensors(model).items()}
    return [names[id(fast.program.state[item.name])] for item in fast.program.signature.state_inputs]


def _end_with_the_caller() -> None:
    sys.stdin.buffer.read()
    for pid in descendants(os.getpid()):
        kill(pid)
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
