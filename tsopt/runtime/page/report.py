"""A report as one page: the verdict, the race as a chart, the program, the passes, and where the time went."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tsopt.compiler.precision_names import FP32, INT8_STATIC
from tsopt.runtime.backends.candidate import precision_in
from tsopt.runtime.calling.partitioned import KEYS
from tsopt.runtime.layer_table import layer_table
from tsopt.runtime.page.document import framed, render
from tsopt.runtime.page.graph import SCRIPTS, compared
from tsopt.runtime.rendering import amount, arrow, is_busy, milliseconds, ranked, said_of, tail

if TYPE_CHECKING:
    from tsopt.compiler.rewriting.pipeline import PassRecord
    from tsopt.runtime.racing.row import Row
    from tsopt.runtime.report import Report

TEMPLATE = "report.html.jinja"
SHORT = 0.05  # seconds: stages that take less are not shown


@dataclass(frozen=True, slots=True)
class Bar:
    """A candidate in the chart of the race; positions in percent of its width.

    Attributes:
        low, high: where 10 and 90 % of its samples end.
    """

    name: str
    wins: bool
    verdict: str
    ms: str
    speedup: str
    difference: str
    said: tuple[str, ...]
    end: float = 0.0
    low: float = 0.0
    high: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """A pass in the waterfall; `start` and `width` are the time before it and its own, in percent of all passes."""

    name: str
    nodes: str
    weights: str
    ms: str
    rewrites: str
    start: float
    width: float


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of `optimize`; `start` and `width` in percent of the whole time."""

    name: str
    seconds: str
    start: float
    width: float


def page(report: Report) -> str:
    """The page of a report."""
    return render(
        TEMPLATE,
        SCRIPTS if report.graphs else (),
        report=report,
        **(compared(*report.graphs) if report.graphs else {}),
        verdict=_verdict(report),
        bars=list(_bars(report)),
        accuracy=list(_accuracy(report)),
        steps=list(_steps([record for record in report.passes if is_busy(record)])),
        stages=list(_stages(report.stages)),
        seconds=sum(seconds for _, seconds in report.stages),
        layers=layer_table(report.quantization) if report.quantization else None,
        remarks=list(tail(report, stages=False)),  # the page has a chart of them
        again=_again(report),
        besides=_besides(report),
    )


def in_notebook(report: Report) -> str:
    """The page for the output of a cell in a notebook."""
    return framed(page(report), "tsopt report")


def _verdict(report: Report) -> str:
    """The outcome in one sentence."""
    if report.is_eager:
        return f"{report.model} runs in eager mode: {report.why}."
    return f"{report.winner} runs {report.model} {report.why}."


def _bars(report: Report) -> Iterator[Bar]:
    rows = ranked(report)
    widest = max((row.timing.percentile(90) for row in rows if row.timing is not None), default=0.0)
    for row in rows:
        yield _bar(report, row, 100 / widest if widest else 0.0)


def _bar(report: Report, row: Row, scale: float) -> Bar:
    time, accuracy = row.timing, row.accuracy
    places = [0.0] * 3 if time is None else [round(time.percentile(q) * scale, 2) for q in (50, 10, 90)]
    return Bar(
        row.name,
        row.key == report.winner_key,
        row.verdict,
        "" if time is None else milliseconds(time.p50),
        "1.00x" if row.verdict == "baseline" else "" if row.speedup is None else str(row.speedup),
        "" if accuracy is None else f"{accuracy.max_difference:.1e}",
        tuple(said_of(report, row)),
        *places,
    )


def _accuracy(report: Report) -> Iterator[tuple[str, ...]]:
    """For each input set on which the winner was compared with eager: the largest output and the largest difference."""
    for row in report.rows:
        if row.key == report.winner_key and row.accuracy is not None:
            found = row.accuracy
            for kind, size, difference in zip(found.inputs, found.sizes, found.differences, strict=False):
                yield kind, f"{size:.3g}", f"{difference:.1e}", f"{difference / size:.1e}" if size else "-"


def _steps(records: Sequence[PassRecord]) -> Iterator[Step]:
    total = sum(record.seconds for record in records) or 1.0
    spent = 0.0
    for record in records:
        rules = sorted({item.rule for item in record.done})
        yield Step(
            record.name,
            arrow(record.before.nodes, record.after.nodes),
            arrow(record.before.weight_bytes, record.after.weight_bytes, amount),
            f"{record.seconds * 1e3:.0f}",
            record.failed or ", ".join(rules),
            round(100 * spent / total, 2),
            round(100 * record.seconds / total, 2),
        )
        spent += record.seconds


def _stages(stages: Sequence[tuple[str, float]]) -> Iterator[Stage]:
    total = sum(seconds for _, seconds in stages) or 1.0
    spent = 0.0
    for name, seconds in stages:
        if seconds >= SHORT:
            yield Stage(name, f"{seconds:.1f}", round(100 * spent / total, 2), round(100 * seconds / total, 2))
        spent += seconds


def _again(report: Report) -> str:
    """The call that compiles what has won, without a race of the others."""
    if report.is_eager:
        return "tsopt.optimize(model, example_input)"
    frontend, precision = KEYS.get(report.winner), precision_in(report.winner_key)
    options = [f"backends=({report.winner_key!r},)" if frontend is None else f"frontend={frontend!r}"]
    if precision == INT8_STATIC:
        options.append("calibration=data")
    elif precision == FP32 and _is_lossy(report):
        options.append(f"precision={FP32!r}")
    return f"tsopt.optimize(model, example_input, {', '.join(options)})"


def _besides(report: Report) -> str:
    """Which of the other options, which a report does not know, belong to that call."""
    if report.is_eager:
        return ""
    if precision_in(report.winner_key) == FP32 and _is_lossy(report):
        return "with the other options as they were, but without calibration, metric, max_drop and keep_float"
    return "with the other options as they were"


def _is_lossy(report: Report) -> bool:
    """Whether lower precisions were in the race."""
    return any(precision_in(row.key) != FP32 for row in report.rows)
