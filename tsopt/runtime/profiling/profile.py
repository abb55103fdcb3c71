"""Where the time of a call goes: a row for each layer, a column for each engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tsopt.compiler.graph.drawing import Drawn
from tsopt.compiler.precision_names import FP32
from tsopt.errors import UsageError
from tsopt.runtime.page.chart import Chart, Series
from tsopt.runtime.page.document import framed
from tsopt.runtime.page.graph import with_times
from tsopt.runtime.page.table import page_of
from tsopt.runtime.profiling.limits import Limits, narrowed
from tsopt.runtime.profiling.training import TrainingEstimate
from tsopt.runtime.profiling.work import Work
from tsopt.runtime.rendering import markdown_blocks, markdown_table, milliseconds, text_table, three_digits
from tsopt.runtime.untrusted_text import markdown_cell, on_one_line

ELSEWHERE = "elsewhere in the engine"
WHOLE = "the whole call"
TOP = 20  # layers in a text; --json and markdown have all of them


@dataclass(frozen=True, slots=True)
class LayerTime:
    """The time of one layer in each engine.

    Attributes:
        layer: its module path; the name of its value where it belongs to no module.
        op: `linear`, `scaled_dot_product_attention`.
        where: module path and source line.
        source: the source line; empty if unknown.
        ms: for a call, by engine; none where the engine has fused it into another layer.
        kernels: the engine's names of what it runs, by engine.
        work: in a call in full precision, whatever the engines compute in.
        precision: in which the last engine computes it.
        at_best: milliseconds that this machine needs for it at least in that precision; None where that has not been
            measured.
    """

    layer: str
    op: str
    where: str
    ms: Mapping[str, float]
    kernels: Mapping[str, tuple[str, ...]]
    work: Work = field(default_factory=Work)
    at_best: float | None = None
    source: str = ""
    precision: str = FP32

    def limit(self, engine: str) -> float | None:
        """The share of the machine's limit that an engine reaches; None where one of the two is not known."""
        ms = self.ms.get(engine)
        return self.at_best / ms if self.at_best and ms else None


