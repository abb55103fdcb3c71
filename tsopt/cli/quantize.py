"""`tsopt quantize`: the table of layers, on the terminal and in a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsopt.cli.export import check_place
from tsopt.errors import UsageError
from tsopt.runtime.layer_table import LAYER_COLUMNS, by_loss

if TYPE_CHECKING:
    from tsopt.runtime.report import Report

WRITERS: dict[str, Callable[[Any], str]] = {
    ".json": lambda report: json.dumps(report.to_json(), indent=1) + "\n",
    ".md": lambda report: report.markdown + "\n",
}


def check_report(path: Path | None) -> None:
    """Raises UsageError or BundleError for a file that cannot be written, before the work."""
    if path is None:
        return
    if path.suffix not in WRITERS:
        raise UsageError(f"--report {path} has an unknown suffix", fix=f"use one of the suffixes {', '.join(WRITERS)}")
    check_place("report", path)


def save(report: Report, path: Path) -> None:
    """Writes a report in the format of the suffix; the file is complete or not written at all."""
    from tsopt.runtime.bundles.staging import staged

    with staged(path, unpack=True) as directory:
        (directory / path.name).write_text(WRITERS[path.suffix](report))


def show(out: Any, report: Report) -> None:
    """A row for each layer, those that lose most first."""
    if report.quantization:
        out.say()
        out.table(LAYER_COLUMNS, [layer.cells() for layer in by_loss(report.quantization)])
