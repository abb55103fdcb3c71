"""Where the time of a call goes: a row for each layer, a column for each engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tsopt.compiler.graph.origin import module_of, origin_of
from tsopt.runtime.profiling.kernels import Kernel, Timed, op_of, rank
from tsopt.runtime.rendering import markdown_table, milliseconds, text_table
from tsopt.runtime.untrusted_text import printable

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
        ms: for a call, by engine; none where the engine has fused it into another layer.
        kernels: the engine's names of what it runs, by engine.
    """

    layer: str
    op: str
    where: str
    ms: Mapping[str, float]
    kernels: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Profile:
    """The time of a call by layer, the most expensive layer of the last engine first.

    Attributes:
        engines: their titles; the last one is the one that runs.
        elsewhere: milliseconds between kernels, and in kernels that belong to no known layer, by engine.
        calls: milliseconds of the whole call while the engine's profiler is on, by engine.
        notes: what is missing, and why.
    """

    model: str
    engines: tuple[str, ...]
    layers: tuple[LayerTime, ...]
    elsewhere: Mapping[str, float]
    calls: Mapping[str, float]
    notes: tuple[str, ...] = ()

    @property
    def header(self) -> tuple[str, ...]:
        return ("layer", "op", *(f"{engine} ms" for engine in self.engines), "share", "kernel")

    def cells(self, top: int | None = None) -> list[tuple[str, ...]]:
        """Rows under `header`: the layers, what is left, and the whole call.

        Args:
            top: of the layers only so many, and a row for all others.
        """
        last = self.engines[-1]
        shown, others = self.layers[:top], self.layers[len(self.layers[:top]) :]
        rows = [(item.layer, item.op, item.ms, ", ".join(item.kernels.get(last, ()))) for item in shown]
        if others:
            rest = {engine: sum(item.ms.get(engine, 0.0) for item in others) for engine in self.engines}
            rows.append((f"{len(others)} more layers", "", rest, ""))
        rows += [(ELSEWHERE, "", self.elsewhere, ""), (WHOLE, "", self.calls, "")]
        return [
            (
                name,
                op,
                *(milliseconds(ms[engine]) if engine in ms else "-" for engine in self.engines),
                f"{ms[last] / self.calls[last]:.1%}" if last in ms else "-",
                kernels,
            )
            for name, op, ms, kernels in rows
        ]

    def by_place(self, engine: str) -> dict[str, float]:
        """Milliseconds in an engine, by where the layer is; of several ops on one line, of the most expensive one."""
        timed = sorted((item.ms[engine], item.where) for item in self.layers if engine in item.ms)
        return {where: ms for ms, where in timed}

    @property
    def markdown(self) -> str:
        """All layers as a GitHub markdown table."""
        return "\n".join([printable(f"### {self.model}"), "", *markdown_table(self.header, self.cells()), *self.notes])

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
                }
                for item in self.layers
            ],
            "elsewhere_ms": dict(self.elsewhere),
            "call_ms": dict(self.calls),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return "\n".join(printable(line) for line in (*text_table(self.header, self.cells(TOP)), *self.notes))


@dataclass
class _Row:
    layer: str
    op: str
    where: str
    ms: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, dict[str, None]] = field(default_factory=dict)

    def add(self, engine: str, kernel: Kernel) -> None:
        """Takes one more kernel. A layer is told by its most telling op."""
        if kernel.node is not None and rank(op_of(kernel.node)) < rank(self.op):
            self.op = op_of(kernel.node)
        self.ms[engine] = self.ms.get(engine, 0.0) + kernel.ms
        self.kernels.setdefault(engine, {})[kernel.name] = None

    def made(self) -> LayerTime:
        kernels = {engine: tuple(names) for engine, names in self.kernels.items()}
        return LayerTime(self.layer, self.op, self.where, self.ms, kernels)


def profile_of(model: str, timed: Mapping[str, Timed], notes: Sequence[str] = ()) -> Profile:
    """The profile of a model whose kernels were timed in each of these engines, by title; the last one is what runs."""
    rows: dict[tuple[str, str], _Row] = {}
    known = dict.fromkeys(timed, 0.0)
    for engine, found in timed.items():
        for kernel in found.kernels:
            node = kernel.node
            if node is None:
                continue
            where, op = origin_of(node) or node.name, op_of(node)
            # What an engine or a pass has made of a layer keeps its module; without one, a line may have several ops.
            row = rows.setdefault((where, "" if node.meta.get("module") else op), _Row(module_of(node), op, where))
            row.add(engine, kernel)
            known[engine] += kernel.ms
    *_, last = timed
    layers = sorted((row.made() for row in rows.values()), key=lambda item: -item.ms.get(last, 0.0))
    calls = {engine: found.ms for engine, found in timed.items()}
    elsewhere = {engine: max(calls[engine] - known[engine], 0.0) for engine in timed}
    return Profile(model, tuple(timed), tuple(layers), elsewhere, calls, tuple(notes))