@dataclass(frozen=True, slots=True)
class Profile:
    """The time of a call by layer, the most expensive layer of the last engine first.

    Attributes:
        engines: their titles; the last one is the one that runs.
        elsewhere: milliseconds between kernels, and in kernels that belong to no known layer, by engine.
        calls: milliseconds of the whole call while the engine's profiler is on, by engine.
        work: of the whole call, in full precision.
        limits: of this machine; None where they were not measured.
        batch: samples in a call: the size of the first axis of all inputs; None where they do not agree on it.
        notes: what is missing, and why.
        training: an estimate, where one was asked for.
        drawing: of the program that the last engine runs, with the time of each value; empty where none was made.
    """

    model: str
    engines: tuple[str, ...]
    layers: tuple[LayerTime, ...]
    elsewhere: Mapping[str, float]
    calls: Mapping[str, float]
    work: Work = field(default_factory=Work)
    limits: Limits | None = None
    batch: int | None = None
    notes: tuple[str, ...] = ()
    training: TrainingEstimate | None = None
    drawing: tuple[Drawn, ...] = field(default=(), repr=False, compare=False)

    def with_training(self, samples: int, epochs: int) -> Profile:
        """The profile with an estimate of how long it takes to train the model on this machine.

        Args:
            samples: in the training data.
            epochs: how many times each of them is used.

        Raises:
            UsageError: the model has no products of matrices, or a number is less than 1.
        """
        if samples < 1 or epochs < 1:
            raise UsageError(f"samples and epochs must be at least 1, got {samples} and {epochs}", fix="pass 1 or more")
        if not self.work.macs:
            raise UsageError(
                "the time of training cannot be estimated",
                why="it is estimated from multiply-accumulates, and none were counted in this model",
            )
        rate = self.work.macs / self.calls[self.engines[0]] * 1e3
        macs = self.work.macs / (self.batch or 1)
        return replace(self, training=TrainingEstimate(samples, epochs, macs, rate, self.batch))

    @property
    def header(self) -> tuple[str, ...]:
        times = (f"{engine} ms" for engine in self.engines)
        return ("layer", "op", "MMACs", "MB", *times, "share", "of limit", "kernel")

    @property
    def full_header(self) -> tuple[str, ...]:
        """For tables that are not in a terminal, which has no room for all of it."""
        layer, op, macs, _, *times, kernel = self.header
        moved = ("MB read", "MB of weights", "MB written", "MACs/byte")
        return (layer, op, *times, "in", macs, *moved, "line", kernel)

    def cells(self, top: int | None = None) -> list[tuple[str, ...]]:
        """Rows under `header`: the layers, what is left, and the whole call.

        Args:
            top: of the layers only so many, and a row for all others.
        """
        last = self.engines[-1]
        shown, others = self.layers[:top], self.layers[len(self.layers[:top]) :]
        rows = [
            self._cells(item.layer, item.op, item.work, item.ms, _percent(item.limit(last)), item) for item in shown
        ]
        if others:
            rest = {engine: sum(item.ms.get(engine, 0.0) for item in others) for engine in self.engines}
            macs = Work(sum(item.work.macs for item in others))
            rows.append(self._cells(f"{len(others)} more layers", "", macs, rest))
        rows.append(self._cells(ELSEWHERE, "", None, self.elsewhere))
        rows.append(self._cells(WHOLE, "", self.work, self.calls))
        return rows

    def full_cells(self) -> list[tuple[str, ...]]:
        """Rows under `full_header`."""
        rows = []
        for number, (name, op, macs, _, *times, kernel) in enumerate(self.cells()):
            layer = self.layers[number] if number < len(self.layers) else None
            work = self.work if name == WHOLE else Work() if layer is None else layer.work
            line, precision = ("", "") if layer is None else (layer.source, layer.precision)
            intensity = "-" if layer is None or not layer.work.macs else three_digits(layer.work.intensity or 0.0)
            moved = map(_millions, (work.inputs, work.weights, work.outputs))
            rows.append((name, op, *times, precision, macs, *moved, intensity, line, kernel))
        return rows

    def _cells(
        self,
        name: str,
        op: str,
        work: Work | None,
        ms: Mapping[str, float],
        limit: str = "-",
        layer: LayerTime | None = None,
    ) -> tuple[str, ...]:
        last = self.engines[-1]
        return (
            name,
            op,
            _millions(0 if work is None else work.macs),
            _millions(0 if work is None else work.bytes),
            *(milliseconds(ms[engine]) if engine in ms else "-" for engine in self.engines),
            _percent(ms[last] / self.calls[last] if last in ms else None),
            limit,
            "" if layer is None else ", ".join(layer.kernels.get(last, ())),
        )

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is said below the table, a line each."""
        return tuple(map(on_one_line, (*self.notes, *([] if self.training is None else [str(self.training)]))))

    def by_place(self, engine: str) -> dict[str, float]:
        """Milliseconds in an engine, by where the layer is; of several ops on one line, of the most expensive one."""
        timed = sorted((item.ms[engine], item.where) for item in self.layers if engine in item.ms)
        return {where: ms for ms, where in timed}

    @property
    def markdown(self) -> str:
        """All layers as a GitHub markdown table."""
        heading = f"### {markdown_cell(self.model)}"
        table = markdown_table(self.full_header, self.full_cells())
        return markdown_blocks([heading], table, [f"- {markdown_cell(remark)}" for remark in self.remarks])

    @property
    def charts(self) -> list[Chart]:
        """The memory wall, and the roofline: both over the layers, for each engine."""
        times: list[Series] = []
        rates: list[Series] = []
        for engine in self.engines:
            wall, roof = [], []
            for item in (item for item in self.layers if engine in item.ms):
                precision = item.precision if engine == self.engines[-1] else FP32
                work, ms, said = narrowed(item.work, precision), item.ms[engine], _told(item, engine)
                wall.append((work.bytes / 1e6, ms, said))
                roof.append((work.intensity or 0.0, work.macs / 1e6 / (ms or math.inf), said))
            times.append(Series(engine, tuple(wall)))
            rates.append(Series(engine, tuple(roof)))
        if self.limits is not None:
            known = [value for series in rates for value, _, _ in series.points]
            rates += [_roof(self.limits, precision, known) for precision in (FP32, *self.limits.lowered)]
        return [
            Chart("Time over working set", "MB read and written", "ms of a call", tuple(times)),
            Chart("Roofline", "multiply-accumulates per byte", "GMAC/s", tuple(rates)),
        ]

    @property
    def html(self) -> str:
        """The profile as one HTML page with charts and the program, which loads nothing."""
        last = self.engines[-1]
        said = f"A call takes {milliseconds(self.calls[last])} ms in {last} while its profiler is on."
        program = with_times(self.drawing, self.calls[last], last) if self.drawing else {}
        return page_of(self.model, said, self.charts, self.full_header, self.full_cells(), self.remarks, program)

    def _repr_html_(self) -> str:
        return framed(self.html, "tsopt profile")

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "engines": list(self.engines),
            "layers": [
                {
                    "layer": item.layer,
                    "op": item.op,
                    "where": item.where,
                    "source": item.source,
                    "ms": dict(item.ms),
                    "kernels": {engine: list(names) for engine, names in item.kernels.items()},
                    **asdict(item.work),
                    "intensity": item.work.intensity,
                    "precision": item.precision,
                    "ms_at_best": item.at_best,
                }
                for item in self.layers
            ],
            "elsewhere_ms": dict(self.elsewhere),
            "call_ms": dict(self.calls),
            "work": asdict(self.work),
            "limits": None if self.limits is None else asdict(self.limits),
            "batch": self.batch,
            "notes": list(self.notes),
            "training": None if self.training is None else self.training.to_json(),
        }

    def __str__(self) -> str:
        return "\n".join([*text_table(self.header, self.cells(TOP)), *self.remarks])


def _told(layer: LayerTime, engine: str) -> str:
    return f"{layer.layer} ({layer.op}) in {engine}: {milliseconds(layer.ms[engine])} ms"


def _roof(limits: Limits, precision: str, intensities: Sequence[float]) -> Series:
    """What no layer in a precision exceeds whose working set does not fit into a cache."""
    rate = limits.rate(precision) or 0.0
    known = [value for value in intensities if value > 0]
    bandwidth = limits.moved[-1][1]
    ridge = rate / bandwidth
    places = sorted({min([*known, ridge]) / 2, ridge, 2 * max([*known, ridge])})
    rates = ((place, min(rate, place * bandwidth) / 1e9) for place in places)
    points = tuple((x, y, f"at most {three_digits(y)} GMAC/s") for x, y in rates)
    name = "limit of this machine" + ("" if precision == FP32 else f" in {precision}")
    return Series(name, points, is_line=True)


def _millions(count: int) -> str:
    return three_digits(count / 1e6) if count else "-"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
