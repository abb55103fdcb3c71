"""One candidate in a process of its own: called like the model, timed where it runs; a crash is told with its cause."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.structure import flatten
from tsopt.compiler.graph.program import Program
from tsopt.compiler.other_threads import THREADS
from tsopt.errors import BackendError, NoGain
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.checking.compare import bit_equal
from tsopt.runtime.racing.outcomes import LOST
from tsopt.runtime.sandbox.processes import kill, kill_group
from tsopt.runtime.sandbox.transfer import Described, Gone, Message, read_tensors, receive, send, write_tensors
from tsopt.runtime.untrusted_text import printable

if TYPE_CHECKING:
    from tsopt.runtime.sandbox.sandbox import Sandbox

CANDIDATE_SECONDS = 300.0  # for one answer: to compile, say
TAIL = 2000  # bytes of what a candidate printed that are kept


class CandidateDied(BackendError):
    """A candidate's process is gone, or never came to be. `kind`, one of LOST, says how."""

    def __init__(self, kind: str, what: str, why: str | None = None) -> None:
        self.kind = kind
        super().__init__(what, why=why)


class Isolated:
    """One candidate in a process of its own; called as the model is.

    Attributes:
        returns_copies: no call writes to what an earlier one has returned.

    Raises:
        CandidateDied: the process has ended, or did not answer in time.
        NoGain, BackendError: what the backend says.
    """

    returns_copies = True

    def __init__(
        self,
        sandbox: Sandbox,
        candidate: Candidate,
        options: Mapping[str, Any],
        connection: socket.socket,
        out: int,
        pid: int,
    ) -> None:
        self.sandbox, self.candidate, self.options = sandbox, candidate, dict(options)
        self.notes: tuple[str, ...] = ()
        self._connection, self._pid = connection, pid
        self._printed: deque[bytes] = deque(maxlen=4)
        self._reader = threading.Thread(target=self._drain, args=(out,), name=f"{THREADS}output of {pid}", daemon=True)
        self._reader.start()
        self._sent: list[Example] = []
        self._deadline = math.inf
        self._is_reaped = False  # then its number may be that of another process
        self.lost: CandidateDied | None = None
        self.retired = False
        self.files: Path | None = None  # once they have been saved

    def _drain(self, out: int) -> None:
        """Keeps the end of what the candidate prints; without a reader it would wait for one."""
        with os.fdopen(out, "rb", buffering=0) as pipe, contextlib.suppress(OSError):
            while part := pipe.read(1 << 16):
                self._printed.append(part[-TAIL:])

    @property
    def printed(self) -> str:
        """The end of what the candidate wrote to stdout and stderr, without control characters."""
        return printable(b"".join(self._printed)[-TAIL:].decode(errors="replace")).strip()

    def begin(self, files: Path | None = None) -> None:
        """Has the candidate compiled, while the caller does other things; `finish` waits for it.

        Args:
            files: opens these instead, which were saved by one that differs at most in options that they do not hold.
        """
        message: Message = {"do": "compile", "candidate": self.candidate.key, "options": self.options}
        if files is not None:
            message["saved"] = files.name
        self._deadline = time.monotonic() + self.sandbox.seconds
        self._send(message)

    def finish(self) -> float:
        """Waits until it is compiled. Returns the seconds that this took."""
        answer = self._answer("compile", max(0.01, self._deadline - time.monotonic()))
        self.notes = tuple(map(str, answer["notes"]))
        (seconds,) = self._times([answer["seconds"]])
        return seconds

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        program = self.sandbox.program
        leaves, _ = flatten((args, kwargs))
        given = [*leaves, *state_of(program)]
        file = f"call-{self._pid}"
        tensors = write_tensors(self.sandbox.directory / file, given)
        answer = self._ask({"do": "run", "file": file, "tensors": tensors})
        values = self._read(answer["file"], answer["tensors"])
        outputs, after = values[: answer["outputs"]], values[answer["outputs"] :]
        if len(after) != len(given):
            raise BackendError(f"{self.candidate.backend} sent an invalid answer")
        if not answer["kept"]:
            raise BackendError("an output of the first call was overwritten by a later call")
        with torch.no_grad():
            for mine, theirs in zip(given, after, strict=True):
                if not bit_equal(mine, theirs):
                    mine.copy_(theirs)
        return program.signature.unbind(outputs, args, kwargs)

    def saved(self) -> Path:
        """A directory with the files that the candidate can be made from again; it goes with the sandbox."""
        if self.files is None:
            name = f"saved-{self._pid}"
            self._ask({"do": "save", "name": name})
            self.files = self.sandbox.directory / name
        return self.files

    def timed(self, how: str, inputs: Sequence[Example], **counts: int) -> list[float]:
        """What one of MEASUREMENTS of `racing/timing.py` finds, in the candidate's own process.

        In inference mode where the caller is in it.

        Args:
            counts: arguments of that function beside the callable and the inputs.
        """
        new = [item for item in inputs if not any(item is sent for sent in self._sent)]
        if new:
            self._sent += new
            described = [self.sandbox.described(item) for item in self._sent]
            self._ask({"do": "examples", "examples": described})
        places = [next(i for i, sent in enumerate(self._sent) if sent is item) for item in inputs]
        inference = torch.is_inference_mode_enabled()
        what = {"do": "time", "how": how, "examples": places, "counts": counts, "inference": inference}
        return self._times(self._ask(what)["seconds"])

    def _times(self, seconds: Any) -> list[float]:
        """Times as a candidate tells them, which decide about others as well."""
        numbers = seconds if isinstance(seconds, list) else []
        if not numbers or not all(type(value) in (int, float) and 0 <= value < math.inf for value in numbers):
            raise BackendError(f"{self.candidate.backend} sent an invalid answer", why=f"times: {str(seconds)[:100]}")
        return [float(value) for value in numbers]

    def _read(self, file: str, tensors: Described) -> list[torch.Tensor]:
        try:
            return read_tensors(self.sandbox.directory / Path(file).name, tensors)
        except (Gone, OSError) as error:
            raise BackendError(f"{self.candidate.backend} sent an invalid answer", why=str(error)) from error

    def _ask(self, message: Message) -> Message:
        self._send(message)
        return self._answer(message["do"], self.sandbox.seconds)

    def _send(self, message: Message) -> None:
        if self.lost is not None:
            raise self.lost
        self._connection.settimeout(self.sandbox.seconds)
        try:
            send(self._connection, message)
        except TimeoutError:
            raise self._silent(message["do"]) from None
        except Gone:
            raise self._lose(*self._how_it_ended(message["do"])) from None

    def _answer(self, doing: str, seconds: float) -> Message:
        """The answer to what was sent last."""
        if self.lost is not None:
            raise self.lost
        self._connection.settimeout(seconds)
        try:
            answer, _ = receive(self._connection)
        except TimeoutError:
            raise self._silent(doing) from None
        except Gone:
            raise self._lose(*self._how_it_ended(doing)) from None
        if "error" in answer:
            if answer["kind"] == "no gain":
                raise NoGain(answer["error"])
            if answer["kind"] in LOST:
                raise self._lose(answer["kind"], answer["error"])
            raise BackendError(answer["error"])
        return answer

    def _silent(self, doing: str) -> CandidateDied:
        return self._lose("timed out", f"no answer to {doing!r} within {self.sandbox.seconds:.0f} s")

    def _how_it_ended(self, doing: str) -> tuple[str, str]:
        status = self.sandbox.ended(self._pid, 5.0)
        self._is_reaped = status is not None
        if status is None:
            return "crashed", f"its process stopped answering during {doing!r}"
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
            if number == signal.SIGKILL:
                return (
                    "out of memory",
                    f"killed during {doing!r}, most likely because the system ran out of memory",
                )
            return "crashed", f"{name} during {doing!r}"
        return "exited", f"its process exited with status {os.WEXITSTATUS(status)} during {doing!r}"

    def _lose(self, kind: str, what: str) -> CandidateDied:
        self.end()
        said = self.printed.splitlines()
        self.lost = CandidateDied(kind, f"{what}; last output: {said[-1][:200]}" if said else what)
        return self.lost

    def retire(self, *, keep_files: bool = False) -> None:
        """Ends the process of a candidate that is not needed any more, to give its memory back, and its files'."""
        self.retired = True
        self.end()
        if self.files is not None and not keep_files:
            shutil.rmtree(self.files, ignore_errors=True)
            self.files = None

    def end(self) -> None:
        """Ends the process, and all that it started in its group."""
        if not self._is_reaped and not self.sandbox.has_ended:
            kill_group(self._pid)
            kill(self._pid)
        self._connection.close()
        self._reader.join(timeout=1.0)


def state_of(program: Program) -> list[torch.Tensor]:
    return [program.state[item.name] for item in program.signature.state_inputs]
