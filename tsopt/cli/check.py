"""`tsopt check`: a comparison with a baseline, on the terminal and in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsopt.cli import process
from tsopt.cli.export import directories
from tsopt.cli.model_file import load_data
from tsopt.cli.model_sources import load_subject
from tsopt.cli.options import Subject, Timing, race_options
from tsopt.cli.saved import save

if TYPE_CHECKING:
    from tsopt.cli.saved import Writers
    from tsopt.regression.outcome import Check

WRITERS: Writers = {
    ".json": lambda check: json.dumps(check.to_json(), indent=1) + "\n",
    ".md": lambda check: check.markdown + "\n",
}


def run(
    out: Any, subject: Subject, timing: Timing, baseline: Path, output: Path | None, given: dict[str, Any]
) -> Check:
    """Compares a model with a baseline, or writes the baseline; shows and saves the comparison.

    Args:
        output: where the comparison is also saved.
        given: further options of `tsopt.check`.
    """
    written = [*([baseline] if given["update"] else []), *([output] if output is not None else [])]
    options = race_options(subject, timing) | given
    with directories(written) as new, out.progress(Path(subject.model).name) as tell:
        tell("import torch")
        loaded = load_subject(out, subject)
        from tsopt.regression.check import check

        options |= {"trust": subject.trust, "progress": tell} | load_data(timing, loaded.files)
        found = check(loaded.model, loaded.example_input, baseline, **options)
        process.State.written += (str(baseline),) if given["update"] else ()
        if output is not None:
            save(found, output, WRITERS)
            process.State.written += (str(output),)
    out.json(found.to_json())
    out.say(found.text)
    if not found.ok:
        out.warn(found.sentence)
    for directory in new:
        out.say(f"created the directory {directory}")
    for path in written:
        out.say(f"saved: {path}")
    return found
