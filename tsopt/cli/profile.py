"""`tsopt profile`: the time of each layer, on the terminal and in a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsopt.cli import process
from tsopt.cli.export import directories, optimized_as_one_graph
from tsopt.cli.options import Subject, Timing, race_options
from tsopt.cli.saved import save
from tsopt.errors import UsageError

if TYPE_CHECKING:
    from tsopt.cli.saved import Writers
    from tsopt.runtime.profiling.profile import Profile

WRITERS: Writers = {
    ".json": lambda profile: json.dumps(profile.to_json(), indent=1) + "\n",
    ".md": lambda profile: profile.markdown + "\n",
    ".html": lambda profile: profile.html,
}


def check_frontend(subject: Subject) -> None:
    """Raises UsageError for a frontend whose result has no layers to time."""
    if subject.frontend == "parts":
        raise UsageError("a partitioned model cannot be profiled", fix="use --frontend auto")


def run(
    out: Any,
    subject: Subject,
    timing: Timing,
    *,
    threads: int | None,
    cache: bool,
    top: int,
    training: tuple[int, int] | None,
    outputs: Sequence[Path | None],
) -> None:
    """Optimizes a model, times each layer, and shows and saves the result.

    Args:
        top: layers to show.
        training: samples and epochs to estimate the time of.
        outputs: where the profile is also saved.
    """
    options, places = race_options(subject, timing), [path for path in outputs if path is not None]
    with directories(places) as new, out.progress(Path(subject.model).name) as tell:
        options |= {"threads": threads, "cache": cache, "progress": tell}
        fast = optimized_as_one_graph(out, subject, timing, options, _check_on_cpu)
        tell("profile")
        found = fast.profile()
        if training is not None:
            found = found.with_training(*training)
        for path in places:
            save(found, path, WRITERS)
            process.State.written += (str(path),)
    _show(out, found, top)
    out.say(f"{fast.report.winner} wins, {fast.report.why}")
    for directory in new:
        out.say(f"created the directory {directory}")
    for path in places:
        out.say(f"saved: {path}")


def _check_on_cpu(example_input: Any) -> None:
    from tsopt.compiler.calls.example import as_examples
    from tsopt.compiler.calls.structure import flatten
    from tsopt.runtime.profiling.engines import check_on_cpu

    for call in as_examples(example_input):
        check_on_cpu(flatten((call.args, call.kwargs))[0])


def _show(out: Any, found: Profile, top: int) -> None:
    out.json(found.to_json())
    out.table(found.header, found.cells(top))
    out.say()
    for remark in found.remarks:
        out.say(remark)
