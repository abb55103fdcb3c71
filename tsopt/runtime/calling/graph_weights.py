"""The parameters and buffers that a graph of TorchDynamo was optimized with, and whether they have been written to.

Batch norm writes its statistics in training mode without raising their versions. The counter beside them has one, and
says when they have to be compared by value; TorchDynamo does not pass it to a graph of eval mode, so it is looked for.
Where there is none, they are compared as often as that takes 1 % of the time: training takes longer than the pauses.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from tsopt.compiler.protect import same_bytes
from tsopt.runtime.calling import unseen_writes

SHARE = 0.01  # of the time, for comparing statistics
TRAINING = 5  # the position of this flag in all of these
BATCH_NORMS = (F.batch_norm, torch.batch_norm, torch.native_batch_norm)
_clock = time.perf_counter


class GraphWeights:
    """They are among the arguments of each call, where TorchDynamo passes them.

    Args:
        weights: by their position.

    Attributes:
        positions: of all of them.
    """

    def __init__(self, weights: Mapping[int, torch.Tensor]) -> None:
        self.positions = frozenset(weights)
        self._seen = [(i, value, value._version, value.data_ptr()) for i, value in weights.items()]
        self._memory = frozenset(map(unseen_writes.place_of, weights.values()))
        small = [value for value in weights.values() if value.dim() < 2 and not isinstance(value, nn.Parameter)]
        self._statistics = [(value, value.detach().clone()) for value in small]
        self._on_cpu = bool(small) and all(value.device.type == "cpu" for value in small)
        known = {id(value) for value in weights.values()}
        self._beside = [(value, value._version) for value in _beside(small) if id(value) not in known]
        self._changed = False
        self._next = self._look = float("inf")  # when statistics are looked at again; seconds of a look
        for _ in range(2):  # the first one is cold
            self._have_their_values()
        unseen_writes.tell(self)

    def leave_out(self, written: Iterable[torch.Tensor]) -> None:
        """Those that the graph itself writes in each call: they may hold anything."""
        out = {id(value) for value in written}
        self._seen = [item for item in self._seen if id(item[1]) not in out]
        self._memory = frozenset(unseen_writes.place_of(item[1]) for item in self._seen)
        self._statistics = [pair for pair in self._statistics if id(pair[0]) not in out]

    def are(self, args: Sequence[Any]) -> bool:
        """Whether these are what a call passes, with the values that they had."""
        if self._changed:
            return False
        for i, value, version, place in self._seen:  # a loop of its own: several times as fast as `all`
            if args[i] is not value or value._version != version or value.data_ptr() != place:
                return False
        for value, version in self._beside:
            if value._version != version:
                return self._have_their_values()
        return _clock() < self._next or self._have_their_values()

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
