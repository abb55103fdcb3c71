"""The helper process that candidates are forked from, so that a crash costs only one of them.

Nothing of it, of its files or of its children (`isolated.py`) outlives the `with` block.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from tsopt.errors import BackendError, TsoptError
from tsopt.runtime import locked_directory
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.locked_directory import OURS, RACE
from tsopt.runtime.racing.outcomes import SYSTEM_ERROR
from tsopt.runtime.sandbox.isolated import CANDIDATE_SECONDS, CandidateDied, Isolated, state_of
from tsopt.runtime.sandbox.processes import (
    available_memory,
    descendants,
    environment_of_child,
    kill,
    python,
    why_none,
    working_directory,
)
from tsopt.runtime.sandbox.transfer import Gone, Message, receive, send, write_tensors

START_SECONDS = 60.0  # to import torch and the engines; a cold disk takes long
SHARED = Path("/dev/shm")


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
    `open` then gives it the program. `start` and `close` do the same without a block, as often as wanted.

    Args:
        at_once: False starts it only when it gets a program.
    """

    def __init__(self, *, at_once: bool = True) -> None:
        self._at_once = at_once
        self._contenders: list[Isolated] = []
        self._examples: dict[int, tuple[Example, Message]] = {}
        self._directories: list[tuple[Path, int]] = []  # with the open files that lock them
        self._stored: list[Path] = []  # the variants of the program
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._refused = ""
        self._is_ready = False

    def __enter__(self) -> Sandbox:
        if self._at_once:
            self.start()
        return self

    def start(self) -> None:
        """Starts the process, if none is running."""
        if self._process is not None:
            return
        self._refused, self._is_ready = "", False
        why = why_none()
        if why:
            self._refused = f"cannot start a process: {why}"
            return
        try:
            self._connection, theirs = socket.socketpair()
        except OSError as error:
            self._refused = f"cannot start a process: {error}"
            return
        with theirs:
            command = python("tsopt.runtime.sandbox", str(theirs.fileno()), *working_directory(sys.path))
            nothing = subprocess.DEVNULL
            try:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=(theirs.fileno(),),
                    stdin=nothing,
                    stdout=nothing,
                    stderr=nothing,
                    start_new_session=True,  # Ctrl-C in the terminal is for the caller, who then ends this one
                    env=environment_of_child(sees_gpus=False),  # what is on a GPU is not isolated
                )
            except OSError as error:
                self._refused = f"cannot start a process: {error}"
                self._connection.close()
                self._connection = None

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
        self.start()
        if self._refused:
            raise BackendError(self._refused)
        self.program, self.threads, self.seconds, self.memory = programs[FP32], threads, seconds, memory
        while self._stored:
            shutil.rmtree(self._stored.pop(), ignore_errors=True)
        try:
            for place in (SHARED, _usual()):
                locked_directory.sweep_ours(place)
            self.directory, lock = _directory(programs.values(), memory)
            self._directories.append((self.directory, lock))
            for name, program in programs.items():
                self._stored.append(self.directory / name)
                self._stored[-1].mkdir()
                write_program(replace(program, signature=program.signature.flat()), self._stored[-1])
            state = write_tensors(self.directory / "state", state_of(self.program))
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
        message = {"do": "program", "directory": str(self.directory), "variants": list(programs), "state": state}
        message["default_dtype"] = str(torch.get_default_dtype()).removeprefix("torch.")
        self._ask(message, seconds)

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

    @property
    def has_ended(self) -> bool:
        """Whether no helper runs: then none of its children does, and their numbers may be those of other processes."""
        return self._process is None or self._process.poll() is not None

    def described(self, example: Example) -> Message:
        """An example and the state as a file, written once."""
        known = self._examples.get(id(example))
        if known is None:
            leaves, _ = flatten((example.args, example.kwargs))
            file = f"example-{len(self._examples)}"
            tensors = write_tensors(self.directory / file, [*leaves, *state_of(self.program)])
            known = self._examples[id(example)] = (example, {"file": file, "tensors": tensors})
        return known[1]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all that was started, and removes all files. Once more does nothing."""
        while self._contenders:
            self._contenders.pop().end()
        if self._process is not None:
            if not self.has_ended:
                for pid in descendants(self._process.pid):  # also those that have left their process group
                    kill(pid)
                kill(self._process.pid)
            self._process.wait()
            self._process = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        while self._directories:
            _remove(*self._directories.pop())


@contextmanager
def directory_for(program: Program, memory: int | None = None) -> Iterator[Path]:
    """A directory for the weights of a program, and other files for an engine to open.

    Args:
        memory: bytes that candidates may take; what the machine has to spare when it is None.
    """
    directory, lock = _directory([program], memory)
    try:
        yield directory
    finally:
        _remove(directory, lock)


def _directory(programs: Iterable[Program], memory: int | None) -> tuple[Path, int]:
    """A new directory, and the open file that locks it."""
    return locked_directory.create(_roomiest(programs, memory), f"{OURS}{os.getpid()}-", RACE)


def _remove(directory: Path, lock: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    os.close(lock)


def _roomiest(programs: Iterable[Program], memory: int | None) -> Path:
    """Shared memory where it has room for the weights several times over, and memory is plenty; else the usual place.

    Args:
        memory: bytes that candidates may take; what the machine has to spare when it is None.
    """
    needed = 3 * sum(weight.nbytes for program in programs for weight in program.weights.values()) + (64 << 20)
    left = memory or available_memory()
    plenty = left is None or left > 2 * needed  # a file there is memory too, which nothing can take back
    if plenty and SHARED.is_dir() and os.access(SHARED, os.W_OK) and shutil.disk_usage(SHARED).free > needed:
        return SHARED
    return _usual()


def _usual() -> Path:
    return Path(tempfile.gettempdir())
