"""Observes the values of a program on calibration data, and chooses their quantization parameters."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.quantized import QParams
from tsopt.passes.quantize.layers import is_moved

log = logging.getLogger("tsopt")
STEPS = 8  # calls one after another, at least, of a model that keeps a state
BINS = 2048  # of a histogram
SHRUNK = tuple(1 - step / 50 for step in range(48))  # of a range: from all of it to a twenty-fifth

Call = Sequence[torch.Tensor]  # flat inputs in signature order, state included


class Watched(fx.Interpreter):
    """Runs a program and calls a function with the values of selected nodes.

    Args:
        watch: called with the name of a node and its value.
        names: of the nodes to watch.
    """

    def __init__(self, program: Program, watch: Callable[[str, Any], None], names: Collection[str]) -> None:
        super().__init__(program.module())
        self._watch, self._names = watch, frozenset(names)

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        if node.name in self._names:
            self._watch(node.name, value)
        return value


@dataclass
class Observed:
    """Statistics of one value over all calibration data.

    Attributes:
        low, high: of its elements, over all calls; infinite or NaN where one of them is.
        counts: of its elements other than 0, in BINS equal parts from low to high. 0.0 is always exact.
    """

    low: float = math.inf
    high: float = -math.inf
    counts: torch.Tensor | None = None

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def is_constant(self) -> bool:
        """Whether all of its elements were the same in all calls, which tells nothing of others."""
        return self.low == self.high

    def widen(self, value: torch.Tensor) -> None:
        if not value.numel():
            return
        low, high = map(float, torch.aminmax(value))
        if math.isnan(low) or math.isnan(self.low):  # once NaN, always NaN: `min` and `max` may drop it
            low = high = self.low = self.high = math.nan
        self.low, self.high = min(self.low, low), max(self.high, high)

    def cover(self, low: float, high: float) -> None:
        """Takes in what the data does not show, and the parameters clip none of it."""
        self.low, self.high, self.counts = min(self.low, low), max(self.high, high), None

    def count(self, value: torch.Tensor) -> None:
        if self.is_finite and self.low < self.high:
            # NOTE: histc multiplies by BINS before it divides. Large values would overflow, and be out of bounds.
            shares = value[value != 0].double().sub_(self.low).div_(self.high - self.low)
            found = torch.histc(shares, BINS, 0, 1)
            self.counts = found if self.counts is None else self.counts + found

    def qparams(self, *, symmetric: bool = False) -> QParams:
        """The parameters with the least mean squared error: rounding inside the range plus clipping outside it."""

        def covering(share: float) -> QParams:
            if symmetric:
                return QParams.symmetric(share * max(-self.low, self.high))
            return QParams.of_range(self.low * share, self.high * share)

        best, least = covering(1.0), math.inf
        if self.counts is None:
            return best
        width = (self.high - self.low) / BINS
        centers = self.low + (torch.arange(BINS, dtype=torch.float64, device="cpu") + 0.5) * width
        for share in SHRUNK:
            tried = covering(share)
            low, high = tried.range
            # A bin may straddle an end of the range; the error of treating it as its center is at most half a bin.
            cut = ((low - centers).clamp(min=0) + (centers - high).clamp(min=0)).square()
            inside = self.counts[(centers >= low) & (centers <= high)].sum()
            error = float((self.counts * cut).sum() + inside * tried.scale**2 / 12)
            if error < least:
                best, least = tried, error
        return best


def observe(
    program: Program, calls: Iterable[Call], nodes: Iterable[fx.Node], progress: Callable[[str], None]
) -> dict[str, Observed]:
    """Observes some values of a program on calibration data. Returns them by node name.

    Each call runs twice: once for the range of each value, once for the histogram over that range. If the model keeps a
    state, each also runs with what the calls before it have left there: the first state says little of later ones. Few
    calls are then repeated.
    """
    found = {node.name: Observed() for node in nodes}
    calls = list(calls)
    rounds: tuple[Callable[[Observed, torch.Tensor], None], ...] = (Observed.widen, Observed.count)
    for number, record in enumerate(rounds):

        def watch(name: str, value: torch.Tensor, record: Callable[[Observed, torch.Tensor], None] = record) -> None:
            record(found[name], value.detach())

        watched, later = Watched(program, watch, found), _InSequence(program, watch, found)
        for position, call in enumerate(calls):
            progress(f"{number * len(calls) + position + 1} of {len(rounds) * len(calls)}")
            with torch.no_grad():
                watched.run(*call)
                later.run_next(call)
        with torch.no_grad():
            for call in itertools.islice(itertools.cycle(calls), len(calls), STEPS):
                later.run_next(call)
    return found


class _InSequence(Watched):
    """Runs calls of a program that keeps a state one after another, as the model is called."""

    def __init__(self, program: Program, watch: Callable[[str, Any], None], names: Collection[str]) -> None:
        super().__init__(program, watch, names)
        inputs = [item.name for item in program.signature.inputs]
        states = {item.name for item in program.signature.state_inputs}
        outputs = program.signature.outputs
        self._kept = {i: inputs.index(str(item.writes)) for i, item in enumerate(outputs) if item.writes in states}
        self._left: dict[int, torch.Tensor] = {}  # by the calls so far; nothing before the first

    def run_next(self, call: Call) -> None:
        """Runs a call after the earlier ones, with the state that they left. Does nothing if there is no state."""
        if not self._kept:
            return
        try:
            outputs = self.run(*(self._left.get(place, value) for place, value in enumerate(call)))
        except (RuntimeError, IndexError) as error:  # as where a cache is full: the next call begins with an empty one
            log.debug("calls one after another end: %s", error)
            self._left = {}
            return
        self._left = {place: outputs[i] for i, place in self._kept.items()}


def qparams_of(nodes: Iterable[fx.Node], observed: Mapping[str, Observed]) -> dict[str, QParams]:
    """Quantization parameters of each finite value that varied. One that was only moved keeps those of its source."""
    found: dict[str, QParams] = {}
    for node in nodes:  # in their order, so that a source comes first
        seen = observed[node.name]
        if seen.is_finite and not seen.is_constant:
            source = _source(node)
            found[node.name] = found.get(source.name) or seen.qparams()
    return found


def _source(node: fx.Node) -> fx.Node:
    """Follows data movement back to the value that was moved; the value itself if it was not moved."""
    while is_moved(node):
        source = node.args[0]
        if not isinstance(source, fx.Node):
            break
        node = source
    return node
