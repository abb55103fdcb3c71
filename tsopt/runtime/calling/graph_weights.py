"""The parameters and buffers that a graph of TorchDynamo was optimized with, and whether they have been written to.

Batch norm writes its statistics in training mode without raising their versions. The counter beside them has one, and
says when they have to be compared by value; TorchDynamo does not pass it to a graph of eval mode, so it is looked for.
Where there is none, they are compared as often as that takes 1 % of the time: training takes longer than the pauses.
"""

from __future__ import annotations

import gc
import logging
import re
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tsopt.compiler.tensor_bytes import same_bytes
from tsopt.compiler.tensor_life import life_of
from tsopt.compiler.thread_modes import modes_kept, switches_modes
from tsopt.runtime.calling import unseen_writes

log = logging.getLogger("tsopt")
SHARE = 0.01  # of the time, for comparing statistics
TRAINING = 5  # the position of this flag in all of these
BATCH_NORMS = (F.batch_norm, torch.batch_norm, torch.native_batch_norm)
_clock = time.perf_counter


class GraphWeights:
    """They are among the arguments of each call, where TorchDynamo passes them.

    They are known by their identity and not kept alive: once one of them is gone, no call passes these weights.

    Args:
        weights: by their position.

    Attributes:
        positions: of all of them.
        is_gone: one of them is no longer there.
    """

    def __init__(self, weights: Mapping[int, torch.Tensor]) -> None:
        self.positions, self.is_gone = frozenset(weights), False
        self._seen = [(i, id(value), value._version, value.data_ptr()) for i, value in weights.items()]
        self._parameters = [(i, id(value)) for i, value in weights.items() if isinstance(value, nn.Parameter)]
        self._memory = frozenset(map(unseen_writes.place_of, weights.values()))
        small = [value for value in weights.values() if value.dim() < 2 and not isinstance(value, nn.Parameter)]
        self._statistics = [(alias_of(value), value.detach().clone()) for value in small]
        self._on_cpu = bool(small) and all(value.device.type == "cpu" for value in small)
        known = {id(value) for value in weights.values()}
        self._beside = [(alias_of(value), value._version) for value in _beside(small) if id(value) not in known]
        self._changed = False
        self._next = self._look = float("inf")  # when statistics are looked at again; seconds of a look
        for _ in range(2):  # the first one is cold
            self._have_their_values()
        this = weakref.ref(self)

        def dies(_: object) -> None:
            weights = this()
            if weights is not None:
                weights.gone()

        self._lives = [weakref.ref(life_of(value), dies) for value in weights.values()]
        unseen_writes.tell(self)

    def are(self, args: Sequence[Any]) -> bool:
        """Whether these are what a call passes, with the values that they had."""
        if self._changed:
            return False
        for i, known, version, place in self._seen:  # a loop of its own: several times as fast as `all`
            value = args[i]
            if id(value) != known or value._version != version or value.data_ptr() != place:
                return False
        for value, version in self._beside:
            if value._version != version:
                return self._have_their_values()
        return _clock() < self._next or self._have_their_values()

    def passed_in(self, args: Sequence[Any]) -> bool:
        """Whether these are what a call passes, whatever they hold now."""
        return not self.is_gone and all(id(args[i]) == known for i, known, _, _ in self._seen)

    def rewritten(self, args: Sequence[Any]) -> set[int]:
        """Which of these have been written to or given other memory, of those that a call passes."""
        return {i for i, _, *then in self._seen if [args[i]._version, args[i].data_ptr()] != then}

    def share_parameters_with(self, args: Sequence[Any]) -> bool:
        """Whether a call passes the parameters among these, if there are any, with whatever buffers."""
        return all(id(args[i]) == known for i, known in self._parameters)

    def gone(self) -> None:
        """One of them is no longer there, and its identity may soon be that of another tensor."""
        self.is_gone = self._changed = True

    def _have_their_values(self) -> bool:
        """Whether statistics are what they were, whatever was written beside them."""
        start = _clock()
        beside = [(value, value._version) for value, _ in self._beside]
        if not all(same_bytes(value, before) for value, before in self._statistics):
            self._changed = True
            return False
        self._beside = beside
        if self._on_cpu:  # elsewhere a look makes the caller wait for the device
            end = _clock()
            self._look = min(self._look, end - start)
            self._next = end + self._look / SHARE
        return True

    def was_written(self, places: frozenset[int]) -> None:
        if not self._memory.isdisjoint(places):
            self._changed = True

    def outdate(self) -> None:
        """Has them count as changed, whatever they hold: an audit has shown that they are."""
        self._changed = True


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory with the same version counter, in a tensor that does not keep this one alive."""
    with torch.inference_mode(False):  # inside, counters would not be shared
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(tensor.detach(), requires_grad=False)
        return tensor.detach()


def _beside(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The buffers of the modules that own these, wherever they are: a tenth of a second."""
    own = {id(tensor) for tensor in tensors}
    if not own:
        return []
    modules = (item for item in gc.get_objects() if issubclass(type(item), nn.Module))
    tables = [module.__dict__.get("_buffers") or {} for module in modules]
    owners = [table for table in tables if any(id(value) in own for value in table.values())]
    found = {id(value): value for table in owners for value in table.values()}
    return [value for value in found.values() if isinstance(value, torch.Tensor) and not value.is_inference()]


