"""The process that a command runs in: its standard files, the signals that end it, packages that it lacks."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from types import FrameType

from tsopt.errors import BackendError, TsoptError, UsageError
from tsopt.runtime.racing.endings import LOST, ending_of
from tsopt.runtime.racing.processes import NO_TELEMETRY

INTERRUPTED = 128  # and the number of the signal, as shells report it
ENDING = ("SIGTERM", "SIGHUP")
# What pip calls the packages that tsopt imports, where that is a name of its own.
PACKAGES = ("torch", "numpy", "onnx", "onnxscript", "onnx_ir", "onnxruntime", "openvino", "safetensors", "cloudpickle")


UNWRITTEN = "the output cannot be written"


class State:
    """The signal that has ended the command; what it had written by then."""

    signal: int = signal.SIGINT
    written: tuple[str, ...] = ()


def prepare() -> None:
    """Makes sure of standard files, of text that any terminal takes, and that a signal ends all that was started.

    Turns the telemetry of engines off, unless the user has set it.
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
    for name in ENDING:
        ending = getattr(signal, name, None)
        if ending is not None and signal.getsignal(ending) != signal.SIG_IGN:  # nohup wants it ignored
            signal.signal(ending, _end)


def _end(number: int, _: FrameType | None) -> None:
    State.signal = number
    signal.signal(number, signal.SIG_IGN)  # once is enough: what was started is being ended
    raise KeyboardInterrupt


def interrupted() -> int:
    """Says so in one line; the exit code."""
    word = "interrupted" if State.signal == signal.SIGINT else f"ended by {signal.Signals(State.signal).name}"
    sys.stderr.write(f"{word}; {', '.join(State.written) or 'nothing'} was written\n")
    return INTERRUPTED + State.signal


def finish(code: int) -> int:
    """Writes out what stdout holds; the exit code, another one where that fails."""
    try:
        sys.stdout.flush()
    except OSError as error:
        silence_stdout()
        if error.errno == errno.EPIPE:
            return code or unread()
        sys.stderr.write(f"error: {UNWRITTEN}: {error.strerror}\n")
        return code or 2
    return code


def unread() -> int:
    """Whoever read the output has closed it, as `head` does: no mistake, and nobody to tell."""
    silence_stdout()
    return INTERRUPTED + signal.SIGPIPE


def silence_stdout() -> None:
    """What stdout still holds, and whatever comes, goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def known(error: Exception) -> TsoptError | None:
    """An error that is not tsopt's doing, in its words: a package is missing, or the system refuses; else None."""
    if isinstance(error, ImportError):
        return lacking(error)
    ending = ending_of(error)
    if ending not in LOST:
        return None
    if isinstance(error, OSError):
        why = error.strerror or str(error)
        return UsageError("the system refuses", where=str(error.filename or "") or None, why=why)
    return UsageError(ending, why=str(error).partition("\n")[0][:300] or type(error).__name__)


def lacking(error: BaseException | None) -> TsoptError | None:
    """What to install for an import that has failed; None where tsopt does not use such a package."""
    root = (getattr(error, "name", None) or "").partition(".")[0]
    if root not in PACKAGES:
        return None
    if not isinstance(error, ModuleNotFoundError):
        return BackendError(
            f"{root} is installed and cannot be imported", why=str(error)[:300], fix=f"install {root} again"
        )
    if root == "torch":
        return BackendError(
            "torch is not installed",
            why="only bundles for ONNX Runtime run without it, and `doctor`, `verify` and `cache`",
            fix="pip install torch-tsopt, which brings it",
        )
    return BackendError(f"{root} is not installed", fix=f"pip install {root.replace('_', '-')}")
