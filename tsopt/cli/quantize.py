"""`tsopt quantize`: its precision; the table of layers, on the terminal and in a file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tsopt.compiler.precision_names import INT4, INT8, PRECISIONS
from tsopt.errors import UsageError
from tsopt.runtime.layer_table import layer_table

if TYPE_CHECKING:
    from tsopt.cli.saved import Writers
    from tsopt.runtime.report import Report

WRITERS: Writers = {
    ".json": lambda report: json.dumps(report.to_json(), indent=1) + "\n",
    ".md": lambda report: report.markdown + "\n",
    ".html": lambda report: report.html,
}


def check_precision(name: str | None) -> None:
    """Raises UsageError for a precision in which no layer would be in integers."""
    if name in PRECISIONS and name not in (INT8, INT4):
        raise UsageError(
            f"--precision {name} has no integers in it",
            fix=f"leave it out, or use `tsopt export --precision {name}`",
        )


def show(out: Any, report: Report) -> None:
    """Shows a row for each layer, lowest SQNR first."""
    if report.quantization:
        out.say()
        out.table(*layer_table(report.quantization))