def silently_written(graph: fx.Graph) -> list[int]:
    """The positions of the arguments that calls of a graph write without raising their versions."""
    inputs = {node: i for i, node in enumerate(node for node in graph.nodes if node.op == "placeholder")}
    calls = [node for node in graph.nodes if node.target in BATCH_NORMS]
    training = [node for node in calls if node.kwargs.get("training") or node.args[TRAINING : TRAINING + 1] == (True,)]
    return sorted({inputs[given] for node in training for given in node.all_input_nodes if given in inputs})


class Constants:
    """Which arguments of a graph are taken for constants: tensors of modules, unless calls write or replace them.

    Args:
        call: calls the graph.
        silently: the positions of what it writes without raising versions.
    """

    def __init__(self, call: Callable[..., Any], silently: Iterable[int]) -> None:
        self._call, self._inputs = call, set(silently)
        self._owned: set[int] | None = None

    def among(self, args: Sequence[Any], known: Iterable[GraphWeights]) -> dict[int, torch.Tensor]:
        """Those of a call, by position.

        Args:
            known: the weights of earlier calls.
        """
        owned = {i for i, value in enumerate(args) if _is_owned(value)}
        if self._owned is None:
            self._owned = owned
            written = written_by(self._call, args)
            self._inputs |= {i for i in owned if not isinstance(args[i], nn.Parameter)} if written is None else written
        # Buffers of another object than the traced one, which bear no mark; or what the same object has now instead.
        others = {i for i in self._owned - owned if isinstance(args[i], torch.Tensor) and not args[i].is_inference()}
        if any(weights.share_parameters_with(args) and not weights.passed_in(args) for weights in known):
            self._inputs |= others
        written_to = {unseen_writes.place_of(args[i]) for i in self._inputs if isinstance(args[i], torch.Tensor)}
        constants = {i: args[i] for i in sorted((owned | others) - self._inputs)}
        return {i: value for i, value in constants.items() if unseen_writes.place_of(value) not in written_to}

    def vary(self, written: set[int], args: Sequence[Any]) -> bool:
        """If nothing but buffers has been written to, they are inputs from now on: other code keeps state in them."""
        if not written or any(isinstance(args[i], nn.Parameter) for i in written):
            return False
        self._inputs |= written
        return True


class Bound(nn.Module):
    """The graph with its weights, called with the rest. It does not keep the weights alive, but their memory."""

    def __init__(self, graph: fx.GraphModule, weights: Mapping[int, torch.Tensor], place: str) -> None:
        super().__init__()
        self.original_name = re.sub(r"\W+", "_", f"graph at {place}" if place else "graph")  # in reports and warnings
        graph.training = False  # dynamo's own flag; what the modules of the model did is in the graph
        self.graph = graph
        self.places = tuple(weights)
        self.switches = switches_modes(graph)
        for i, value in weights.items():
            if isinstance(value, nn.Parameter):
                self.register_parameter(f"weight_{i}", cast(nn.Parameter, alias_of(value)))
            else:
                self.register_buffer(f"weight_{i}", alias_of(value))
        self.training = False

    def forward(self, *values: Any) -> Any:
        rest = iter(values)
        count = len(self.places) + len(values)
        args = [getattr(self, f"weight_{i}") if i in self.places else next(rest) for i in range(count)]
        if not self.switches:
            return self.graph.forward(*args)
        with modes_kept():
            return self.graph.forward(*args)


def _is_owned(value: Any) -> bool:
    """Whether dynamo passes this tensor because a module owns it."""
    if not isinstance(value, torch.Tensor) or value.is_inference():
        return False
    return isinstance(value, nn.Parameter) or hasattr(value, "_dynamo_static_input_type")


def written_among(weights: Iterable[torch.Tensor], written: Iterable[torch.Tensor]) -> bool:
    """Whether any of these lies where others are written."""
    places = {unseen_writes.place_of(tensor) for tensor in written}
    return any(unseen_writes.place_of(tensor) in places for tensor in weights)


def written_by(call: Callable[..., Any], args: Sequence[Any]) -> frozenset[int] | None:
    """The positions of the tensors whose versions a call raises; None if that takes a real call to tell."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.inference_mode(False), torch.no_grad():
            given = [_fake(mode, value) if isinstance(value, torch.Tensor) else value for value in args]
            before = {i: value._version for i, value in enumerate(given) if isinstance(value, torch.Tensor)}
            with modes_kept():
                call(*given)
            return frozenset(i for i, version in before.items() if given[i]._version != version)
    except Exception as error:  # of an op that has no fake form, or needs values
        log.info("what a graph of TorchDynamo writes cannot be told: %r", error)
        return None


def _fake(mode: FakeTensorMode, value: torch.Tensor) -> torch.Tensor:
    if value.is_inference():  # which counts no versions
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return mode.from_tensor(value)
