"""The graphs between graph breaks: which of them are worth optimizing, and how they are called."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from tsopt.compiler.calls.example import Example, example
from tsopt.compiler.calls.types import TensorType
from tsopt.compiler.graph.origin import origin_in
from tsopt.compiler.protect import training_of
from tsopt.compiler.turns import Turn
from tsopt.errors import TsoptError, UsageError
from tsopt.runtime import forks
from tsopt.runtime.calling import unseen_writes
from tsopt.runtime.calling.audit import LOOK_AT
from tsopt.runtime.calling.graph_forms import PAYS, Form, Forms
from tsopt.runtime.calling.graph_weights import Bound, Constants, silently_written, written_among
from tsopt.runtime.calling.optimized import Optimized

log = logging.getLogger("tsopt")
# Of the time of a call: a part that takes less is left as it is. Optimizing one takes seconds, whatever it computes.
LEAST_SHARE = 0.02
COVERED = 0.8  # of the time of all parts: once the largest ones take as much, the others are left as they are
# Times as much for graphs that turn up later, for other sizes perhaps: there may be many. And how many are optimized.
LATER, MOST_LATER = 5, 4
CALLS, CALL_SECONDS = 3, 0.3  # calls that shares are taken from, fewer if they take longer than this many seconds
LOSSES = 3  # times that weights are replaced before the form for them has paid; then no other is made
MOST_OBJECTS = 128  # that a graph is optimized for, each with its own weights
# Seconds for optimizing all parts, about; for a part that takes all of the time of a call, of which others get their
# share, but FOR_EACH at least, however many objects call it.
FOR_ALL, FOR_WHOLE, FOR_EACH = 120.0, 90.0, 20.0
SPENT = "left as it is for further objects: the time for all parts is spent"
Optimize = Callable[[Callable[..., Any], Example], Optimized]  # a graph and an example of its inputs


def weigh(graphs: Sequence[Graph], timed_call: Callable[[], float], known: float | None = None) -> float:
    """Finds which share of the time of a call each graph takes; those that matter little are left as they are.

    These are all that take next to none, and the smallest ones where the others take most of the time of all graphs.
    Returns the seconds of a call.

    Args:
        graphs: a call may add some: these, and those that it does not reach, are not weighed.
        timed_call: calls the model and returns the seconds.
        known: seconds of a call that takes long: the graphs have been timed as they were traced, which is enough then.
    """
    weighed = list(graphs)
    spent: list[float] = []
    while len(spent) < CALLS and sum(spent) <= CALL_SECONDS:
        for graph in weighed if known is None else ():
            graph.is_timed, graph.seconds = True, 0.0
        seconds = known or timed_call()
        for graph in graphs:
            graph.is_timed = False
        for graph in weighed:
            if graph.seconds:
                graph.share = max(graph.share or 0.0, min(1.0, graph.seconds / seconds) / graph.objects)
        spent.append(seconds)
    _leave_the_small([graph for graph in weighed if graph.share is not None])
    return min(spent)


def _leave_the_small(graphs: Sequence[Graph]) -> None:
    """Leaves those as they are that take too little of the time, and what the others take most of."""
    whole, covered = sum((graph.share or 0.0) * graph.objects for graph in graphs), 0.0
    for graph in sorted(graphs, key=lambda graph: -(graph.share or 0.0)):
        if (graph.share or 0.0) < LEAST_SHARE:
            graph.leave(f"less than {LEAST_SHARE:.0%} of the time")
        elif covered > COVERED * whole - 1e-9:
            graph.leave(f"larger parts take {COVERED:.0%} of the time of all parts")
        covered += (graph.share or 0.0) * graph.objects


def as_lines(graphs: Sequence[Graph]) -> list[str]:
    """What became of each graph; those with the same outcome in one line."""
    found: dict[str, list[int]] = {}
    for number, item in enumerate(graphs, 1):
        reports = [fast.report for fast in item.every_fast]
        wins = [f"{item.share_and_place}{report.nodes[1]} op nodes, {report.winner} wins" for report in reports]
        left = [item.refused] if item.refused or not wins else []
        for outcome in dict.fromkeys([*wins, *left]):  # that of each object, where several call it
            found.setdefault(outcome, []).append(number)
    return [f"part{'s' if len(numbers) > 1 else ''} {_said(numbers)}: {what}" for what, numbers in found.items()]


def _said(numbers: Sequence[int]) -> str:
    """`1, 3 to 5, 8`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


