"""What a program computes from sizes, at many of them, and how these numbers compare with each other.

Passes compare numbers: a padding with 0, the end of a slice with the size of its axis, one size with another. What they
find at a few sizes holds for all sizes if numbers that differ anywhere differ there, and if those that calls are given
are on each side of others on which they ever are.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import fx

from tsopt.compiler.calls.signature import dim_of
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.program import Program
from tsopt.compiler.sizes.specialize import Sizes, by_size_alone, evaluate

MANY = 512  # choices of sizes at which numbers are computed
SPREAD = 8  # those at which shapes are inferred, with all remainders modulo it
LARGE = 1 << 24  # comparisons
PAIRED = 8  # numbers that are combined with each other
ORDER = (7, 2, 5, 0, 3, 6, 1, 4)  # remainders: those first at which floor, ceil and round differ
# Calls that take the lengths of a result, and compare them only for equality.
LENGTHS = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unflatten.int})
LENGTHS |= {aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format}
LENGTHS |= {aten.expand.default, aten.new_zeros.default, aten.new_ones.default}
LENGTHS |= {aten.new_full.default, aten.new_empty.default}
CLAMPS = frozenset(
    {aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.hardtanh.default, aten.relu6.default}
)
SIX = 6.0  # the bound of relu6, which no argument says
Numbers = list[tuple[float, bool]]  # at a choice of sizes, and whether each is compared with others
Column = tuple[float, ...]  # a number, at several choices of sizes


class Survey:
    """A program at many choices of sizes, each of which is evaluated once."""

    def __init__(self, program: Program) -> None:
        self.program = program
        inputs = [node for node in program.graph.nodes if node.op == "placeholder"]
        self._inputs = dict(zip(inputs, program.signature.inputs, strict=True))
        named = {name for item in program.signature.inputs for name in item.axes if name is not None}
        self._lengths = {name: dim_of(name) for name in sorted(named)}  # of inputs
        self._numbers: list[fx.Node] = []  # those that follow from the sizes of inputs by arithmetic
        for node in program.graph.nodes:
            of_an_input = node.target is ops.SIZE and node.args[0] in self._inputs
            computed = ops.is_number(node) and all(source in self._numbers for source in node.all_input_nodes)
            if of_an_input or computed:
                self._numbers.append(node)
        self._sized = by_size_alone(program)
        self._visible = [(node, self._is_compared(node)) for node in self._numbers if is_visible(node)]
        self._values: dict[tuple[int, ...], dict[fx.Node, Any] | None] = {}

    def values(self, sizes: Sizes) -> dict[fx.Node, Any] | None:
        """Fake values and numbers of all nodes; None where the program fails, or the model would do something else."""
        key = tuple(sizes.values())
        if key not in self._values:
            if self.program.signature.unmet(sizes) is not None:
                self._values[key] = None
                return None
            try:
                self._values[key] = evaluate(self.program, sizes)
            except Exception:  # whatever an op says about sizes that do not fit
                self._values[key] = None
        return self._values[key]

    def numbers(self, sizes: Sizes) -> Numbers | None:
        """The sizes of inputs, and what calls are given that follows from them by arithmetic; None where that fails."""
        found: dict[fx.Node, Any] = {}
        lengths = {name: sizes[dim] + more for name, (dim, more) in self._lengths.items()}
        try:
            for node in self._numbers:
                if node.target is ops.SIZE:
                    source, axis = cast("tuple[fx.Node, int]", node.args)
                    item = self._inputs[source]
                    name = item.axes[axis] if item.axes else None
                    found[node] = item.type.shape[axis] if name is None else lengths[name]
                else:
                    found[node] = node.target(*fx.node.map_arg(node.args, found.__getitem__))  # type: ignore[operator]
            given = [(float(found[node]), compared) for node, compared in self._visible]
        except (ArithmeticError, TypeError, ValueError):  # a division by zero, a root of a negative number
            return None
        return [(length, False) for length in lengths.values()] + given

    def shapes(self, sizes: Sizes) -> Numbers | None:
        """The numbers that calls are given, and the sizes of all axes; None where the program fails."""
        values = self.values(sizes)
        if values is None:
            return None
        found: Numbers = []
        for node, value in values.items():
            if not ops.is_number(node):
                found += [(size, False) for tensor in ops.tensors_of(value) for size in tensor.shape]
            elif is_visible(node):
                found.append((float(value), self._is_compared(node)))
        return found

    def _is_compared(self, number: fx.Node) -> bool:
        """Whether passes use a number for anything besides the length of a result."""
        return any(
            not ops.is_number(user) and user not in self._sized and user.target not in LENGTHS for user in number.users
        )

    def bounds(self) -> list[float]:
        """Numbers that the graph names and passes compare with sizes: ends of slices, paddings, limits of clamps."""
        found = {0.0, *self.limits()}
        for node in self.program.calls():
            if isinstance(node.target, torch._ops.OpOverload) and node.target not in LENGTHS:
                found |= _literals(node, "SymIntType")
        return sorted(found)

    def limits(self) -> set[float]:
        """The limits that clamps name, if that of another one follows from sizes; otherwise none matter."""
        clamps = [node for node in self.program.calls() if node.target in CLAMPS]
        if not any(ops.is_number(source) for node in clamps for source in node.all_input_nodes):
            return set()
        found = {SIX} if any(node.target is aten.relu6.default for node in clamps) else set()
        return found.union(*(_literals(node, "NumberType") for node in clamps))

    def coincidences(self, sizes: Sizes) -> int:
        """How many coincidences passes would see: equal numbers, 0, 1, and powers of two."""
        found = self.numbers(sizes)
        if found is None:
            return MANY
        exact = sum(compared and number > 0 and math.frexp(number)[0] == 0.5 for number, compared in found)
        return len(found) + 2 - len({0.0, 1.0, *(number for number, _ in found)}) + exact

    def is_explained(self, samples: Sequence[Sizes]) -> bool:
        """Whether every size in the program is a multiple of a number that it computes, or of a product of two."""
        shapes = [self.shapes(sizes) for sizes in samples]
        known = [self.numbers(sizes) for sizes in samples]
        if any(found is None for found in (*shapes, *known)):
            return False
        columns = _columns(known)
        products = {tuple(map(math.prod, zip(*pair, strict=True))) for pair in itertools.product(columns, columns)}
        bases = [column for column in (*columns, *products) if all(column)]
        return all(
            len(set(column)) == 1 or any(_is_multiple(column, base) for base in bases) for column in _columns(shapes)
        )


def is_visible(number: fx.Node) -> bool:
    """Whether passes see it: it is given to a call, not only to other arithmetic."""
    return any(not ops.is_number(user) for user in number.users)


def fixed_sizes(program: Program) -> Iterator[int]:
    """Sizes that do not belong to a Dim."""
    for item in program.signature.inputs:
        yield from (
            size for size, name in zip(item.type.shape, item.axes or (None,) * 64, strict=False) if name is None
        )
    for weight in program.weights.values():
        yield from weight.shape


def choices(ranges: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    """All combinations of sizes, or a large sample of them."""
    if math.prod(map(len, ranges.values())) <= MANY:
        return [dict(zip(ranges, sizes, strict=True)) for sizes in itertools.product(*ranges.values())]
    chance = random.Random(0)
    return [{name: chance.choice(sizes) for name, sizes in ranges.items()} for _ in range(MANY)]


def spread(ranges: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    """A few combinations spread over the ranges: each size takes every remainder, and no two grow together."""
    found = []
    for i in ORDER:
        picked = {}
        for j, (name, sizes) in enumerate(ranges.items()):
            place = (i * (2 * j + 1) + 3 * j) % SPREAD  # odd factors permute the remainders
            near = sizes[len(sizes) * ((5 * place + 2) % SPREAD) // SPREAD :]  # far apart: low, high, between
            picked[name] = next((size for size in near if size % SPREAD == place), near[0])
        if picked not in found:
            found.append(picked)
    return found


def unseen(
    numbers: Callable[[Sizes], Numbers | None],
    samples: Sequence[Sizes],
    rows: Sequence[Sizes],
    bounds: Sequence[float],
    *,
    runs: Callable[[Sizes], bool],
) -> list[dict[str, int]]:
    """Further samples, so that every relation between two numbers that occurs in a row also occurs in a sample.

    Args:
        numbers: those at a choice of sizes.
        rows: choices of sizes; of those that show the same, the first is taken.
        bounds: constants that the numbers are compared with.
        runs: whether a choice can be a sample.
    """
    first = [numbers(sizes) for sizes in samples]
    table = [(sizes, found) for sizes in rows if (found := numbers(sizes)) is not None]
    if any(found is None for found in first) or not table:
        return []
    columns = _columns([*first, *(found for _, found in table)])
    everything = np.array(sorted(columns), dtype=np.float64)
    compared = np.array([columns[column] for column in sorted(columns)])
    fixed = (everything == everything[:, :1]).all(axis=1)
    everything, compared = everything[~fixed], compared[~fixed]
    kept = len(samples) + max(LARGE // max(len(everything) * (len(everything) + len(bounds)), 1), SPREAD)
    everything = everything[:, :kept]
    everything = np.concatenate([everything, _combined(everything[compared])])
    compared = np.concatenate([compared, np.zeros(len(everything) - len(compared), dtype=bool)])
    constant = np.repeat(np.array(bounds)[:, None], everything.shape[1], axis=1)
    of_calls, others = everything[compared][:, None], np.concatenate([everything, constant])
    shown = [
        everything[:, None] != everything,  # two differ
        (everything != everything[:, :1])[:, None],  # one varies
        of_calls < others,
        of_calls > others,
        everything[:, None] > constant,  # the end of a slice is in the middle of some
        everything[:, None] < constant,  # and beyond others
    ]
    missing = np.concatenate([each.reshape(-1, everything.shape[1]) for each in shown])
    missing = missing[~missing[:, : len(samples)].any(axis=1)][:, len(samples) :]
    chosen: list[dict[str, int]] = []
    while missing.any():
        best = int(missing.sum(axis=0).argmax())
        if runs(table[best][0]):
            chosen.append(dict(table[best][0]))
            missing = missing[~missing[:, best]]
        else:
            missing[:, best] = False
    return chosen


def _columns(found: Sequence[Numbers | None]) -> dict[Column, bool]:
    """The distinct numbers, each at several combinations of sizes, and whether any use of it is a comparison."""
    columns: dict[Column, bool] = {}
    for same in zip(*(numbers or () for numbers in found), strict=True):
        column = tuple(number for number, _ in same)
        columns[column] = columns.get(column, False) or same[0][1]
    return columns


def _combined(numbers: np.ndarray) -> np.ndarray:
    """What passes may combine two numbers into: the tighter bound, one padding, factor or slice instead of two."""
    pairs = list(itertools.combinations(numbers[:PAIRED], 2))
    made = [way(*pair) for pair in pairs for way in (np.minimum, np.maximum, np.add, np.multiply)]
    made = [each for each in made if (each != each[0]).any()]
    return np.array(made).reshape(-1, numbers.shape[1])


def _literals(call: fx.Node, kind: str) -> set[float]:
    """The modest numbers that a call is given where its schema takes numbers of a kind."""
    taking = _taking(call.target, kind)
    given: list[Any] = [call.args[place] for place, _ in taking if place < len(call.args)]
    given += [call.kwargs.get(name) for _, name in taking]
    return {float(item) for item in _flat(given) if type(item) in (int, float) and abs(item) < LARGE}


@functools.cache
def _taking(target: Any, kind: str) -> tuple[tuple[int, str], ...]:
    """The arguments that are numbers of a kind, or lists of them."""
    found = []  # NOTE: by the kind, for as text `SymInt` is `int`, and so is an axis
    for position, argument in enumerate(target._schema.arguments):
        item = argument.real_type
        while item.kind() in ("OptionalType", "ListType"):
            item = item.getElementType()
        if item.kind() == kind:
            found.append((position, argument.name))
    return tuple(found)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _is_multiple(column: Column, base: Column) -> bool:
    factor = column[0] / base[0]
    return all(size == factor * other for size, other in zip(column, base, strict=True))
