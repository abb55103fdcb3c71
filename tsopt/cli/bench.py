"""`tsopt bench`: parsing its lists, showing the sweep and saving it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsopt.cli import process
from tsopt.cli.export import directories
from tsopt.cli.model_file import load_data
from tsopt.cli.model_sources import load_subject
from tsopt.cli.options import Subject, Timing, race_options
from tsopt.cli.saved import save
from tsopt.errors import UsageError

if TYPE_CHECKING:
    from tsopt.cli.saved import Writers
    from tsopt.sweeps import Sweep

WRITERS: Writers = {
    ".json": lambda sweep: json.dumps(sweep.to_json(), indent=1) + "\n",
    ".csv": lambda sweep: sweep.to_csv(),
    ".md": lambda sweep: sweep.markdown + "\n",
    ".html": lambda sweep: sweep.html,
}


def run(
    out: Any,
    subject: Subject,
    timing: Timing,
    *,
    settings: Mapping[str, Sequence[Any]],
    outputs: Sequence[Path | None],
) -> str:
    """Times a model in each setting, and shows and saves the result.

    Args:
        settings: values to try, by option of `tsopt.sweep`; empty: its default.
        outputs: where the table is also saved.

    Returns:
        Why this machine stopped every candidate; empty if some could be tried.
    """
    places = [path for path in outputs if path is not None]
    options = race_options(subject, timing)
    with out.progress(Path(subject.model).name) as tell:
        tell("import torch")
        loaded = load_subject(out, subject)
        from tsopt.sweeps import sweep

        given = {name: values for name, values in settings.items() if values}
        options |= load_data(timing, loaded.files)
        found = sweep(loaded.model, loaded.example_input, progress=tell, **given, **options)
        with directories(places) as new:
            for path in places:
                save(found, path, WRITERS)
                process.State.written += (str(path),)
    report = found.results[0].report
    if len(found.results) == 1 and report is not None:
        out.report(report)
    else:
        show(out, found)
    for directory in new:
        out.say(f"created the directory {directory}")
    for path in places:
        out.say(f"saved: {path}")
    return next((item.report.stopped for item in found.results if item.report and item.report.stopped), "")


def words(text: str | None, option: str) -> list[str]:
    """The items of `a,b`. Raises UsageError for an empty item."""
    parts = [part.strip() for part in text.split(",")] if text is not None else []
    if not all(parts):
        raise UsageError(f"{option} {text!r} has an empty item", fix=f"write {option} A,B")
    return list(dict.fromkeys(parts))


def numbers(text: str | None, option: str) -> list[int]:
    """The numbers of `1,8,32`. Raises UsageError for anything but integers from 1."""
    found = words(text, option)
    for part in found:
        if not re.fullmatch(r"[0-9]{1,9}", part) or int(part) < 1:
            raise UsageError(
                f"{option} {text!r}: {part!r} is not an integer from 1 to 999999999", fix=f"write {option} 1,8,32"
            )
    return [int(part) for part in found]


def show(out: Any, sweep: Sweep) -> None:
    """The table with the winner of each setting marked, the reasons, the machine."""
    from tsopt.sweeps import COLUMNS

    out.json(sweep.to_json())
    out.table(COLUMNS, sweep.cells(), style_column=len(COLUMNS) - 1)
    out.say()
    for line in (*sweep.reasons, "* winner in its setting", *sweep.machine):
        out.say(line)
