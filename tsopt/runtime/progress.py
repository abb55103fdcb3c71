"""Shows what `optimize` is doing: a live table of its stages where one can be redrawn, otherwise lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from tsopt.runtime.racing.environment import is_installed
from tsopt.runtime.stages import Stages, stage_of, step_of
from tsopt.runtime.untrusted_text import printable

ROWS = 12  # stages that are shown; a sweep has more
SILENCE = 10.0  # seconds without a line: then the next step gets one, even if its stage has one
REFRESH = 4  # times a second: candidates are timed meanwhile


@contextmanager
def shown(title: str, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Yields what is to be called with the name of each step, which is shown with the seconds since the start.

    Args:
        title: what is being worked on.
        console: where; stderr when it is None.
    """
    console = console or Console(stderr=True, highlight=False)
    title = printable(title)
    if not _can_redraw(console):
        yield _stage_lines(title, time.perf_counter(), console)
        return
    table = _StageTable(title, console.encoding.startswith("utf"))
    with Live(console=console, transient=True, refresh_per_second=REFRESH, get_renderable=table.render) as live:

        def show(text: str) -> None:
            table.step(text)
            live.refresh()

        yield show


def _can_redraw(console: Console) -> bool:
    """Whether a table can take the place of the one before: not in a log, even if a variable asks for colours there."""
    if console.is_jupyter:
        return is_installed("ipywidgets")
    is_tty = getattr(console.file, "isatty", lambda: False)
    return console.is_terminal and console.is_interactive and not console.is_dumb_terminal and bool(is_tty())


class _StageTable:
    """The stages in the order in which they began, with their seconds, and what is being done in the one that is on.

    Args:
        is_unicode: whether it may consist of more than ASCII; each replaced character would make a line longer.
    """

    def __init__(self, title: str, is_unicode: bool) -> None:
        self._title, self._start, self._step = title, time.perf_counter(), ""
        self._stages = Stages()
        self._spinner = Spinner("dots" if is_unicode else "line")
        self._overflow = "ellipsis" if is_unicode else "crop"

    def step(self, text: str) -> None:
        self._stages.step(text)
        self._step = text

    def render(self) -> Table:
        """The table as it is now."""
        table = Table.grid(padding=(0, 1))
        # NOTE: one line each, however narrow the terminal: a wrapped line would make the table jump.
        for name, justify in (("", "left"), ("stage", "left"), ("seconds", "right"), ("step", "left")):
            table.add_column(name, justify=justify, no_wrap=True, overflow=self._overflow)  # type: ignore[arg-type]
        table.add_row("", Text(self._title), Text(f"{time.perf_counter() - self._start:.0f} s"), "")
        current = stage_of(self._step)
        for stage, seconds in self._stages.spent()[-ROWS:]:
            is_on = stage == current
            cells = [Text(printable(text), style="" if is_on else "dim") for text in (stage, f"{seconds:.1f} s")]
            doing = Text(printable(step_of(self._step))) if is_on else ""
            table.add_row(self._spinner if is_on else "", *cells, doing)
        return table


def _stage_lines(title: str, start: float, console: Console) -> Callable[[str], None]:
    if console.is_jupyter:  # lines need no widgets, and no display
        console = Console(file=console.file, force_jupyter=False, highlight=False)
    begun: set[str] = set()  # candidates are compiled and checked in turn: each stage is said once
    said = start

    def show(text: str) -> None:
        nonlocal said
        stage, now = stage_of(text), time.perf_counter()
        if stage in begun and now - said < SILENCE:
            return
        doing = text if stage in begun else stage
        begun.add(stage)
        said = now
        console.print(f"{title}: {printable(doing)} ({now - start:.1f} s)", markup=False, soft_wrap=True)

    return show
