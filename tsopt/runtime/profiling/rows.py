"""The rows of a profile: kernels of several engines, by where in the model they come from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from tsopt.compiler.graph.origin import module_of, origin_of
from tsopt.compiler.precision_names import FP32
from tsopt.runtime.profiling.kernels import Kernel, Timed, op_of, rank
from tsopt.runtime.profiling.limits import Limits
from tsopt.runtime.profiling.precisions import Precisions
from tsopt.runtime.profiling.profile import LayerTime, Profile
from tsopt.runtime.profiling.work import OpWork, Work

# Of the time of a call, and times the limit: layers that take less, or are faster still, say nothing about the machine.
LEAST_SHARE, PLAUSIBLE = 0.02, 1.25


@dataclass
class _Row:
    layer: str
    op: str
    where: str
    source: str
    ms: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, dict[str, None]] = field(default_factory=dict)
    nodes: list[fx.Node] = field(default_factory=list)

    def add(self, engine: str, kernel: Kernel) -> None:
        """Takes one more kernel. A layer is told by its most telling op."""
        if kernel.node is not None and rank(op_of(kernel.node)) < rank(self.op):
            self.op = op_of(kernel.node)
        self.ms[engine] = self.ms.get(engine, 0.0) + kernel.ms
        self.kernels.setdefault(engine, {})[kernel.name] = None

    def made(self, work: OpWork | None, limits: Limits | None, precision: str) -> LayerTime:
        kernels = {engine: tuple(names) for engine, names in self.kernels.items()}
        done = Work() if work is None else work.of(self.nodes)
        least = None if limits is None else limits.seconds(done, precision)
        at_best = None if least is None else least * 1e3
        return LayerTime(self.layer, self.op, self.where, self.ms, kernels, done, at_best, self.source, precision)


class _Rows:
    """The rows of a table, by where a node comes from."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], _Row] = {}

    def of(self, node: fx.Node) -> _Row:
        where, op = origin_of(node) or node.name, op_of(node)
        # What an engine or a pass has made of a layer keeps its module; without one, a line may have several ops.
        key = (where, "" if node.meta.get("module") else op)
        return self._found.setdefault(key, _Row(module_of(node), op, where, node.meta.get("source", "")))

    def __iter__(self) -> Iterator[_Row]:
        return iter(self._found.values())


def profile_of(
    model: str,
    timed: Mapping[str, Timed],
    work: OpWork | None = None,
    limits: Limits | None = None,
    notes: Sequence[str] = (),
    batch: int | None = None,
    precisions: Precisions | None = None,
) -> Profile:
    """The profile of a model.

    Args:
        timed: its kernels in each of these engines, by title; the last one is what runs.
        work: of the ops of its program in float32.
        limits: of this machine.
        batch: samples in a call.
        precisions: in which the last engine computes the layers; None: in float32.
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
    precisions = precisions or Precisions()
    if limits and work:
        limits = _at_least_reached(limits, rows, work, known, precisions)
    made = (row.made(work, limits, precisions.of(row.where)) for row in rows if row.ms)
    layers = sorted(made, key=lambda item: -item.ms.get(last, 0.0))
    calls = {engine: found.ms for engine, found in timed.items()}
    elsewhere = {engine: max(calls[engine] - known[engine], 0.0) for engine in timed}
    whole = Work() if work is None else work.of(list(work))
    return Profile(model, tuple(timed), tuple(layers), elsewhere, calls, whole, limits, batch, tuple(notes))


def _at_least_reached(
    limits: Limits, rows: Iterable[_Row], work: OpWork, known: Mapping[str, float], precisions: Precisions
) -> Limits:
    """Limits that no layer exceeds by a little: probes of half a second may have met the machine in a slower moment."""
    *_, last = known
    fastest = {FP32: limits.macs} | dict(limits.lowered)
    for row in rows:
        macs = work.of(row.nodes).macs if row.nodes else 0
        for engine, ms in row.ms.items():
            precision = precisions.of(row.where) if engine == last else FP32
            probed = limits.rate(precision)
            if probed is not None and ms >= LEAST_SHARE * known[engine] > 0 and macs / ms * 1e3 <= PLAUSIBLE * probed:
                fastest[precision] = max(fastest[precision], macs / ms * 1e3)
    return replace(limits, macs=fastest.pop(FP32), lowered=fastest)
