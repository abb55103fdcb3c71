"""One optimization in another process: what it is sent, and its answer.

A process, because tracers temporarily replace parameters, streams and warning filters of the process they run in, so
that no other thread could call the model. It is `python -m tsopt.background.worker DIRECTORY` and ends with its caller.
A fork of the caller does not keep it alive, and takes no result from it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import nn

from tsopt.compiler.calls.counters import with_sizes_of
from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.signature import Signature
from tsopt.compiler.calls.structure import Structure, with_own_leaves
from tsopt.errors import CaptureError, TsoptError
from tsopt.runtime import forks, locked_directory
from tsopt.runtime.bundles.store import load
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.calling.holdings import Holdings
from tsopt.runtime.calling.model_changes import Watch
from tsopt.runtime.locked_directory import JOB, OURS
from tsopt.runtime.report import Report
from tsopt.runtime.sandbox.processes import descendants, environment_of_child, kill, python, why_none

REQUEST, ANSWER, BUNDLE, OUTPUT = "request", "answer", "model.tsopt", "output"
TAIL = 300  # characters of what a process that has failed has printed


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a process for one signature.

    Attributes:
        written: the model's names for the state of the program, in its order.
        returned: its names for the weights that are returned; None for a tensor that is neither parameter nor buffer.
        signature: of the winner, which is in a bundle next to the answer; None if eager won.
        draws: whether calls of the model may draw random numbers.
    """

    report: Report
    written: tuple[str, ...] = ()
    returned: tuple[str | None, ...] = ()
    signature: Signature | None = None
    draws: bool = True


class Job:
    """One call, optimized in its own process; or two that differ in their sizes, for many."""

    def __init__(self, model: Callable[..., Any], examples: Sequence[Example], options: dict[str, Any]) -> None:
        """Raises TsoptError when the model cannot be sent."""
        none = why_none()
        if none:
            raise CaptureError(
                "the model cannot be compiled in another process",
                why=none,
                fix="pass background=False to compile it in this process",
            )
        # As they are now: the call that follows may change their contents.
        self.examples, self.watch = [example.renewed() for example in examples], Watch(model)
        self._tensors, self._held = named_tensors(model), Holdings(self.watch.modules)
        place, owner = Path(tempfile.gettempdir()), os.getpid()
        locked_directory.sweep_ours(place)
        self.directory, self._lock = locked_directory.create(place, f"{OURS}{owner}-", JOB)
        self._forget = weakref.finalize(self, _remove, self.directory, self._lock, owner)
        ambient = sys.path, torch.get_num_threads(), torch.get_default_dtype()
        write(self.directory / REQUEST, ambient, (model, self.examples, options))
        with (self.directory / OUTPUT).open("wb") as output:
            self._process = subprocess.Popen(
                python("tsopt.background.worker", str(self.directory)),
                stdin=subprocess.PIPE,  # never written to: its end tells that this process has ended
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C in the terminal is for the caller
                env=environment_of_child(),
            )
        self._stop = weakref.finalize(self, _end, self._process, owner)
        forks.tell(self)

    def forked(self) -> None:
        """The process ends with the caller, and its files are locked by it: not by what the caller has forked."""
        self._stop.detach()
        if self._forget.detach() is not None:
            os.close(self._lock)
        if self._process.stdin is not None:
            self._process.stdin.close()

    def wait(self, seconds: float | None) -> bool:
        """Whether it has ended, after at most this many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def state(self, model: Callable[..., Any], written: Sequence[str]) -> list[torch.Tensor] | None:
        """The tensors of the model that calls write, by name; None where it no longer has the weights that were sent.

        The watch leaves them out from now on.
        """
        held = named_tensors(model)
        if any(name not in held for name in written):
            return None
        if self._held.replaced(self._tensors[name] for name in written if name in self._tensors):
            return None
        found = [held[name] for name in written]
        self.watch.leave_out(found)
        return None if self.watch.changed() else found

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
        """The winner, for calls of this nesting here."""
        found = load(self.directory / BUNDLE, trust=True, probe=False)  # written by our own process
        own = with_sizes_of(structure if signature.aliasing else with_own_leaves(structure), signature.outer)
        return found.called_as(replace(signature, outer=own))


def write(path: Path, *values: Any) -> None:
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


def _remove(directory: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # a fork of the owner has the same finalizers
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner and process.poll() is None:
        for pid in (*descendants(process.pid), process.pid):
            kill(pid)
        process.wait()
    if process.stdin is not None:
        process.stdin.close()


def named_tensors(model: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a module by name."""
    return dict(model.named_parameters()) | dict(model.named_buffers()) if isinstance(model, nn.Module) else {}