@dataclass
class Purse:
    """Seconds that are left for optimizing graphs, all of them together."""

    left: float = float("inf")


class Graph:
    """One graph of TorchDynamo: optimized at its first call without gradients, otherwise run unchanged.

    Parameters and buffers, which TorchDynamo passes in each call, are treated as constants for as long as they are the
    same tensors and have not been written to. Objects of one class call the same graph: it is optimized for the weights
    of each. Tensors that the graph itself writes, buffers that others write, and what is replaced are inputs.

    Args:
        changes: how often it is optimized again when weights have been written to; then it is run unchanged with them.
            So often for each object; and for all of them together after the first time, if what was made has not paid
            by then.

    Attributes:
        refused: why it was not optimized.
        seconds: that it has run for, unchanged, while `is_timed`.
        forward: runs it unchanged.
        share: of the time of a call, with the weights of one object; None if that is not known.
        late: seconds of a call of the model, for a graph that turned up when the others had been weighed: its first
            call weighs it.
        waits: others are optimized before it; until then it runs unchanged.
        has_room: whether one more of these is optimized, or one for another object.
        purse: what is spent on it.
        tries: how often it was optimized.
        wait: until the device is done.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        optimize: Optimize,
        known: dict[Any, Graph] | None = None,
        *,
        changes: int = 0,
    ) -> None:
        self.graph, self.optimize = graph, optimize
        self.is_timed, self.seconds, self.wait = False, 0.0, lambda: None
        self.share: float | None = None
        self.late: float | None = None
        self.has_room: Callable[[], bool] = lambda: True
        self._is_left = self.waits = False
        self.forward = graph.forward  # not the module, which prints what it raises
        self._writes = silently_written(graph.graph)
        self._place = next(filter(None, (origin_in(node.meta).get("source") for node in graph.graph.nodes)), "")
        self._changes, self._vain, self._losses = changes, changes, LOSSES
        self.purse, self.tries = Purse(), 0
        self.known = {} if known is None else known  # by what decides about them
        self.refused = ""
        self._objects: set[tuple[int, ...]] = set()  # the parameters of those that called it while it was timed
        self._constants = Constants(self.forward, self._writes)
        self._forms = Forms()
        self._served: Form | None = None  # what served the last call: other threads read it at once
        self._tried = self._is_closed = False  # whether it was ever optimized; whether it is not, for other weights
        self._turn = Turn()
        forks.tell(self)

    def forked(self) -> None:
        """No thread is there that may have held the lock."""
        self._turn = Turn()

    def __call__(self, *args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            if not self._tried and not self.refused:
                self.refused = "gradients are required: call it under torch.no_grad() or torch.inference_mode()"
                log.info("%s runs as it is: %s", self._name, self.refused)
            return self._as_it_is(*args)
        if self.is_timed or (self.late is not None and not self._shares(args)):
            return self._timed(args)
        form = self._served
        if form is None or not form.are(args):
            form = self._serving(args)
        fast = None if form is None else form.fast
        if form is None or fast is None or fast.executable is None:
            return self._as_it_is(*args)
        form.calls += 1
        return fast(*[value for i, value in enumerate(args) if i not in form.positions])

    @property
    def fast(self) -> Optimized | None:
        """The optimized graph, as it served the last call; None before the first call, or if it was not optimized."""
        form = self._served
        return None if form is None else form.fast

    @property
    def every_fast(self) -> list[Optimized]:
        """The optimized graph for the weights of each object."""
        return [form.fast for form in self._forms if form.fast is not None]

    @property
    def objects(self) -> int:
        """How many objects called it while it was timed."""
        return max(1, len(self._objects))

    def release(self) -> None:
        """Lets go of what it was optimized to, and runs unchanged from now on."""
        self._is_closed, self._served = True, None
        self._forms.release()

    def _as_it_is(self, *args: Any) -> Any:
        found = self.forward(*args)
        if self._writes:
            unseen_writes.written(args[i] for i in self._writes if not isinstance(args[i], nn.Parameter))
        return found

    def _serving(self, args: Sequence[Any]) -> Form | None:
        """What serves a call, if it is not what served the last one; None if the graph itself has to."""
        if self.waits:
            return None
        form = self._forms.serving(args)
        if form is None and not (self._is_closed and self._forms.made_for(args) is None):
            # While another thread optimizes it again, or for other weights, the graph itself serves this call.
            with self._turn.taken(at_once=self._tried) as mine:
                form = self._optimized(args) if mine else None
        if form is not None:
            self._served = form
        return form

    def _optimized(self, args: Sequence[Any]) -> Form | None:
        """What serves a call with other weights, or with weights that have been written to."""
        while (form := self._forms.serving(args)) is None:  # or another thread was faster
            changed = self._forms.made_for(args)
            if changed is None and self._is_closed:
                return None
            changes = self._changes if changed is None else changed.changes
            if changed is not None and not self._constants.vary(changed.rewritten(args), args):
                # The first time is free for each object: weights are often loaded after a first call with random ones.
                self._vain -= changed.calls < PAYS and changes < self._changes
                changes -= 1
            if changed is not None and (changes < 0 or (changed.calls < PAYS and self._vain < 0)):
                changed.give_up()
                if self._changes:
                    self._stop("its weights change between calls")
                continue
            constants = self._constants.among(args, self._forms)
            if changed is None:
                self._losses -= self._forms.forget_the_gone()
                if self._losses < 0 or len(self._forms) >= MOST_OBJECTS:
                    self._is_closed = True
                    many = f"more than {MOST_OBJECTS} objects call it, each with weights of its own"
                    self._stop("its weights are replaced between calls" if self._losses < 0 else many)
                    return None
            else:
                self._forms.remove(changed)
                log.info("%s is optimized again: its weights have changed", self._name)
            self._optimize(args, constants, changes, is_further=changed is None)
            self._tried = True
        return form

    def _stop(self, reason: str) -> None:
        """Says that it is not optimized again."""
        self.refused = reason
        self._warn(
            f"is not optimized any more: {reason}. Once they are final, torch._dynamo.reset() lets the "
            "next call optimize it again"
        )

    def _differs(self, form: Form, found: str, weights_changed: bool) -> None:
        """An audit found a difference: the next call optimizes it again."""
        form.outdate()
        why = "its weights were written through numpy or .data" if weights_changed else LOOK_AT
        self._warn(f"runs unchanged until it is optimized again: an audit found a difference ({found}); {why}")

    @property
    def _name(self) -> str:
        return f"the graph of torch.compile at {self._place}" if self._place else "a graph of torch.compile"

    def _warn(self, text: str) -> None:
        warnings.warn(f"tsopt: {self._name} {text}", stacklevel=2)

    def _timed(self, args: Sequence[Any]) -> Any:
        """A call of the graph as it is; the first one decides about a graph that turned up late."""
        start = time.perf_counter()
        found = self._as_it_is(*args)
        self.wait()
        spent = time.perf_counter() - start
        self.seconds += spent
        self._objects.add(tuple(id(value) for value in args if isinstance(value, nn.Parameter)))
        with self._turn.taken() as mine:
            if mine and self.late is not None:
                self.share, self.late = spent / self.late, None
                self.refused = "traced later, and optimized when it is called again"
                if self.share < LATER * LEAST_SHARE:
                    self.leave(f"traced later, and takes less than {LATER * LEAST_SHARE:.0%} of the time")
                elif not self.has_room():
                    self.leave(f"traced after {MOST_LATER} others for other sizes")
        return found

    @property
    def is_wanted(self) -> bool:
        """Whether it was found to be worth optimizing."""
        return self.share is not None and not self._is_left

    @property
    def budget(self) -> float | None:
        """The seconds that may be spent on it for one object; None if it is not known how much it matters."""
        return None if self.share is None else max(FOR_EACH, min(FOR_WHOLE * self.share, self.purse.left))

    @property
    def share_and_place(self) -> str:
        """`43% of a call, from net.py:31: `, as far as it is known."""
        share = "" if self.share is None else f"{self.share * self.objects:.0%} of a call"
        known = ", ".join(filter(None, (share, self._place and f"from {self._place}")))
        return f"{known}: " if known else ""

    def leave(self, reason: str) -> None:
        """It is run unchanged from now on."""
        self.refused, self._is_left = reason, True

    def _optimize(
        self, args: Sequence[Any], weights: Mapping[int, torch.Tensor], changes: int, *, is_further: bool
    ) -> None:
        """Adds a form for these weights; if there is none, it is not optimized for others either.

        Args:
            is_further: the weights are those of an object that it was not optimized for yet.
        """
        values = [value for i, value in enumerate(args) if i not in weights]
        training = any(training_of(module for module in self.graph.modules() if module is not self.graph))
        if training or not any(isinstance(value, torch.Tensor) for value in values):
            self._refuse("a module is in training mode" if training else "nothing to compute")
            return
        if self._shares(args):
            return
        if self._is_left:
            self._is_closed = True
            return
        self.tries += is_further
        if is_further and self.tries > 1 and (self.purse.left < FOR_EACH or not self.has_room()):
            self._refuse(SPENT)
            return
        start = time.perf_counter()
        form = Form(weights, changes)  # before it is optimized: what is written meanwhile is a change
        try:
            found: Any = torch._dynamo.disable(self.optimize)  # type: ignore[no-untyped-call]
            with torch.no_grad():
                fast = found(Bound(self.graph, weights, self._place), example(*values))
        except UsageError as error:
            self._warn(f"runs as it is: {'; '.join(filter(None, (error.what, error.fix)))}")
            self._refuse(error.what)
            return
        except TsoptError as error:
            log.info("a graph of torch.compile is not optimized: %s", error)
            self._refuse(error.what)
            return
        finally:
            self.purse.left -= time.perf_counter() - start
        if written_among(weights.values(), fast.program.state.values()):
            self._refuse("it writes to its weights")  # those of the object that it was optimized for
            return
        fast.unwatched(partial(self._differs, form) if self._changes else None)  # changed weights are detected here
        form.holds(fast)
        self._is_closed |= fast.report.is_eager  # as it would be with other weights: its time does not depend on them
        self._forms.add(form)
        self.refused = ""
        self.known[self._key(args)] = self

    def _refuse(self, reason: str) -> None:
        self.refused, self._is_closed = reason, True

    def _shares(self, args: Sequence[Any]) -> bool:
        """Whether the same graph has been optimized, which serves for this one then."""
        twin = self.known.get(self._key(args))
        form = None if twin is None or twin is self else twin._forms.serving(args)
        if form is None:
            return False
        self._forms.add(form)
        self._served = form
        self.late, self._tried, self.refused = None, True, ""
        return True

    def _key(self, args: Sequence[Any]) -> Any:
        """What decides about a graph: dynamo traces the same one again, for a counter in Python, say."""
        what = [id(value) if isinstance(value, nn.Parameter) else _type_of(value) for value in args]
        own = [(name, id(value)) for name, value in self.graph.state_dict(keep_vars=True).items()]
        return *_code_of(self.graph), *what, *own


def _code_of(graph: fx.GraphModule) -> list[Any]:
    """What a graph and the branches and loops in it compute. Different functions may be written alike."""
    return [
        (name, item.code, *[id(node.target) for node in item.graph.nodes if node.op == "call_function"])
        for name, item in graph.named_modules()
        if isinstance(item, fx.GraphModule)
    ]


def _type_of(value: Any) -> Any:
    return TensorType.of(value) if isinstance(value, torch.Tensor) else repr(value)
