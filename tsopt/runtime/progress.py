"""Shows what `optimize` is doing: a line that changes on a terminal or in a notebook, one for each stage in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

from tsopt.runtime.stages import stage_of
from tsopt.runtime.untrusted_text import printable


@contextmanager
def shown(title: str, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Yields what is to be called with the name of each step, which is shown with the seconds since the start.

    Args:
        title: what is being worked on.
        console: where; stderr when it is None.
    """
    console = console or Console(stderr=True, highlight=False)
    start, title = time.perf_counter(), printable(title)
    if not (console.is_terminal or console.is_jupyter):
        yield _stage_lines(title, start, console)
        return

    def show(text: str) -> None:
        seconds = time.perf_counter() - start
        status.update(f"{escape(title)}: {escape(printable(text))} [dim]{seconds:.0f} s[/dim]")

    with console.status(escape(title)) as status:
        yield show


def _stage_lines(title: str, start: float, console: Console) -> Callable[[str], None]:
    last = ""

    def show(text: str) -> None:
        nonlocal last
        stage = stage_of(text)
        if stage != last:
            last = stage
            line = f"{title}: {printable(stage)} ({time.perf_counter() - start:.1f} s)"
            console.print(line, markup=False, soft_wrap=True)

    return show
