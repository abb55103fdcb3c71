"""The parameters and buffers that a graph of TorchDynamo was optimized with, and whether they have been written to."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch

from tsopt.runtime.calling import unseen_writes


class GraphWeights:
    """They are among the arguments of each call, where TorchDynamo passes them.

    Args:
        weights: by their position.
        written: ids of those that the graph itself writes in each call.
    """

    def __init__(self, weights: Mapping[int, torch.Tensor], written: Container[int]) -> None:
        self.positions = frozenset(weights)
        kept = [(i, value) for i, value in weights.items() if id(value) not in written]
        self._seen = [(i, value, value._version, value.data_ptr()) for i, value in kept]
        self._memory = frozenset(unseen_writes.place_of(value) for _, value in kept)
        self._changed = False
        unseen_writes.tell(self)

    def are(self, args: Sequence[Any]) -> bool:
        """Whether these are what a call passes, with the values that they had."""
        if self._changed:
            return False
        for i, value, version, place in self._seen:  # a loop of its own: several times as fast as `all`
            if args[i] is not value or value._version != version or value.data_ptr() != place:
                return False
        return True

    def was_written(self, places: frozenset[int]) -> None:
        if not self._memory.isdisjoint(places):
            self.forget()

    def forget(self) -> None:
        """They are not what they were."""
        self._changed = True
