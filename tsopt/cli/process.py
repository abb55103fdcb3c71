"""The process of a command: its output, standard streams, signals, missing packages."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from types import FrameType
from typing import Any, TextIO

from tsopt.errors import BackendError, TsoptError, UsageError
from tsopt.runtime.racing.outcomes import LOST, ending_of
from tsopt.runtime.telemetry import NO_TELEMETRY

INTERRUPTED = 128  # plus the number of the signal, as shells report it
ENDING = ("SIGTERM", "SIGHUP")
# Packages that tsopt imports, by their import names.
PACKAGES = ("torch", "numpy", "onnx", "onnxscript", "onnx_ir", "onnxruntime", "openvino", "safetensors", "cloudpickle")


UNWRITTEN = "the output cannot be written"


class State:
    """The output of the running command, the signal that ended it, and the files written by then.

    results: stdout of a process of our own, which nothing else writes to.
    """

    output: Any = None
    results: TextIO | None = None
    signal: int = signal.SIGINT
    written: tuple[str, ...] = ()


def start() -> None:
    """Forgets the state of an earlier command in the same process."""
    State.output, State.signal, State.written = None, signal.SIGINT, ()


def output(as_json: bool = False, quiet: bool = False) -> Any:
    """A `console.Output`, which errors that end the command are written to as well."""
    from tsopt.cli.console import Output  # imports rich

    State.output = Output(as_json=as_json, quiet=quiet, stream=results())
    if State.results is not None:  # until now it was stdout, for `--help` and `--version`
        sys.stdout = sys.__stdout__ or sys.stderr
    return State.output


def results() -> TextIO:
    """Where results go."""
    return State.results or sys.stdout


def prepare() -> None:
    """Opens missing standard streams, escapes what a terminal cannot encode, and turns signals into clean-up.

    Keeps stdout for results: what models, libraries and child processes print to it goes to stderr. Disables the
    telemetry of engines, unless the user has set it.
    """
    for name, value in NO_TELEMETRY.items():
        os.environ.setdefault(name, value)
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed by `>&-`: the next file to be opened would get its number
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    State.results = open(os.dup(1), "w", encoding=sys.stdout.encoding, errors="backslashreplace")  # noqa: SIM115
    os.dup2(2, 1)
    sys.stdout = State.results
    for name in ENDING:
        ending = getattr(signal, name, None)
        if ending is not None and signal.getsignal(ending) != signal.SIG_IGN:  # nohup wants it ignored
            signal.signal(ending, _end)


def _end(number: int, _: FrameType | None) -> None:
    State.signal = number
    signal.signal(number, signal.SIG_IGN)  # once is enough: child processes are being ended
    raise KeyboardInterrupt


def interrupted() -> int:
    """Reports the interruption in one line and returns the exit code."""
    word = "interrupted" if State.signal == signal.SIGINT else f"terminated by {signal.Signals(State.signal).name}"
    written = already_written() or "nothing was written"
    sys.stderr.write(f"{word}; {written}\n")
    return INTERRUPTED + State.signal


def already_written() -> str:
    """What a command that ends early has left; empty if it has written no file."""
    return f"already written: {', '.join(State.written)}" if State.written else ""


def finish(code: int) -> int:
    """Flushes stdout. Returns the exit code, or another one if that fails."""
    try:
        results().flush()
    except OSError as error:
        silence_stdout()
        if error.errno == errno.EPIPE:
            return code or unread()
        sys.stderr.write(f"error: {UNWRITTEN}: {error.strerror}\n")
        return code or 2
    return code


def unread() -> int:
    """The reader has closed the pipe, as `head` does: not an error."""
    silence_stdout()
    return INTERRUPTED + signal.SIGPIPE


def silence_stdout() -> None:
    """Discards what stdout still holds, and all further output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), results().fileno())


def known(error: Exception) -> TsoptError | None:
    """The error to report where tsopt is not at fault: a missing package, or an error of the system; else None."""
    if isinstance(error, ImportError):
        return lacking(error)
    ending = ending_of(error)
    if ending not in LOST:
        return None
    if isinstance(error, OSError):
        why = error.strerror or str(error)
        try:
            results().flush()
        except OSError:  # it was the output, which holds what it could not write until it is silenced
            silence_stdout()
            return UsageError(UNWRITTEN, why=why)
        return UsageError("the operating system reported an error", where=str(error.filename or "") or None, why=why)
    return UsageError(ending, why=str(error).partition("\n")[0][:300] or type(error).__name__)


def lacking(error: BaseException | None) -> TsoptError | None:
    """What to install after a failed import; None for a package that tsopt does not use."""
    root = (getattr(error, "name", None) or "").partition(".")[0]
    if root not in PACKAGES:
        return None
    if not isinstance(error, ModuleNotFoundError):
        return BackendError(
            f"{root} is installed but cannot be imported", why=str(error)[:300], fix=f"reinstall {root}"
        )
    if root == "torch":
        return BackendError(
            "torch is not installed",
            why="only ONNX Runtime bundles and the commands `doctor`, `verify` and `cache` work without it",
            fix="pip install torch-tsopt, which also installs torch",
        )
    return BackendError(f"{root} is not installed", fix=f"pip install {root.replace('_', '-')}")
