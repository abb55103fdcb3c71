"""The outcome of a check: its verdict, and the table of it for a terminal and for a pull request."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from tsopt.regression.baseline import Baseline
from tsopt.regression.slowdown import OK, SLOWER, UNDECIDED, Slowdown
from tsopt.runtime.checking.criterion import ROUNDING
from tsopt.runtime.rendering import markdown_table, text_table
from tsopt.runtime.untrusted_text import markdown_cell, on_one_line

COLUMNS = ("", "baseline", "now", "change", "limit", "verdict")
LESS_ACCURATE, MORE_WORK, NOT_TRIED = "less accurate", "more work", "no candidate could be tried"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """An optimized model compared with a baseline.

    Attributes:
        baseline, slowdown: None if the baseline was written and not compared with.
        speed: ok, slower or undecided.
        max_slowdown: the largest slowdown that is accepted, as a fraction; of multiply-accumulates as well.
        max_drop: how far the score may be below that of the baseline.
        remarks: what else has changed, what was not compared, and why the speed is undecided.
        stopped: why this machine could try no candidate; empty if it could.
    """

    now: Baseline
    baseline: Baseline | None
    slowdown: Slowdown | None
    speed: str
    max_slowdown: float
    max_drop: float
    remarks: tuple[str, ...] = ()
    stopped: str = ""

    @property
    def drop(self) -> float | None:
        """How far the score is below that of the baseline; None if it was not compared."""
        then = self.baseline
        if then is None or then.score is None or self.now.score is None or then.metric != self.now.metric:
            return None
        return then.score - self.now.score

    @property
    def accuracy(self) -> str:
        """ok or less accurate; empty if it was not compared."""
        return "" if self.drop is None else LESS_ACCURATE if self.drop > self.max_drop + ROUNDING else OK

    @property
    def growth(self) -> float | None:
        """The relative increase in multiply-accumulates: infinite if there were none, None if unknown."""
        then, now = self.baseline, self.now.macs
        if then is None or then.macs is None or now is None:
            return None
        return now / then.macs - 1 if then.macs else math.inf if now else 0.0

    @property
    def work(self) -> str:
        """ok or more work; empty if it was not compared."""
        return "" if self.growth is None else MORE_WORK if self.growth > self.max_slowdown else OK

    @property
    def verdict(self) -> str:
        """ok, undecided, or what is wrong: slower, more work, less accurate, or that no candidate could be tried."""
        if self.stopped:
            return NOT_TRIED
        wrong = [item for item in (self.speed, self.work, self.accuracy) if item in (SLOWER, MORE_WORK, LESS_ACCURATE)]
        return " and ".join(wrong) or self.speed

    @property
    def ok(self) -> bool:
        """Whether no regression was found. An undecided slowdown does not count as one."""
        return self.verdict in (OK, UNDECIDED)

    @property
    def sentence(self) -> str:
        """`resnet18: ok`, for example."""
        return f"{self.now.model}: {'saved as the baseline' if self.baseline is None else self.verdict}"

    def cells(self) -> list[tuple[str, ...]]:
        """The rows of a table with COLUMNS."""
        then, now = self.baseline, self.now
        rows: list[tuple[str, ...]] = [
            (
                "speed-up over eager",
                "" if then is None else _speed(then),
                _speed(now),
                "" if self.slowdown is None else str(self.slowdown),
                f"{self.max_slowdown:.1%} slower",
                "" if then is None else self.speed,
            )
        ]
        if now.macs is not None:
            before = "" if then is None or then.macs is None else _millions(then.macs)
            change = _growth(self.growth)
            rows.append(("million MACs", before, _millions(now.macs), change, f"{self.max_slowdown:+.1%}", self.work))
        if now.score is not None:
            before = "" if self.drop is None or then is None else f"{then.score:.6g}"
            change = "" if self.drop is None else f"{-self.drop:+.3g}"
            rows.append((now.metric, before, f"{now.score:.6g}", change, f"{-self.max_drop:+g}", self.accuracy))
        return rows

    @property
    def text(self) -> str:
        """The comparison for a terminal."""
        said = [*filter(None, [self.stopped]), *self.remarks]
        table = text_table(COLUMNS, self.cells())
        lines = [self.sentence, "", *table, *(["", *said] if said else [])]
        return "\n".join(map(on_one_line, lines))

    @property
    def markdown(self) -> str:
        """The comparison as GitHub markdown, for the summary of a pull request."""
        said = [*filter(None, [self.stopped]), *self.remarks, f"on {self.now.machine}; {self.now.versions}"]
        lines = [f"### {markdown_cell(self.sentence)}", "", *markdown_table(COLUMNS, self.cells()), ""]
        return "\n".join([*lines, *(f"- {markdown_cell(item)}" for item in said)])

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "ok": self.ok,
            "speed": self.speed,
            "work": self.work,
            "accuracy": self.accuracy,
            "slowdown": None if self.slowdown is None else asdict(self.slowdown),
            "growth": None if self.growth == math.inf else self.growth,  # JSON has no infinity
            "max_slowdown": self.max_slowdown,
            "drop": self.drop,
            "max_drop": self.max_drop,
            "remarks": list(self.remarks),
            "stopped": self.stopped,
            "now": asdict(self.now),
            "baseline": None if self.baseline is None else asdict(self.baseline),
        }

    def __str__(self) -> str:
        return self.text


def _speed(measured: Baseline) -> str:
    count = len(measured.speedups)
    sessions = f"{count} {'session' if count == 1 else 'sessions'}"
    return f"{median(measured.speedups):.2f}x, {measured.winner}, {sessions}"


def _growth(growth: float | None) -> str:
    return "" if growth is None else "from none" if growth == math.inf else f"{growth:+.1%}"


def _millions(count: int) -> str:
    return f"{count / 1e6:,.4g}" if count < 1e9 else f"{count / 1e6:,.0f}"
