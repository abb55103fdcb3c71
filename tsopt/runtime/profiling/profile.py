"""Where the time of a call goes: a row for each layer, a column for each engine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import fx

from tsopt.compiler.graph.drawing import Drawn
from tsopt.compiler.graph.origin import module_of, origin_of
from tsopt.errors import UsageError
from tsopt.runtime.page.chart import Chart, Series
from tsopt.runtime.page.document import framed
from tsopt.runtime.page.graph import with_times
from tsopt.runtime.page.table import page_of
from tsopt.runtime.profiling.kernels import Kernel, Timed, op_of, rank
from tsopt.runtime.profiling.limits import Limits
from tsopt.runtime.profiling.training import TrainingEstimate
from tsopt.runtime.profiling.work import OpWork, Work
from tsopt.runtime.rendering import markdown_blocks, markdown_table, milliseconds, text_table, three_digits
from tsopt.runtime.untrusted_text import markdown_cell, on_one_line

ELSEWHERE = "elsewhere in the engine"
WHOLE = "the whole call"
TOP = 20  # layers in a text; --json and markdown have all of them
# Of the time of a call, and times the limit: layers that take less, or are faster still, say nothing about the machine.
LEAST_SHARE, PLAUSIBLE = 0.02, 1.25


@dataclass(frozen=True, slots=True)
class LayerTime:
    """The time of one layer in each engine.

    Attributes:
        layer: its module path; the name of its value where it belongs to no module.
        op: `linear`, `scaled_dot_product_attention`.
        where: module path and source line.
        ms: for a call, by engine; none where the engine has fused it into another layer.
        kernels: the engine's names of what it runs, by engine.
        work: in a call in full precision, whatever the engines compute in.
        at_best: milliseconds that this machine needs for it at least; None where that has not been measured.
    """

    layer: str
    op: str
    where: str
    ms: Mapping[str, float]
    kernels: Mapping[str, tuple[str, ...]]
    work: Work = field(default_factory=Work)
    at_best: float | None = None

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
        limits: of this machine, in float32; None where the engine that runs computes in another precision.
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
        table = markdown_table(self.header, self.cells())
        return markdown_blocks([heading], table, [f"- {markdown_cell(remark)}" for remark in self.remarks])

    @property
    def charts(self) -> list[Chart]:
        """The memory wall, and the roofline: both over the layers, for each engine."""
        times: list[Series] = []
        rates: list[Series] = []
        for engine in self.engines:
            timed = [item for item in self.layers if engine in item.ms]
            wall = ((item.work.bytes / 1e6, item.ms[engine], _told(item, engine)) for item in timed)
            roof = (
                (item.work.intensity or 0.0, item.work.macs / 1e6 / (item.ms[engine] or math.inf), _told(item, engine))
                for item in timed
            )
            times.append(Series(engine, tuple(wall)))
            rates.append(Series(engine, tuple(roof)))
        if self.limits is not None:
            rates.append(_roof(self.limits, [item.work.intensity or 0.0 for item in self.layers]))
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
        return page_of(self.model, said, self.charts, self.header, self.cells(), self.remarks, program)

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
                    "ms": dict(item.ms),
                    "kernels": {engine: list(names) for engine, names in item.kernels.items()},
                    **asdict(item.work),
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


@dataclass
class _Row:
    layer: str
    op: str
    where: str
    ms: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, dict[str, None]] = field(default_factory=dict)
    nodes: list[fx.Node] = field(default_factory=list)

    def add(self, engine: str, kernel: Kernel) -> None:
        """Takes one more kernel. A layer is told by its most telling op."""
        if kernel.node is not None and rank(op_of(kernel.node)) < rank(self.op):
            self.op = op_of(kernel.node)
        self.ms[engine] = self.ms.get(engine, 0.0) + kernel.ms
        self.kernels.setdefault(engine, {})[kernel.name] = None

    def made(self, work: OpWork | None, limits: Limits | None) -> LayerTime:
        kernels = {engine: tuple(names) for engine, names in self.kernels.items()}
        done = Work() if work is None else work.of(self.nodes)
        at_best = None if limits is None else limits.seconds(done) * 1e3
        return LayerTime(self.layer, self.op, self.where, self.ms, kernels, done, at_best)


class _Rows:
    """The rows of a table, by where a node comes from."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], _Row] = {}

    def of(self, node: fx.Node) -> _Row:
        where, op = origin_of(node) or node.name, op_of(node)
        # What an engine or a pass has made of a layer keeps its module; without one, a line may have several ops.
        key = (where, "" if node.meta.get("module") else op)
        return self._found.setdefault(key, _Row(module_of(node), op, where))

    def __iter__(self) -> Iterator[_Row]:
        return iter(self._found.values())


def profile_of(
    model: str,
    timed: Mapping[str, Timed],
    work: OpWork | None = None,
    limits: Limits | None = None,
    notes: Sequence[str] = (),
    batch: int | None = None,
) -> Profile:
    """The profile of a model.

    Args:
        timed: its kernels in each of these engines, by title; the last one is what runs.
        work: of the ops of its program in float32.
        limits: of this machine, if the last engine computes in float32 as well.
        batch: samples in a call.
    """
    rows = _Rows()
    known = dict.fromkeys(timed, 0.0)
    for engine, found in timed.items():
        for kernel in found.kernels:
            if kernel.node is not None:
                rows.of(kernel.node).add(engine, kernel)
                known[engine] += kernel.ms
    for node in work or ():
        rows.of(node).nodes.append(node)
    *_, last = timed
    limits = _at_least_reached(limits, rows, work, known) if limits and work else limits
    layers = sorted((row.made(work, limits) for row in rows if row.ms), key=lambda item: -item.ms.get(last, 0.0))
    calls = {engine: found.ms for engine, found in timed.items()}
    elsewhere = {engine: max(calls[engine] - known[engine], 0.0) for engine in timed}
    whole = Work() if work is None else work.of(list(work))
    return Profile(model, tuple(timed), tuple(layers), elsewhere, calls, whole, limits, batch, tuple(notes))


def _at_least_reached(limits: Limits, rows: Iterable[_Row], work: OpWork, known: Mapping[str, float]) -> Limits:
    """Limits that no layer exceeds by a little: probes of half a second may have met the machine in a slower moment."""
    fastest = limits.macs
    for row in rows:
        macs = work.of(row.nodes).macs if row.nodes else 0
        told = [ms for engine, ms in row.ms.items() if ms >= LEAST_SHARE * known[engine] > 0]
        rates = [macs / ms * 1e3 for ms in told]
        fastest = max([fastest, *(rate for rate in rates if rate <= PLAUSIBLE * limits.macs)])
    return replace(limits, macs=fastest)


def _told(layer: LayerTime, engine: str) -> str:
    return f"{layer.layer} ({layer.op}) in {engine}: {milliseconds(layer.ms[engine])} ms"


def _roof(limits: Limits, intensities: Sequence[float]) -> Series:
    """What no layer exceeds whose working set does not fit into a cache."""
    known = [value for value in intensities if value > 0]
    bandwidth = limits.moved[-1][1]
    ridge = limits.macs / bandwidth
    places = sorted({min([*known, ridge]) / 2, ridge, 2 * max([*known, ridge])})
    rates = ((place, min(limits.macs, place * bandwidth) / 1e9) for place in places)
    points = tuple((x, y, f"at most {three_digits(y)} GMAC/s") for x, y in rates)
    return Series("limit of this machine", points, is_line=True)


def _millions(count: int) -> str:
    return three_digits(count / 1e6) if count else "-"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
