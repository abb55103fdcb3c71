"""Runs each candidate in its own process, so that a crash costs only that candidate and is reported with a cause.

`Sandbox` owns the helper process and its files. `Isolated` is one candidate in a child of it: it is called like the
model and timed where it runs. Nothing of either outlives the `with` block.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.structure import flatten
from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.serialize import write_program
from tsopt.compiler.precision_names import FP32
from tsopt.errors import BackendError, NoGain, TsoptError
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.checking.compare import bit_equal
from tsopt.runtime.racing.outcomes import LOST, SYSTEM_ERROR
from tsopt.runtime.racing.processes import available_memory, descendants, environment_of_child, kill
from tsopt.runtime.racing.transfer import Described, Gone, Message, read_tensors, receive, send, write_tensors
from tsopt.runtime.untrusted_text import printable

START_SECONDS = 60.0  # to import torch and the engines; a cold disk takes long
CANDIDATE_SECONDS = 300.0  # for one answer: to compile, say
TAIL = 2000  # bytes of what a candidate printed that are kept
SHARED = Path("/dev/shm")


class CandidateDied(BackendError):
    """A candidate's process is gone, or never came to be. `kind`, one of LOST, says how."""

    def __init__(self, kind: str, what: str, why: str | None = None) -> None:
        self.kind = kind
        super().__init__(what, why=why)


CAN_FORK = hasattr(os, "fork") and hasattr(socket, "send_fds")


def is_on_cpu(example: Example) -> bool:
    """Whether candidates for this call can have processes of their own."""
    leaves, _ = flatten((example.args, example.kwargs))
    return CAN_FORK and all(leaf.device.type == "cpu" for leaf in leaves)


def can_isolate(program: Program) -> str:
    """Why candidates for a program cannot have processes of their own; an empty text when they can."""
    return "the model is not on the CPU" if {device for _, device in program.signature.devices} - {"cpu"} else ""


