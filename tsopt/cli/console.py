"""What the user sees: progress with phase and time, tables, and errors. Knows no command."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tsopt.cli.process import UNWRITTEN, silence_stdout
from tsopt.errors import UsageError
from tsopt.runtime.progress import shown
from tsopt.runtime.untrusted_text import printable

if TYPE_CHECKING:
    from tsopt.errors import TsoptError
    from tsopt.runtime.report import Report

STYLES = {
    "faster": "green",
    "undecided": "yellow",
    "slower": "yellow",
    "wrong": "red",
    "not accurate enough": "yellow",
    "failed": "red",
    "crashed": "red",
    "exited": "red",
    "timed out": "red",
    "out of memory": "red",
    "system error": "red",
    "missing": "dim",
    "unsupported": "dim",
    "no gain": "dim",
    "not checked": "dim",
    "not timed": "dim",
}


class Output:
    """Where results and progress go: results to stdout, progress and errors to stderr.

    Args:
        stream: stdout, or what has taken its place.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False, stream: TextIO | None = None) -> None:
        self.as_json, self.quiet = as_json, quiet
        self.stream = stream or sys.stdout
        # A pipe has no width: a table cut at 80 columns would be worth nothing in a log.
        wide = None if self.stream.isatty() else 160
        self.out = Console(file=self.stream, width=wide, soft_wrap=False, highlight=False)
        self.err = Console(stderr=True, highlight=False)

    @contextmanager
    def progress(self, title: str) -> Iterator[Callable[[str], None]]:
        """A line with the phase and the time since the start, on a terminal; elsewhere a line for each stage.

        Nothing with -q or --json. What the model prints at work goes to stderr: stdout holds the result.
        """
        if self.quiet or self.as_json:
            with redirect_stdout(sys.stderr):
                yield lambda text: None
            return
        with shown(title, self.err) as tell, redirect_stdout(sys.stderr):
            yield tell

    def say(self, text: str = "") -> None:
        if not self.quiet and not self.as_json:
            with self._written():
                self.out.print(Text(printable(text)), soft_wrap=True)

    def json(self, value: Any) -> None:
        if self.as_json:
            with self._written():
                self.stream.write(json.dumps(value, indent=1) + "\n")

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Raises UsageError where stdout takes no more, and has the error on stderr then."""
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            silence_stdout()
            self.as_json = False
            raise UsageError(UNWRITTEN, why=error.strerror) from error

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]], *, style_column: int | None = None) -> None:
        if self.quiet or self.as_json:
            return
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in header:
            table.add_column(name, overflow="fold", no_wrap=name in ("p50 ms", "p90 ms", "nodes"))
        for row in rows:
            style = STYLES.get(row[style_column], "") if style_column is not None else ""
            table.add_row(*(Text(printable(cell)) for cell in row), style=style)
        with self._written():
            self.out.print(table)

    def report(self, report: Report) -> None:
        """The winner, the race, the passes, the files; as wide as the terminal, coloured there."""
        self.json(report.to_json())
        if self.quiet or self.as_json:
            return
        bar = "\N{FULL BLOCK}" if self.out.is_terminal and "utf" in self.out.encoding.lower() else "#"
        lines = report.lines(width=self.out.width if self.out.is_terminal else None, bar=bar)
        with self._written():
            for number, line in enumerate(lines):
                style = "bold" if number == 0 else STYLES.get(line.verdict, "")
                self.out.print(Text(line.text, style=style), soft_wrap=True)

    def note(self, text: str) -> None:
        """A line on stderr, which -q leaves out."""
        if not self.quiet:
            self.err.print(Text(printable(text)), soft_wrap=True)

    def warn(self, text: str) -> None:
        """A line on stderr, whatever was asked for: it goes with an exit code."""
        self.err.print(Text.assemble(("warning: ", "bold yellow"), printable(text)), soft_wrap=True)

    def error(self, error: TsoptError) -> None:
        if self.as_json:
            fields = {"error": error.what, "where": error.where, "why": error.why, "fix": error.fix}
            try:
                with self._written():
                    self.stream.write(json.dumps(fields, indent=1) + "\n")
                    self.stream.flush()
                return
            except UsageError as unwritten:
                self.error(unwritten)
        self.err.print(Text.assemble(("error: ", "bold red"), printable(error.what)), soft_wrap=True)
        for name, text in (("where", error.where), ("why", error.why), ("fix", error.fix)):
            if text:
                self.err.print(Text.assemble((f"  {name}: ", "bold"), printable(text)), soft_wrap=True)
