"""Candidates that go wrong in every way that one process can be spared by another. Named as `package.module:Class`."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from tsopt.compiler.graph.program import Program
from tsopt.errors import BackendError
from tsopt.runtime.backends.backend import Unsupported
from tsopt.runtime.calling.executable import Executable

SLOW = 2e-3  # seconds


@dataclass(frozen=True, slots=True)
class Right:
    """Runs the program, and spoils it: `at_compile`, or in each call with the outputs in hand."""

    name: str = "right"
    at_compile: ClassVar[Callable[[], Any] | None] = None

    def missing(self) -> str | None:
        return None

    def unsupported(self, program: Program) -> list[Unsupported]:
        return []

    def compile(self, program: Program) -> Executable:
        forward = program.module().forward
        if type(self).at_compile is not None:
            type(self).at_compile()
        count = 0

        def run(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            nonlocal count
            count += 1
            with torch.no_grad():
                return self.spoil(forward(*inputs), inputs, count)

        return Executable(type(self).__name__, program.signature, run)

    def spoil(self, outputs: Any, inputs: Sequence[torch.Tensor], count: int) -> Any:
        return outputs


@dataclass(frozen=True, slots=True)
class Reopened(Right):
    """Reads the program's weights in each call, as torch does, also where it was opened from its files."""

    name: str = "reopened"

    def compile(self, program: Program) -> Executable:
        made = Right.compile(self, program)
        made.hand_over = lambda directory: (directory / "file").touch()
        return made

    def reopen(self, program: Program, directory: Path) -> Executable:
        assert (directory / "file").exists()
        return self.compile(program)


def _faulty(at_compile: Callable[[], Any] | None = None, spoil: Any = None) -> type[Right]:
    body: dict[str, Any] = {"__slots__": ()}
    if at_compile is not None:
        body["at_compile"] = staticmethod(at_compile)
    if spoil is not None:
        body["spoil"] = lambda self, outputs, inputs, count: spoil(outputs, inputs, count)
    return type("Faulty", (Right,), body)


def _raise() -> None:
    raise BackendError("this op is too new", why="it says so")


def _allocate() -> None:
    held = []
    while True:
        held.append(np.empty(1 << 30, dtype=np.uint8))  # not touched, which takes seconds


def _print() -> None:
    for _ in range(100):
        os.write(1, b"x" * (1 << 20))
        os.write(2, bytes(range(256)) * 64)


def _leak() -> None:
    # In a session of its own, so that no group of ours holds it.
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


def _leave_one_behind() -> None:
    """And says which."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL)
    os.write(1, str(child.pid).encode())
    ctypes.string_at(0)


def _change_everything() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(99)
    os.environ["TSOPT_SPOILT"] = "1"
    os.chdir("/")


def _meet() -> None:
    """Waits until another candidate compiles as well; the sandbox ends a wait that takes too long."""
    place = f"{os.environ['TMPDIR']}/met"
    with open(place, "a") as file:
        file.write("x")
    while os.path.getsize(place) < 2:
        time.sleep(0.01)


def _spin() -> None:
    while True:
        pass


def _write_input(outputs: Any, inputs: Sequence[torch.Tensor], count: int) -> Any:
    inputs[0].add_(1)
    return outputs


def _write_same_memory(outputs: Any, inputs: Sequence[torch.Tensor], count: int) -> Any:
    kept = _write_same_memory.__dict__.setdefault("kept", [torch.empty_like(value) for value in outputs])
    return [mine.copy_(value) for mine, value in zip(kept, outputs, strict=True)]


def _late(fault: Callable[[], Any], after: int) -> Any:
    def spoil(outputs: Any, inputs: Sequence[torch.Tensor], count: int) -> Any:
        if count > after:
            fault()
        return outputs

    return spoil


class WritesWeights(Right):
    """Takes the weights it is given for its own."""

    __slots__ = ()

    def compile(self, program: Program) -> Executable:
        for weight in program.weights.values():
            weight.add_(1)
        return Right.compile(self, program)


class Remembers(Right):
    """Takes its time, but for the input that it has seen last."""

    __slots__ = ()

    def compile(self, program: Program) -> Executable:
        forward, last = program.module().forward, {}

        def run(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            if last.get("input") is not inputs[0]:
                time.sleep(SLOW)
                last.update(input=inputs[0], outputs=forward(*inputs))
            return [value.clone() for value in last["outputs"]]

        return Executable("Remembers", program.signature, run)


Raises = _faulty(_raise)
Collects = _faulty(lambda: None if gc.isenabled() else _raise())
Segfaults = _faulty(lambda: ctypes.string_at(0))
Divides = _faulty(lambda: os.kill(os.getpid(), signal.SIGFPE))
Aborts = _faulty(os.abort)
Exits = _faulty(lambda: os._exit(0))
Sleeps = _faulty(lambda: time.sleep(600))
Spins = _faulty(_spin)
Hungry = _faulty(_allocate)
Noisy = _faulty(_print)
Leaks = _faulty(_leak)
LeavesOneBehind = _faulty(_leave_one_behind)
Changes = _faulty(_change_everything)
Meets, MeetsToo = _faulty(_meet), _faulty(_meet)
NoFile = _faulty(lambda: os.stat("/no/such/compiler"))
WrongValue = _faulty(spoil=lambda outputs, *_: [value + 1 for value in outputs])
WrongType = _faulty(spoil=lambda outputs, *_: [value.double() for value in outputs])
WrongShape = _faulty(spoil=lambda outputs, *_: [value[:1] for value in outputs])
Nan = _faulty(spoil=lambda outputs, *_: [value * float("nan") for value in outputs])
Fewer = _faulty(spoil=lambda outputs, *_: outputs[:-1])
WritesInput = _faulty(spoil=_write_input)
OneBuffer = _faulty(spoil=_write_same_memory)
CrashesWhenTimed = _faulty(spoil=_late(lambda: ctypes.string_at(0), 6))  # it is checked on six inputs before
CrashesLate = _faulty(spoil=_late(lambda: ctypes.string_at(0), 20))  # after the checks
WrongLater = _faulty(spoil=lambda outputs, inputs, count: outputs if count < 10 else [value * 1.5 for value in outputs])