class Sandbox:
    """The helper process, and a directory for what goes to and fro.

    The process starts when the block is entered, so that it imports its libraries while the caller does other things;
    `open` then gives it the program.
    """

    def __init__(self) -> None:
        self._contenders: list[Isolated] = []
        self._examples: dict[int, tuple[Example, Message]] = {}
        self._directories: list[Path] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._refused = ""
        self._is_ready = False

    def __enter__(self) -> Sandbox:
        try:
            self._connection, theirs = socket.socketpair()
        except OSError as error:
            self._refused = f"cannot start a process: {error}"
            return self
        with theirs:
            command = [sys.executable, "-m", "tsopt.runtime.racing.worker", str(theirs.fileno())]
            nothing = subprocess.DEVNULL
            try:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=(theirs.fileno(),),
                    stdin=nothing,
                    stdout=nothing,
                    stderr=nothing,
                    start_new_session=True,  # Ctrl-C in the terminal is for the caller, who then ends this one
                    env=environment_of_child(),
                )
            except OSError as error:
                self._refused = f"cannot start a process: {error}"
        return self

    def open(
        self,
        programs: Mapping[str, Program],
        threads: int,
        seconds: float = CANDIDATE_SECONDS,
        memory: int | None = None,
    ) -> None:
        """Hands the variants of a program over, in place of those of an earlier one.

        Args:
            programs: by name, with one signature and the same state.
            threads: intra-op threads of each candidate.
            seconds: limit for each answer of a candidate.
            memory: bytes that a candidate may take; what the machine has to spare when it is None.

        Raises:
            BackendError: it cannot be stored, or the process does not answer.
        """
        if self._refused:
            raise BackendError(self._refused)
        self.program, self.threads, self.seconds, self.memory = programs[FP32], threads, seconds, memory
        try:
            self.directory = Path(tempfile.mkdtemp(prefix=f"tsopt-{os.getpid()}-", dir=_roomiest(programs.values())))
            self._directories.append(self.directory)
            for name, program in programs.items():
                (self.directory / name).mkdir()
                write_program(replace(program, signature=program.signature.flat()), self.directory / name)
            state = write_tensors(self.directory / "state", _state_of(self.program))
        except TsoptError:
            raise
        except Exception as error:  # a dtype that the file format has not; no room
            raise BackendError(
                "the program cannot be written to a file", why=f"{type(error).__name__}: {error}"[:200]
            ) from error
        self._examples.clear()  # their files are in the directory of the program before
        if not self._is_ready:
            self._ask(None, START_SECONDS)
            self._is_ready = True
        self._ask(
            {"do": "program", "directory": str(self.directory), "variants": list(programs), "state": state}, seconds
        )

    def _ask(self, message: Message | None, seconds: float, files: Sequence[int] = ()) -> Message:
        """What the helper answers. None: waits for what it says by itself."""
        what = "the candidate process does not answer"
        if self._connection is None:
            raise CandidateDied("crashed", what)
        self._connection.settimeout(seconds)
        try:
            if message is not None:
                send(self._connection, message, files)
            answer, _ = receive(self._connection)
        except TimeoutError as error:
            raise CandidateDied("timed out", what, why=str(error)) from error
        except Gone as error:
            raise CandidateDied("crashed", what, why=str(error)) from error
        if "error" in answer:
            raise BackendError("the program cannot be run in another process", why=answer["error"])
        return answer

    def contender(self, candidate: Candidate, **options: Any) -> Isolated:
        """A child for a candidate; not yet compiled.

        Raises:
            CandidateDied: the helper is gone, or the system gives no process.
        """
        memory = self.memory or available_memory()
        message = {"do": "fork", "threads": self.threads, "directory": str(self.directory), "memory": memory}
        message |= {"variant": candidate.variant, "through_onnx": candidate.info.through_onnx}
        with contextlib.ExitStack() as unless_made:
            try:
                mine, theirs = socket.socketpair()
                unless_made.callback(mine.close)
                with contextlib.ExitStack() as unless_piped:
                    unless_piped.callback(theirs.close)
                    reader, writer = os.pipe()
                    unless_piped.pop_all()
            except OSError as error:
                raise CandidateDied(SYSTEM_ERROR, "cannot start a process for the candidate", why=str(error)) from error
            unless_made.callback(os.close, reader)
            try:
                pid = self._ask(message, self.seconds, (theirs.fileno(), writer))["pid"]
            finally:
                theirs.close()
                os.close(writer)
            unless_made.pop_all()
        made = Isolated(self, candidate, options, mine, reader, pid)
        self._contenders.append(made)
        return made

    def ended(self, pid: int, seconds: float) -> int | None:
        """How a child ended, as `waitpid` says it; None when it runs, or nobody knows."""
        try:
            return self._ask({"do": "reap", "pid": pid, "seconds": seconds}, seconds + 5)["status"]  # type: ignore[no-any-return]
        except BackendError:
            return None

    def described(self, example: Example) -> Message:
        """An example and the state as a file, written once."""
        known = self._examples.get(id(example))
        if known is None:
            leaves, _ = flatten((example.args, example.kwargs))
            file = f"example-{len(self._examples)}"
            tensors = write_tensors(self.directory / file, [*leaves, *_state_of(self.program)])
            known = self._examples[id(example)] = (example, {"file": file, "tensors": tensors})
        return known[1]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all that was started, and removes all files. Once more does nothing."""
        for contender in self._contenders:
            contender.end()
        if self._process is not None:
            for pid in descendants(self._process.pid):  # also those that have left their process group
                kill(pid)
            kill(self._process.pid)
            self._process.wait()
            self._process = None
        if self._connection is not None:
            self._connection.close()
        while self._directories:
            shutil.rmtree(self._directories.pop(), ignore_errors=True)


class Isolated:
    """One candidate in a process of its own; called as the model is.

    Raises:
        CandidateDied: the process has ended, or did not answer in time.
        NoGain, BackendError: what the backend says.
    """

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
        self._reader = threading.Thread(target=self._drain, args=(out,), daemon=True)
        self._reader.start()
        self._sent: list[Example] = []
        self._deadline = math.inf
        self.lost: CandidateDied | None = None
        self.retired = False
        self._saved: Path | None = None

    def _drain(self, out: int) -> None:
        """Keeps the end of what the candidate prints; without a reader it would wait for one."""
        with os.fdopen(out, "rb", buffering=0) as pipe, contextlib.suppress(OSError):
            while part := pipe.read(1 << 16):
                self._printed.append(part[-TAIL:])

    @property
    def printed(self) -> str:
        """The end of what the candidate wrote to stdout and stderr, without control characters."""
        return printable(b"".join(self._printed)[-TAIL:].decode(errors="replace")).strip()

    def begin(self, files_of: Isolated | None = None) -> None:
        """Has the candidate compiled, while the caller does other things; `finish` waits for it.

        Args:
            files_of: opens the files of this one instead, which differs in options that the files do not hold.
        """
        message: Message = {"do": "compile", "candidate": self.candidate.key, "options": self.options}
        if files_of is not None:
            message["saved"] = files_of.saved().name
        self._deadline = time.monotonic() + self.sandbox.seconds
        self._send(message)

    def finish(self) -> float:
        """Waits until it is compiled. Returns the seconds that this took."""
        answer = self._answer("compile", max(0.01, self._deadline - time.monotonic()))
        self.notes = tuple(answer["notes"])
        return float(answer["seconds"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        program = self.sandbox.program
        leaves, _ = flatten((args, kwargs))
        given = [*leaves, *_state_of(program)]
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
        if self._saved is None:
            name = f"saved-{self._pid}"
            self._ask({"do": "save", "name": name})
            self._saved = self.sandbox.directory / name
        return self._saved

    def seconds(self, inputs: Sequence[Example], times: int, untimed: int = 0) -> float:
        """How long so many calls in a row take, right after `untimed` others, measured where they are made.

        They are made on the inputs in turn, in inference mode where the caller is in it.
        """
        new = [item for item in inputs if not any(item is sent for sent in self._sent)]
        if new:
            self._sent += new
            described = [self.sandbox.described(item) for item in self._sent]
            self._ask({"do": "examples", "examples": described})
        places = [next(i for i, sent in enumerate(self._sent) if sent is item) for item in inputs]
        inference = torch.is_inference_mode_enabled()
        what = {"do": "time", "examples": places, "times": times, "untimed": untimed, "inference": inference}
        return float(self._ask(what)["seconds"])

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

    def retire(self) -> None:
        """Ends the process of a candidate that is not needed any more, to give its memory back."""
        self.retired = True
        self.end()

    def end(self) -> None:
        """Ends the process, and all that it started in its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        kill(self._pid)
        self._connection.close()
        self._reader.join(timeout=1.0)


def _state_of(program: Program) -> list[torch.Tensor]:
    return [program.state[item.name] for item in program.signature.state_inputs]


def _roomiest(programs: Iterable[Program]) -> str | None:
    """Shared memory where it has room for the weights several times over; None for the usual place."""
    needed = 3 * sum(weight.nbytes for program in programs for weight in program.weights.values()) + (64 << 20)
    if SHARED.is_dir() and os.access(SHARED, os.W_OK) and shutil.disk_usage(SHARED).free > needed:
        return str(SHARED)
    return None
