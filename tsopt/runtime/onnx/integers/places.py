"""A program for many sizes where its numbers are largest: at the ends of its ranges, if its tensors exist there."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import fx

from tsopt.compiler.analysis.ranged_call import Values
from tsopt.compiler.analysis.ranges import recorded
from tsopt.compiler.calls.signature import Dim
from tsopt.compiler.graph.program import Program
from tsopt.compiler.sizes.specialize import Sizes, evaluate
from tsopt.runtime.onnx.integers.indices import Use, is_index_only, is_whole, uses_of

LARGEST_SIZE = 1 << 30  # of an axis without an end: a tensor of bytes of this size is larger than any that is tried
HALVINGS = LARGEST_SIZE.bit_length()


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
    """The program as recorded; one for many sizes at the ends of their ranges."""
    dims = program.signature.dims
    if not dims:
        return [At.of(program, None)]
    try:
        # NOTE: sizes that are the same at one end may be told apart at the other.
        return [At.of(program, {dim.name: dim.low for dim in dims}), At.of(program, _halved(dims, dims, 0))]
    except Exception:  # an op refuses an end that nobody has tried
        return [At.of(program, None)]


def below(program: Program, absent: Callable[[At], set[fx.Node]]) -> Iterator[At]:
    """Further places for calls whose tensors are too large where all sizes are: all smaller, or only one of them large.

    Args:
        absent: the calls that no call of the program makes at a place.
    """
    dims = program.signature.dims
    for large in [dims, *([dim] for dim in dims if len(dims) > 1)]:
        yield from _along(program, large, absent)


def _along(program: Program, large: Sequence[Dim], absent: Callable[[At], set[fx.Node]]) -> Iterator[At]:
    dims = program.signature.dims

    @cache
    def at(halvings: int) -> At | None:
        try:
            return At.of(program, _halved(dims, large, halvings))
        except Exception:  # an op refuses these sizes
            return None

    def exists(halvings: int) -> bool:
        place = at(halvings)
        return place is not None and bool(pending - absent(place))

    highest = at(0)
    if highest is None:
        return
    if large is not dims:
        yield highest
    pending = absent(highest)
    while pending:
        place = at(bisect_left(range(HALVINGS), True, key=exists))
        if place is None or not pending - absent(place):
            return
        yield place
        pending &= absent(place)


def _halved(dims: Sequence[Dim], large: Sequence[Dim], halvings: int) -> dict[str, int]:
    """All sizes at their lowest, but the large ones at their highest, halved so many times."""
    highest = {dim.name: LARGEST_SIZE if dim.high is None else dim.high for dim in large}
    return {dim.name: max(dim.low, (highest.get(dim.name, 0) >> halvings) // dim.step * dim.step) for dim in dims}
