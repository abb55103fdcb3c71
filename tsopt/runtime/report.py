"""What was measured, as values; rendering to text, markdown and JSON beside them. Prints nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tsopt.compiler.pipeline import PassRecord
from tsopt.runtime.accuracy import Verdict
from tsopt.runtime.environment import Environment
from tsopt.runtime.timing import Speedup, Timing

COLUMNS = ("candidate", "p50 ms", "p90 ms", "speed-up [95 %]", "verdict", "max diff", "compile s")


@dataclass(frozen=True, slots=True)
class Row:
    """One candidate. status: ok, wrong, failed or unsupported; reason says why it is not ok."""

    name: str
    status: str = "ok"
    reason: str = ""
    timing: Timing | None = None
    speedup: Speedup | None = None
    accuracy: Verdict | None = None
    compile_seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        if self.status != "ok":
            return self.status
        return self.speedup.verdict if self.speedup is not None else "baseline"

    def cells(self) -> tuple[str, ...]:
        """The row under COLUMNS."""
        time = self.timing
        difference = "" if self.accuracy is None else f"{self.accuracy.max_difference:.1e}"
        return (
            self.name,
            "-" if time is None else _ms(time.p50),
            "-" if time is None else _ms(time.p90),
            "1.00x" if self.verdict == "baseline" else "-" if self.speedup is None else str(self.speedup),
            self.verdict,
            difference or "-",
            f"{self.compile_seconds:.1f}" if self.compile_seconds else "-",
        )


@dataclass(frozen=True, slots=True)
class Report:
    """A race and what led to it.

    Attributes:
        winner: the row that `fast(x)` runs; `why` says how it was chosen.
        passes: a record for each pass that was run.
        files: what was written, by kind.
        signatures: what became of calls of another form: (form, outcome).
    """

    model: str
    rows: tuple[Row, ...]
    winner: str
    why: str
    passes: tuple[PassRecord, ...]
    nodes: tuple[int, int]
    capture_seconds: float
    environment: Environment
    numerics: str
    files: tuple[tuple[str, str], ...] = ()
    signatures: tuple[tuple[str, str], ...] = ()

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    @property
    def speedup(self) -> float:
        """How many times faster the winner is than eager; 1.0 when eager is the winner."""
        found = self.row(self.winner).speedup
        return found.ratio if found is not None else 1.0

    def with_files(self, files: Iterable[tuple[str, str]]) -> Report:
        return replace(self, files=(*self.files, *files))

    def with_signature(self, form: str, outcome: str) -> Report:
        return replace(self, signatures=(*self.signatures, (form, outcome)))

    @property
    def text(self) -> str:
        """For a terminal: the table, the passes, the reasons."""
        lines = [f"{self.model}: {self.winner} wins, {self.why}", ""]
        lines += _table(COLUMNS, [row.cells() for row in self.rows])
        reasons = [f"  {row.name}: {row.reason}" for row in self.rows if row.reason]
        lines += ["", *reasons] if reasons else []
        lines += ["", *_table(PASS_COLUMNS, pass_cells(self.passes)), ""]
        total = sum(record.seconds for record in self.passes)
        lines.append(
            f"op nodes {self.nodes[0]} -> {self.nodes[1]}; numerics {self.numerics}; "
            f"capture {self.capture_seconds:.2f} s, passes {total:.2f} s"
        )
        accuracy = self.row(self.winner).accuracy
        if accuracy is not None:
            lines.append(f"verified: {accuracy}")
            lines += [f"  not compared: {reason}" for reason in accuracy.skipped]
        lines += [f"note ({row.name}): {note}" for row in self.rows for note in row.notes if row.name == self.winner]
        lines += [f"call of another form, {form}: {outcome}" for form, outcome in self.signatures]
        lines += [f"{kind}: {path}" for kind, path in self.files]
        return "\n".join([*lines, f"on {self.environment}"])

    @property
    def markdown(self) -> str:
        """The table and the passes as GitHub markdown."""
        lines = [
            f"### {self.model}: {self.winner}, {self.why}",
            "",
            *_markdown(COLUMNS, [r.cells() for r in self.rows]),
        ]
        lines += ["", *_markdown(PASS_COLUMNS, pass_cells(self.passes)), "", str(self.environment)]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "winner": self.winner,
            "why": self.why,
            "rows": [_row_json(row) for row in self.rows],
            "passes": [pass_json(record) for record in self.passes],
            "nodes": {"before": self.nodes[0], "after": self.nodes[1]},
            "capture_seconds": self.capture_seconds,
            "numerics": self.numerics,
            "environment": self.environment.to_json(),
            "files": dict(self.files),
            "signatures": [list(item) for item in self.signatures],
        }

    def __str__(self) -> str:
        return self.text


PASS_COLUMNS = ("pass", "nodes", "done", "nearly", "ms")


def pass_cells(records: Sequence[PassRecord]) -> list[tuple[str, ...]]:
    """One row for each pass under PASS_COLUMNS."""
    return [
        (
            record.name,
            f"{record.nodes_before} -> {record.nodes_after}",
            _counted(done.rule for done in record.done) or "-",
            _counted(declined.rule for declined in record.declined) or "-",
            f"{record.seconds * 1e3:.0f}",
        )
        for record in records
    ]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Callables timed side by side; the first is the baseline."""

    rows: tuple[Row, ...]
    environment: Environment | None = field(default=None)

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def __str__(self) -> str:
        return "\n".join(_table(COLUMNS[:5], [row.cells()[:5] for row in self.rows]))


def _counted(names: Iterable[str]) -> str:
    return ", ".join(f"{name} x{count}" if count > 1 else name for name, count in Counter(names).items())


def _ms(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *rows]]


def _row_json(row: Row) -> dict[str, Any]:
    out: dict[str, Any] = {"name": row.name, "status": row.status, "verdict": row.verdict, "reason": row.reason}
    if row.timing is not None:
        out |= {
            "p50_ms": row.timing.p50,
            "p90_ms": row.timing.p90,
            "p99_ms": row.timing.percentile(99),
            "std_percent": row.timing.std_percent,
            "first_call_ms": row.timing.first_call,
            "rounds": len(row.timing.samples),
        }
    if row.speedup is not None:
        out["speedup"] = {"ratio": row.speedup.ratio, "low": row.speedup.low, "high": row.speedup.high}
    if row.accuracy is not None:
        out["accuracy"] = {
            "ok": row.accuracy.ok,
            "test": row.accuracy.test,
            "max_difference": row.accuracy.max_difference,
            "inputs": list(row.accuracy.inputs),
            "skipped": list(row.accuracy.skipped),
        }
    return out | {"compile_seconds": row.compile_seconds, "notes": list(row.notes)}


def pass_json(record: PassRecord) -> dict[str, Any]:
    """One record for machines."""
    return {
        "name": record.name,
        "changed": record.changed,
        "nodes": {"before": record.nodes_before, "after": record.nodes_after},
        "weight_bytes": {"before": record.bytes_before, "after": record.bytes_after},
        "seconds": record.seconds,
        "numerics": record.numerics.name,
        "done": [{"rule": d.rule, "where": d.where} for d in record.done],
        "declined": [{"rule": d.rule, "where": d.where, "reason": d.reason} for d in record.declined],
    }
