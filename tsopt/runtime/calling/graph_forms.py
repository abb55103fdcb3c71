"""What one graph of TorchDynamo was optimized to: a form for each set of weights that it is called with.

TorchDynamo compiles the code of a class, not an object of it: every object whose tensors have the same types calls the
same graph, with weights of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tsopt.runtime.calling.graph_weights import GraphWeights
from tsopt.runtime.calling.optimized import Optimized

PAYS = 100  # calls: a form that has served fewer when its weights are gone was not worth its time


class Form(GraphWeights):
    """What a graph was optimized to with these weights.

    Args:
        changes: how often it is optimized again once the weights have been written to.

    Attributes:
        fast: the optimized graph; None if it has been given up, or the weights are gone.
        has_any_values: it serves calls with these weights whatever they hold, as the graph itself does.
        calls: that it was asked for.
    """

    def __init__(self, weights: Mapping[int, torch.Tensor], changes: int) -> None:
        self.fast: Optimized | None = None
        self.changes, self.has_any_values, self.calls = changes, False, 0
        super().__init__(weights)

    def holds(self, fast: Optimized) -> None:
        """If eager won, whatever the weights are is right: the graph reads them itself."""
        self.fast, self.has_any_values = fast, fast.report.is_eager

    def serves(self, args: Sequence[Any]) -> bool:
        return self.passed_in(args) if self.has_any_values else self.are(args)

    def give_up(self) -> None:
        """From now on the graph itself serves these weights."""
        self.fast, self.has_any_values = None, True

    def gone(self) -> None:
        super().gone()
        self.fast = None  # it has copies of the weights


class Forms:
    """The forms of one graph. Looked up without a lock, changed under that of the graph."""

    def __init__(self) -> None:
        self._all: tuple[Form, ...] = ()
        self._next = 0  # where to look first: objects are mostly called in the same order again and again

    def __iter__(self) -> Iterator[Form]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def serving(self, args: Sequence[Any]) -> Form | None:
        """The form for a call, if there is one and its weights have not been written to."""
        forms, start = self._all, self._next
        for step in range(len(forms)):
            position = (start + step) % len(forms)
            if forms[position].serves(args):
                self._next = position + 1
                return forms[position]
        return None

    def made_for(self, args: Sequence[Any]) -> Form | None:
        """The form for the weights of a call, whatever they hold now."""
        return next((form for form in self._all if form.passed_in(args)), None)

    def add(self, form: Form) -> None:
        self._all = (*self._all, form)

    def remove(self, form: Form) -> None:
        self._all = tuple(item for item in self._all if item is not form)
        form.gone()  # the next one needs the memory

    def forget_the_gone(self) -> bool:
        """Forgets forms whose weights are gone. Returns whether any of these went before it had paid."""
        gone = [form for form in self._all if form.is_gone]
        self._all = tuple(form for form in self._all if not form.is_gone)
        return any(form.calls < PAYS for form in gone)

    def release(self) -> None:
        """Forgets all, and what they hold."""
        forms, self._all = self._all, ()
        for form in forms:
            form.gone()
