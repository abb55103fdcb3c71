"""What eager answered on one input set, and what differs from it beyond single values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tsopt.compiler.calls.effects import Effect, outcome_of
from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.narrow_floats import widened
from tsopt.compiler.calls.structure import Structure, flatten
from tsopt.runtime.checking.compare import bit_equal, compare
from tsopt.runtime.checking.inputs import EXTREME, SPECIAL, ZEROS, InputSet


@dataclass(frozen=True, slots=True)
class Expected:
    """Eager's answer on one input set, and its inputs and the model's state after the call.

    leaves: what it returned, then what it has put into objects of the call.
    again: further calls and its answers to them, each on what the one before has left in the model: the same call
        again, and one on other inputs in between.
    """

    inputs: InputSet
    leaves: tuple[torch.Tensor, ...]
    structure: Structure
    effects: tuple[Effect, ...]
    written: tuple[torch.Tensor, ...]
    again: tuple[tuple[InputSet, tuple[torch.Tensor, ...]], ...] = ()

    @property
    def unusual(self) -> bool:
        """Whether NaN and infinities are what it is about: given, or what eager makes of extremes."""
        kind = self.inputs.kind
        floats = [widened(leaf) for leaf in self.leaves if leaf.is_floating_point()]
        made_up = kind == ZEROS or kind.startswith(EXTREME)
        return kind == SPECIAL or (made_up and not all(bool(leaf.isfinite().all()) for leaf in floats))

    @property
    def largest(self) -> float | None:
        """The largest finite magnitude of an output; None where none is a finite float."""
        floats = [widened(leaf) for leaf in self.leaves if leaf.is_floating_point() and leaf.numel()]
        return max((size for leaf in floats if (size := _largest_finite(leaf)) is not None), default=None)

    def call(self) -> Example:
        """The call, for repeated use."""
        leaves, _ = flatten((self.inputs.example.args, self.inputs.example.kwargs))
        written = not all(map(bit_equal, leaves, self.written))
        return replace(self.inputs.clone(), written=written)

    def name(self, position: int) -> str:
        """The name of an output."""
        labels = {index: f"{path}.new" for effect in self.effects for index, path in effect.labels()}
        return (labels | dict(self.structure.paths())).get(position) or "output"


def _largest_finite(values: torch.Tensor) -> float | None:
    """The largest finite magnitude; None where there is none. Finite numbers are selected only if others are there."""
    low, high = map(float, values.aminmax())  # both NaN where one of the values is
    largest = max(abs(low), abs(high))
    if math.isfinite(largest):
        return largest
    values = values[values.isfinite()]
    return float(values.abs().max()) if values.numel() else None


def answers(
    called: Callable[..., Any], inputs: InputSet, before: Sequence[torch.Tensor] = ()
) -> tuple[torch.Tensor, ...]:
    """What a call returns, in memory of its own: copies, or the answers `before` where it returns the same again."""
    call = inputs.clone()
    leaves, *_ = outcome_of(called, call.args, call.kwargs)
    return tuple(
        _held_once(leaf.detach(), first) for leaf, first in itertools.zip_longest(leaves, before[: len(leaves)])
    )


def _held_once(answer: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    return before if before is not None and compare(answer, before, exact=True).ok else answer.clone()


def difference_when_repeated(
    expected: Expected,
    first: Sequence[torch.Tensor],
    again: Sequence[Sequence[torch.Tensor]],
    exact: bool,
    limit: float | None,
) -> str:
    """How repeated calls of a candidate differ from eager: state kept in Python is not part of a graph."""
    for number, (mine, (inputs, theirs)) in enumerate(zip(again, expected.again, strict=True), 2):
        if len(mine) != len(theirs):
            return f"repeated call {number} returns {len(mine)} tensors, eager returns {len(theirs)}"
        for position, (value, reference) in enumerate(zip(mine, theirs, strict=True)):
            # Where eager answers the same again, so must the candidate, whatever its own first answer was judged by.
            same = inputs is expected.inputs and bit_equal(reference, expected.leaves[position])
            found = compare(value, first[position] if same else reference, exact=exact, limit=limit)
            if not found.ok:
                name = expected.name(position)
                return f"{name} in repeated call {number}: {found.reason}"
    return ""


def difference_in_structure(
    expected: Expected, structure: Structure, effects: Sequence[Effect], leaves: Sequence[Any]
) -> str:
    """How the nesting of results, or of what a call has put into objects, differs from eager; empty if it does not."""
    if effects != expected.effects:
        changed, by_eager = (", ".join(map(str, found)) or "nothing" for found in (effects, expected.effects))
        return f"an input differs from eager after the call: it changes {changed}, eager changes {by_eager}"[:300]
    if len(leaves) != len(expected.leaves):
        return f"{len(leaves)} output tensors, eager returns {len(expected.leaves)}"
    theirs = expected.structure
    return "" if structure == theirs else f"output structure {structure}, eager returns {theirs}"[:300]
