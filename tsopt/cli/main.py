"""Running a command line: exit codes, and what is said of errors.

Exit codes: 0 success; 1 verification failed, a regression was found, or this machine stopped every candidate of a race;
2 an error in the command line, the model or a file; 70 an error in tsopt itself; 130 interrupted; 141 the output pipe
was closed; 143 terminated.
"""

from __future__ import annotations

import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import typer

from tsopt.cli import beside, process
from tsopt.cli.app import app
from tsopt.errors import TsoptError, UsageError
from tsopt.runtime.racing.outcomes import NoCandidate

INTERNAL = 70  # as in sysexits.h; not 1, which a gate would take for a regression


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and returns its exit code. A user's mistake never ends in a traceback."""
    arguments = _split_levels(sys.argv[1:] if arguments is None else arguments)
    process.start()
    try:
        command: Callable[..., Any] = typer.main.get_command(app)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoCandidate)  # shown as a line, with an exit code
            result = command(arguments, prog_name="tsopt", standalone_mode=False)
        code = result if isinstance(result, int) else 0
        # NOTE: typer turns KeyboardInterrupt into an exit code.
        return process.interrupted() if code == process.INTERRUPTED + signal.SIGINT else code
    except TsoptError as error:
        return _refused(error, arguments)
    except SystemExit as error:  # a model may call sys.exit(0), which must not look like success
        if isinstance(error.__context__, BrokenPipeError):  # how rich ends the program
            return process.unread()
        return _refused(_ended(error), arguments)
    except BrokenPipeError:
        return process.unread()
    except KeyboardInterrupt:
        return process.interrupted()
    except Exception as error:  # click's own errors have show() and an exit code; anything else is ours
        return _unexpected(error, arguments)
    finally:
        beside.forget()


def _refused(error: TsoptError, arguments: list[str]) -> int:
    try:
        (process.State.output or process.output("--json" in arguments)).error(error)
    except ImportError:  # rich itself is missing
        sys.stderr.write(f"error: {error}\n")
    except BrokenPipeError:
        return process.unread()
    if process.State.written:
        sys.stderr.write(f"{process.already_written()}\n")
    return error.exit_code


def _ended(error: SystemExit) -> UsageError:
    *_, frame = traceback.extract_tb(error.__traceback__)
    return UsageError(
        f"the model exits the process (sys.exit({error.code!r})) when called",
        where=f"{frame.filename}:{frame.lineno}: {frame.line}",
        fix="raise an exception instead",
    )


def _split_levels(arguments: list[str]) -> list[str]:
    """`-O2` as `-O 2`: the form known from compilers."""
    out: list[str] = []
    for item in arguments:
        out += ["-O", item[2:]] if item.startswith("-O") and item[2:].isdigit() else [item]
    return out


def _unexpected(error: Exception, arguments: list[str]) -> int:
    if type(error).__name__ == "Abort":
        return process.interrupted()
    if hasattr(error, "show") and hasattr(error, "exit_code"):
        error.show()
        return int(error.exit_code)
    found = process.known(error)
    if found is None:
        traceback.print_exception(error)
        sys.stderr.write("internal error in tsopt: please report it together with the traceback above\n")
        return INTERNAL
    return _refused(found, arguments)


def run() -> None:
    """The console script."""
    process.prepare()
    sys.exit(process.finish(main()))
