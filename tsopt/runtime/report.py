"""What was measured, as values and as JSON; text and markdown are in rendering.py. Prints nothing."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from tsopt.compiler.graph.drawing import Drawn
from tsopt.compiler.rewriting.pass_base import Declined, Done
from tsopt.compiler.rewriting.pipeline import PassRecord
from tsopt.errors import UsageError
from tsopt.runtime.layer_table import LayerRecord, layer_table
from tsopt.runtime.racing.environment import Environment
from tsopt.runtime.racing.outcomes import stopped
from tsopt.runtime.racing.row import MODEL, Row
from tsopt.runtime.rendering import (
    COLUMNS,
    PASS_COLUMNS,
    Line,
    markdown_blocks,
    markdown_table,
    pass_cells,
    ranked,
    report_lines,
    row_cells,
    text_table,
)
from tsopt.runtime.untrusted_text import markdown_cell

Event = TypeVar("Event", Done, Declined)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A race and what led to it.

    Attributes:
        winner_key: the key of the row that `fast(x)` runs; `why` says how it was chosen.
        passes: a record for each pass that was run.
        pass_seconds: the whole pipeline, with the checks before the first pass and after the last.
        stages: what took the time, in seconds: (stage, seconds), in the order in which the stages began.
        nodes, peak_bytes: calls, and the most bytes of activations that live at once, before and after the passes.
        files: what was written, by kind.
        not_isolated_because: why candidates ran in this process, where each was meant to have one of its own.
        cached: when the rows were measured, where that was not now, and what was checked since.
        signatures: what became of calls with other signatures: (signature, outcome).
        frontend: how the model was captured, where that was not by torch.export as usual.
        sizes: which sizes may differ from call to call, and at which ones that was tried.
        audits: what was found since, in calls.
        quantization: a record for each layer that can be quantized, where int8 or int4 was asked for; those that lose
            most come first.
        calibration: what was made of the calibration data.
        graphs: drawings of the program before and after the passes; None where a model is not one program.
    """

    model: str
    rows: tuple[Row, ...]
    winner_key: str
    why: str
    environment: Environment
    passes: tuple[PassRecord, ...] = ()
    nodes: tuple[int, int] = (0, 0)
    capture_seconds: float = 0.0
    numerics: str = "EXACT"
    files: tuple[tuple[str, str], ...] = ()
    signatures: tuple[tuple[str, str], ...] = ()
    peak_bytes: tuple[int, int] = (0, 0)
    pass_seconds: float = 0.0
    stages: tuple[tuple[str, float], ...] = ()
    not_isolated_because: str = ""
    cached: str = ""
    frontend: str = ""
    sizes: str = ""
    audits: tuple[str, ...] = ()
    quantization: tuple[LayerRecord, ...] = ()
    calibration: str = ""
    graphs: tuple[tuple[Drawn, ...], tuple[Drawn, ...]] | None = field(default=None, repr=False, compare=False)

    def row(self, name: str) -> Row:
        """The row with a title, such as `ONNX Runtime`."""
        return next(row for row in self.rows if row.name == name)

    @property
    def winning(self) -> Row:
        """The winner's row."""
        return next(row for row in self.rows if row.key == self.winner_key)

    @property
    def winner(self) -> str:
        """The title of the winner's row, such as `ONNX Runtime`; `eager` when that is the model itself."""
        return self.winning.name

    @property
    def speedup(self) -> float:
        """How many times faster the winner is than eager; 1.0 when eager is the winner."""
        found = self.winning.speedup
        return found.ratio if found is not None else 1.0

    @property
    def stopped(self) -> str:
        """Why this machine could not try any candidate; empty when one was tried, or for what the model computes."""
        return stopped(self.rows)

    def with_files(self, files: Iterable[tuple[str, str]]) -> Report:
        return replace(self, files=(*self.files, *files))

    def with_signature(self, signature: str, outcome: str) -> Report:
        return replace(self, signatures=(*self.signatures, (signature, outcome)))

    def with_audit(self, text: str) -> Report:
        return replace(self, audits=(*self.audits, text))

    def with_layer_times(self, float32: Mapping[str, float], int8: Mapping[str, float]) -> Report:
        """Args: float32, int8: milliseconds of a call, by where the layer is. What several layers share is unknown."""
        shared = Counter(item.where for item in self.quantization)
        timed = (
            item
            if shared[item.where] > 1
            else replace(item, ms_float=float32.get(item.where), ms_int8=int8.get(item.where))
            for item in self.quantization
        )
        return replace(self, quantization=tuple(timed))

    @property
    def is_eager(self) -> bool:
        """Whether the winner is the model itself."""
        return self.winner_key == MODEL

    def lines(self, *, width: int | None = None, bar: str = "#") -> list[Line]:
        """The report for a terminal; see `rendering.report_lines`."""
        return report_lines(self, width=width, bar=bar)

    @property
    def text(self) -> str:
        """Everything, in lines as long as they need to be; `str` fits them to the terminal."""
        return "\n".join(line.text for line in self.lines())

    @property
    def markdown(self) -> str:
        """The table, the passes and the layers in int8 as GitHub markdown."""
        return markdown_blocks(
            [f"### {markdown_cell(f'{self.model}: {self.winner} wins, {self.why}')}"],
            markdown_table(COLUMNS, [row_cells(row) for row in ranked(self)]),
            markdown_table(PASS_COLUMNS, pass_cells(self.passes)) if self.passes else [],
            markdown_table(*layer_table(self.quantization)) if self.quantization else [],
            [str(self.environment)],
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "winner": self.winner,
            "winner_key": self.winner_key,
            "why": self.why,
            "rows": [row.to_json() for row in self.rows],
            "passes": [pass_json(record) for record in self.passes],
            "nodes": _before_after(*self.nodes),
            "peak_bytes": _before_after(*self.peak_bytes),
            "capture_seconds": self.capture_seconds,
            "pass_seconds": self.pass_seconds,
            "stages": dict(self.stages),
            "numerics": self.numerics,
            "not_isolated_because": self.not_isolated_because,
            "cached": self.cached,
            "frontend": self.frontend,
            "sizes": self.sizes,
            "stopped": self.stopped,
            "environment": self.environment.to_json(),
            "files": dict(self.files),
            "signatures": [list(item) for item in self.signatures],
            "audits": list(self.audits),
            "quantization": [layer.record() for layer in self.quantization],
            "calibration": self.calibration,
        }

    @property
    def html(self) -> str:
        """The report as one HTML page, which loads nothing."""
        from tsopt.runtime.page.report import page

        return page(self)

    def _repr_html_(self) -> str:
        from tsopt.runtime.page.report import in_notebook

        return in_notebook(self)

    def to_frame(self) -> Any:
        """The rows as a pandas DataFrame. Raises UsageError where pandas is missing."""
        return data_frame([row.record() | {"wins": row.key == self.winner_key} for row in self.rows])

    def __str__(self) -> str:
        width = shutil.get_terminal_size(fallback=(0, 0)).columns or None
        return "\n".join(line.text for line in self.lines(width=width))


