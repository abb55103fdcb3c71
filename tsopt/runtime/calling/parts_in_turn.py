"""The parts of a model in the hands of TorchDynamo: what makes them, and in which order they are optimized."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import fx

from tsopt.compiler.calls.example import Example
from tsopt.errors import CaptureError
from tsopt.runtime.calling import dynamo_regions
from tsopt.runtime.calling.graph_parts import FOR_ALL, MOST_LATER, Graph, Purse, weigh
from tsopt.runtime.calling.optimized import Optimized
from tsopt.runtime.checking.reference64 import rounded_from_float64
from tsopt.runtime.racing.contenders import Progress

PATIENCE = 10.0  # times as long as a call of the model: the time for its largest part in float64

# A graph, an example of its inputs, the seconds that may be spent, and the callback that is told each step.
OptimizePart = Callable[[Callable[..., Any], Example, float | None, Progress], Optimized]


class Lease:
    """Held by the callers of a model's parts. Once the last of them is gone, the parts release their compiled forms.

    Args:
        optimize: see OptimizePart.
    """

    def __init__(self, optimize: OptimizePart, progress: Progress, wait: Callable[[], None]) -> None:
        self.optimize, self.progress = optimize, progress
        self.parts = Parts(weakref.ref(self), wait)
        weakref.finalize(self, self.parts.release).atexit = False


class Parts:
    """The backend of one torch.compile: makes the graphs, and has them optimized.

    TorchDynamo keeps it for as long as the code of the model's class exists, so it does not keep the model alive.

    Attributes:
        graphs: in the order in which they were traced.
        call_seconds: of a call of the model, with its graphs as they are, once these have been weighed.
        region: where TorchDynamo keeps what it has compiled.
    """

    def __init__(self, lease: weakref.ref[Lease], wait: Callable[[], None]) -> None:
        self.graphs: list[Graph] = []
        self.call_seconds: float | None = None
        self.region: int | None = None
        self._lease, self._wait = lease, wait
        self._known: dict[Any, Graph] = {}
        self._weighed, self._purse = 0, Purse(FOR_ALL)
        self._is_holding_back = False

    def backend(self, graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        number = len(self.graphs) + 1

        def announced(called: Callable[..., Any], inputs: Example) -> Optimized:
            lease = self._lease()
            if lease is None:
                raise CaptureError("the model that it is a part of is gone")
            title, tell = f"part {number} of {len(self.graphs)}", lease.progress
            tell(title)
            # What is optimized keeps the last argument, which must not keep the lease.
            return lease.optimize(called, inputs, made.budget, lambda text: tell(f"{title}: {text}"))

        made = Graph(graph, announced, self._known)
        made.is_timed, made.late, made.wait = self.call_seconds is None, self.call_seconds, self._wait
        made.purse, made.waits = self._purse, self._is_holding_back
        if made.late is not None:
            made.has_room = self._has_room
        self.graphs.append(made)
        return made

    def _has_room(self) -> bool:
        """Whether one more late graph is optimized: one that asks is among them."""
        late = [graph for graph in self.graphs[self._weighed :] if graph.is_wanted]
        return sum(max(graph.tries, 1) for graph in late) <= MOST_LATER

    def weigh(self, timed_call: Callable[[], float], known: float | None = None) -> None:
        """Finds out which graphs are worth optimizing; those that turn up from now on are late.

        Args: see `graph_parts.weigh`.
        """
        self.call_seconds = weigh(self.graphs, timed_call, known)
        self._weighed = len(self.graphs)

    def in_turn(self) -> Iterator[bool]:
        """Lets the largest graph be optimized by the next call, then all others; says each time if these are the last.

        The largest one takes the most time to optimize, and is the most likely one to make the model wrong.
        """
        wanted = self._wanted
        if len(wanted) > 1:
            self._hold_back([graph for graph in self.graphs if graph is not wanted[0]])
            yield False
        self._hold_back([])
        yield True

    @property
    def _wanted(self) -> list[Graph]:
        """Those that are worth optimizing, the largest first."""
        wanted = [graph for graph in self.graphs if graph.is_wanted]
        return sorted(wanted, key=lambda graph: -(graph.share or 0.0) * graph.objects)

    @contextmanager
    def largest_in_float64(self) -> Iterator[str]:
        """In which no graph is optimized, and the largest one computes in float64; its name, or nothing without one."""
        wanted = self._wanted
        if not wanted:
            yield ""
            return
        largest = wanted[0]
        as_it_is = largest.forward
        self._hold_back(self.graphs)
        seconds = PATIENCE * (self.call_seconds or 0.0)
        largest.forward = lambda *args: rounded_from_float64(as_it_is, args, seconds)
        try:
            yield f"part {self.graphs.index(largest) + 1}"
        finally:
            largest.forward = as_it_is
            self._hold_back([])

    def leave_all(self, reason: str) -> None:
        """None of the graphs is optimized."""
        for graph in self._wanted:
            graph.leave(reason)

    def _hold_back(self, some: Sequence[Graph]) -> None:
        self._is_holding_back = bool(some)  # also those that turn up meanwhile
        for graph in self.graphs:
            graph.waits = any(graph is item for item in some)

    @property
    def is_changed(self) -> bool:
        """Whether a graph was optimized to what is not eager."""
        return any(not fast.report.is_eager for graph in self.graphs for fast in graph.every_fast)

    def leave_the_others(self) -> None:
        """The graphs that have not had their turn are left as they are: the model is wrong without them."""
        numbers = [str(number) for number, graph in enumerate(self.graphs, 1) if graph.every_fast]
        for graph in self.graphs:
            if graph.waits and (graph.is_wanted or not graph.refused):
                graph.leave(f"not tried: the model is wrong already with part {', '.join(numbers)} optimized")

    def release(self) -> None:
        """Lets go of what the graphs were optimized to."""
        dynamo_regions.end(self.region)
        for graph in self.graphs:
            graph.release()
        self._known.clear()
