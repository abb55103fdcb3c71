"""A program for many sizes where its numbers are largest: at the ends of its ranges, if its tensors exist there."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from tsopt.compiler.analysis.ranged_call import Values
from tsopt.compiler.analysis.ranges import recorded
from tsopt.compiler.calls.signature import Dim
from tsopt.compiler.graph.program import Program
from tsopt.compiler.sizes.specialize import Sizes, evaluate
from tsopt.runtime.onnx.integers.indices import Use, is_index_only, is_whole, uses_of

LARGEST_SIZE = 1 << 30  # of an axis without an end: a tensor of bytes of this size is larger than any that is tried
STEPS_IN_HALF = 16  # how finely sizes are looked at: the largest that exist are met within 5 %
STEPS = STEPS_IN_HALF * LARGEST_SIZE.bit_length()  # to the lowest sizes


@dataclass(frozen=True, slots=True)
class At:
    """A program at some sizes."""

    values: Values
    sizes: Sizes
    uses: list[Use]
    lookups: frozenset[fx.Node]  # inputs, weights and values that are indices and nothing else

    @classmethod
    def of(cls, program: Program, sizes: Sizes | None) -> At:
        values = recorded(program) if sizes is None else evaluate(program, sizes)
        whole = (node for node in program.graph.nodes if is_whole(values.get(node)))
        return cls(
            values, sizes or {}, uses_of(program, values), frozenset(n for n in whole if is_index_only(n, values))
        )

    def use(self, other: Use) -> Use:
        """A use at another place, here."""
        return next(mine for mine in self.uses if mine.call is other.call and mine.index is other.index)


def is_too_large(value: torch.Tensor) -> bool:
    """Whether no call makes it, as where all positions of the longest sequence are compared with each other."""
    return type(value.numel()) is int and value.numel() > LARGEST_SIZE


def ends_of(program: Program) -> list[At]:
    """The program as recorded; one for many sizes at the lowest, and at the highest that it takes."""
    dims = program.signature.dims
    if not dims:
        return [At.of(program, None)]
    # NOTE: sizes that are the same at one end may be told apart at the other.
    highest = _Smaller(program, dims)
    ends = [highest.at(STEPS), highest.at(highest.first(lambda place: place is not None))]
    found = [place for place in ends if place is not None]
    return found if len(found) == len(ends) else [At.of(program, None)]


def below(program: Program, absent: Callable[[At], set[fx.Node]]) -> Iterator[At]:
    """Further places for calls whose tensors are too large where all sizes are: all smaller, or only one of them large.

    Args:
        absent: the calls that no call of the program makes at a place.
    """
    dims = program.signature.dims
    for large in [dims, *([dim] for dim in dims if len(dims) > 1)]:
        smaller = _Smaller(program, large)
        place = smaller.at(smaller.first(lambda place: place is not None))
        if place is not None and large is not dims:
            yield place
        pending = absent(place) if place is not None else set()
        while pending:

            def exists(found: At | None, left: set[fx.Node] = pending) -> bool:
                return found is not None and bool(left - absent(found))

            place = smaller.at(smaller.first(exists))
            if place is None or not exists(place):
                break
            yield place
            pending = pending & absent(place)


class _Smaller:
    """A program with some sizes as large as their ranges and a limit allow, and the others at their lowest.

    The limit is lowered in steps from `LARGEST_SIZE`; after `STEPS`, all sizes are at their lowest.
    """

    def __init__(self, program: Program, large: Sequence[Dim]) -> None:
        self.program = program
        self.highest = {dim.name: LARGEST_SIZE if dim.high is None else dim.high for dim in large}
        self._known: dict[tuple[int, ...], At | None] = {}

    def at(self, step: int) -> At | None:
        """The place after so many steps; None where the program does not run."""
        sizes = self._sizes(step)
        key = tuple(sizes.values())
        if key not in self._known:
            try:
                self._known[key] = At.of(self.program, sizes)
            except Exception:  # an op refuses these sizes
                self._known[key] = None
        return self._known[key]

    def first(self, wanted: Callable[[At | None], bool]) -> int:
        """The fewest steps to a place of some kind; what is so at some sizes is so at smaller ones."""
        if wanted(self.at(0)):
            return 0
        return bisect_left(range(STEPS), True, key=lambda step: wanted(self.at(step)))

    def _sizes(self, step: int) -> dict[str, int]:
        limit = int(LARGEST_SIZE * 2 ** (-step / STEPS_IN_HALF)) if step < STEPS else 0
        return {
            dim.name: max(dim.low, min(self.highest.get(dim.name, 0), limit) // dim.step * dim.step)
            for dim in self.program.signature.dims
        }