@dataclass(frozen=True, slots=True)
class RuleRecord:
    """What became of a rule in a whole run: where it was applied, and the near misses that were left at the end."""

    name: str
    passes: tuple[str, ...]
    done: tuple[Done, ...]
    declined: tuple[Declined, ...]

    @property
    def reasons(self) -> dict[str, int]:
        """How many near misses each reason accounts for, the most frequent first."""
        return dict(Counter(item.reason for item in self.declined).most_common())


def rule_records(records: Sequence[PassRecord]) -> list[RuleRecord]:
    """A record for each rule that did something or nearly did, in the order of the passes.

    A pass that is run again meets again what it declined before, so its last run is the one that counts.
    """
    found: dict[str, RuleRecord] = {}
    for record in records:
        done, declined = _by_rule(record.done), _by_rule(record.declined)
        again = [name for name, rule in found.items() if record.name in rule.passes]
        for name in dict.fromkeys((*again, *done, *declined)):
            earlier = found.get(name, RuleRecord(name, (), (), ()))
            passes = tuple(dict.fromkeys((*earlier.passes, record.name)))
            left = tuple(declined.get(name, ()))
            found[name] = RuleRecord(name, passes, (*earlier.done, *done.get(name, ())), left)
    return [rule for rule in found.values() if rule.done or rule.declined]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Callables timed side by side; the first is the baseline."""

    rows: tuple[Row, ...]
    environment: Environment | None = field(default=None)

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def __str__(self) -> str:
        return "\n".join(text_table(COLUMNS[:5], [row_cells(row)[:5] for row in self.rows]))


def _by_rule(items: Iterable[Event]) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = {}
    for item in items:
        found.setdefault(item.rule, []).append(item)
    return found


def data_frame(records: Sequence[dict[str, Any]]) -> Any:
    """A pandas DataFrame, a row for each record. Raises UsageError where pandas is missing."""
    try:
        import pandas
    except ImportError as error:
        raise UsageError("a data frame needs pandas", why=str(error), fix="pip install pandas") from error
    return pandas.DataFrame(records)


def pass_json(record: PassRecord) -> dict[str, Any]:
    """One record for machines: sizes, each rewrite and near miss with its place, and their counts by rule."""
    before, after = record.before, record.after
    return {
        "name": record.name,
        "changed": record.changed,
        "failed": record.failed,
        "nodes": _before_after(before.nodes, after.nodes),
        "weight_bytes": _before_after(before.weight_bytes, after.weight_bytes),
        "peak_bytes": _before_after(before.peak_bytes, after.peak_bytes),
        "seconds": record.seconds,
        "numerics": record.numerics.name,
        "rules": rules_json(rule_records([record])),
        "done": [{"rule": d.rule, "where": d.where} for d in record.done],
        "declined": [{"rule": d.rule, "where": d.where, "reason": d.reason} for d in record.declined],
    }


def rules_json(rules: Sequence[RuleRecord]) -> list[dict[str, Any]]:
    return [{"rule": rule.name, "done": len(rule.done), "declined": rule.reasons} for rule in rules]


def _before_after(before: int, after: int) -> dict[str, int]:
    return {"before": before, "after": after}
