"""The conditions on sizes under which a program was traced: evaluated at all sizes of a range, which is cut to fit.

A condition may fail at a single size (`x.shape[1] == 16000`), or at pairs of sizes (`h * w == 1024`), that lie between
ends at which it holds. So every size is looked at; arrays of them are cheap.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import numpy as np

from tsopt.compiler.calls.signature import Dim, Signature, dim_of
from tsopt.errors import CaptureError

MOST = 1 << 24  # combinations of sizes that a condition is looked at for: ranges with more are cut
CHUNK = 1 << 20  # of them at a time
PARTS = 1024  # in which ranges are cut alike
ALWAYS = 2  # torch.export takes sizes of 0 and 1 for another program; whether they are is found out by running it

Place = tuple[int, int]  # a tensor of the call, and an axis
Span = tuple[int, int]  # positions of a first and a last size in a range
Box = dict[str, Span]


def _each(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *values: reduce(function, values)


# What torch and sympy write into conditions on sizes, by the name of its class.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Add": _each(operator.add),
    "Mul": _each(operator.mul),
    "Max": _each(np.maximum),
    "Min": _each(np.minimum),
    **dict.fromkeys(("IntTrueDiv", "FloatTrueDiv"), operator.truediv),
    **dict.fromkeys(("FloorDiv", "CleanDiv"), operator.floordiv),
    **dict.fromkeys(("Mod", "PythonMod"), operator.mod),
    "CeilDiv": lambda a, b: -(-a // b),
    "ModularIndexing": lambda base, divisor, modulus: base // divisor % modulus,
    **dict.fromkeys(("ToFloat", "Identity"), lambda value: value),
    **dict.fromkeys(("floor", "FloorToInt"), np.floor),
    **dict.fromkeys(("ceiling", "CeilToInt"), np.ceil),
    "TruncToInt": np.trunc,
    "OpaqueUnaryFn_sqrt": np.sqrt,
    **{"Equality": operator.eq, "Unequality": operator.ne},
    **{"LessThan": operator.le, "StrictLessThan": operator.lt},
    **{"GreaterThan": operator.ge, "StrictGreaterThan": operator.gt},
    **{"And": _each(np.logical_and), "Or": _each(np.logical_or), "Not": np.logical_not},
}
DIVISORS = {
    **dict.fromkeys(("IntTrueDiv", "FloatTrueDiv", "FloorDiv", "CleanDiv", "CeilDiv", "Mod", "PythonMod"), (1,)),
    "ModularIndexing": (1, 2),
}
POWERS = ("Pow", "PowByNatural", "FloatPow")


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on sizes of a call.

    Attributes:
        expression: of torch.export.
        places: of each symbol in it, where in a call it is a size.
        text: it as PyTorch writes sizes.
        where: `model.py:12` of the line that asks, if known.
    """

    expression: Any
    places: tuple[tuple[Any, Place], ...]
    text: str = ""
    where: str | None = None

    def sizes(self, signature: Signature) -> dict[Any, tuple[str, int]]:
        """By symbol the Dim that it is, and how much larger it is; symbols whose axis is not dynamic are left out."""
        inputs, found = signature.user_inputs, {}
        for symbol, (position, axis) in self.places:
            name = inputs[position].axes[axis] if inputs[position].axes else None
            if name is not None:
                found[symbol] = dim_of(name)
        return found


def holds_at(expression: Any, values: Mapping[Any, Any]) -> Any:
    """Where a condition holds: an array, or one truth for all; nowhere that it would divide by zero.

    Args:
        values: by symbol the sizes, as arrays or numbers that broadcast.

    Raises:
        TypeError: it contains something that is not known here.
    """
    asked = _Asked(values)
    with np.errstate(all="ignore"):
        found = asked.value(expression)
    return np.logical_and(found, np.logical_not(asked.undefined))


@dataclass
class _Asked:
    values: Mapping[Any, Any]
    undefined: Any = field(default=False)

    def value(self, expression: Any) -> Any:
        if expression in self.values:
            return self.values[expression]
        if getattr(expression, "is_Integer", False):
            return int(expression)
        if getattr(expression, "is_Number", False):
            return float(expression)
        name = type(expression).__name__
        if name in ("BooleanTrue", "BooleanFalse"):
            return bool(expression)
        if name not in FUNCTIONS and name not in POWERS:
            raise TypeError(f"{name} in a condition on sizes")
        found = [self.value(part) for part in expression.args]
        if name in POWERS:
            return self._power(*found)
        for position in DIVISORS.get(name, ()):
            zero = np.equal(found[position], 0)
            if np.any(zero):
                self.undefined = np.logical_or(self.undefined, zero)
                found[position] = np.where(zero, 1, found[position])
        return FUNCTIONS[name](*found)

    def _power(self, base: Any, exponent: Any) -> Any:
        if isinstance(exponent, int) and exponent >= 0:
            return base**exponent
        self.undefined = np.logical_or(self.undefined, np.logical_and(np.equal(base, 0), np.less(exponent, 0)))
        return np.power(np.asarray(base, dtype=np.float64), exponent)


def fitted(conditions: Sequence[Condition], signature: Signature, inner: Sequence[Dim]) -> tuple[Dim, ...]:
    """The ranges of a signature, cut around smaller ones until all conditions hold in all of them.

    Args:
        signature: its Dims have upper ends.
        inner: for each Dim the sizes that it must keep.

    Raises:
        CaptureError: a condition fails among these.
    """
    sizes = {dim.name: _sizes(dim) for dim in signature.dims}
    conditions = [found for found in conditions if found.sizes(signature)]
    if not conditions:
        return signature.dims
    box: Box = {name: (0, len(each) - 1) for name, each in sizes.items()}
    least: Box = {}
    for dim in inner:
        kept, known = sizes[dim.name], _sizes(dim)
        least[dim.name] = kept.index(known[0]), kept.index(known[-1])
    grids = {tuple(dict.fromkeys(name for name, _ in found.sizes(signature).values())) for found in conditions}
    box = _largest(lambda box: all(_count(box, names) <= MOST for names in grids), least, box) or least
    sizes = {name: each[box[name][0] : box[name][1] + 1] for name, each in sizes.items()}
    least = {name: (first - box[name][0], last - box[name][0]) for name, (first, last) in least.items()}
    fails = [(found, *_failures(found, signature, sizes)) for found in conditions]

    def holds(box: Box) -> bool:
        return not any(_within(box, names, failing).any() for _, names, failing in fails)

    whole: Box = {name: (0, len(each) - 1) for name, each in sizes.items()}
    found = _largest(holds, least, whole)
    if found is None:
        broken = next(item for item, names, failing in fails if _within(least, names, failing).any())
        raise CaptureError(
            f"the model decides by a size: {broken.text}",
            where=broken.where,
            why="this condition fails at some of the sizes between those of the calls, which need a different program",
            fix="leave dynamic out: each size is captured when it is first called",
        )
    return tuple(_cut(dim, sizes[dim.name], found[dim.name]) for dim in signature.dims)


def _sizes(dim: Dim) -> range:
    assert dim.high is not None
    return range(-(-dim.low // dim.step) * dim.step, dim.high // dim.step * dim.step + 1, dim.step)


def _cut(dim: Dim, sizes: range, kept: Span) -> Dim:
    low, high = sizes[kept[0]], sizes[kept[1]]
    first, last = _sizes(dim)[0], _sizes(dim)[-1]
    return replace(dim, low=dim.low if low == first else low, high=dim.high if high == last else high)


def _count(box: Box, names: Sequence[str]) -> int:
    return math.prod(box[name][1] - box[name][0] + 1 for name in names)


def _within(box: Box, names: Sequence[str], table: Any) -> Any:
    return table[tuple(slice(box[name][0], box[name][1] + 1) for name in names)]


def _failures(condition: Condition, signature: Signature, sizes: Mapping[str, range]) -> tuple[tuple[str, ...], Any]:
    """The Dims of a condition, and at which of all their sizes it fails: an array with an axis for each."""
    symbols = condition.sizes(signature)
    names = tuple(dict.fromkeys(name for name, _ in symbols.values()))
    first, *others = [sizes[name] for name in names]
    failing = np.empty([len(first), *map(len, others)], dtype=bool)
    rows = max(CHUNK // math.prod(failing.shape[1:]), 1)
    for start in range(0, len(first), rows):
        part = slice(start, start + rows)
        mesh = dict(zip(names, np.ix_(*map(_array, (first[part], *others))), strict=True))
        values = {symbol: mesh[name] + more for symbol, (name, more) in symbols.items()}
        failing[part] = np.logical_not(holds_at(condition.expression, values))
    _leave_to_runs(failing, [sum(size < ALWAYS for size in each[:ALWAYS]) for each in (first, *others)])
    return names, failing


def _array(sizes: range) -> Any:
    return np.arange(sizes.start, sizes.stop, sizes.step, dtype=np.int64)


def _leave_to_runs(failing: Any, small: Sequence[int]) -> None:
    """Lets sizes of 0 and 1 pass where the condition is on these as such: the model is run there.

    That is where it fails whatever the other sizes are, or where two of them are so small.

    Args:
        small: how many such sizes each axis begins with.
    """
    usual = [slice(count, None) for count in small]
    for axis, count in enumerate(small):
        for at in range(count):
            here = tuple(at if i == axis else part for i, part in enumerate(usual))
            if failing[here].all():
                failing[here] = False
    for pair in itertools.combinations(range(failing.ndim), 2):
        failing[tuple(slice(count if i in pair else None) for i, count in enumerate(small))] = False


def _largest(fits: Callable[[Box], bool], inner: Box, outer: Box) -> Box | None:
    """A box between two that fits, and fits no longer where any of its ends is moved; None if the inner one does not.

    Args:
        fits: a box within one that fits does so too.
    """
    if fits(outer):
        return outer
    if not fits(inner):
        return None

    def grown(part: int) -> Box:
        """All ends moved alike, so that no range is given up for another."""
        return {
            name: (_moved(first, outer[name][0], part), _moved(last, outer[name][1], part))
            for name, (first, last) in inner.items()
        }

    box = grown(_last(lambda part: fits(grown(part)), PARTS))
    for name, (low, high) in outer.items():
        first, last = box[name]
        box[name] = first - _last(partial(_fits_with, fits, box, name, (-1, 0)), first - low), last
        first, last = box[name]
        box[name] = first, last + _last(partial(_fits_with, fits, box, name, (0, 1)), high - last)
    return box


def _moved(start: int, end: int, part: int) -> int:
    """A position on the way from one to another, by factors: twice a size goes with twice another."""
    if part == PARTS:
        return end
    place = (start + 1) * ((end + 1) / (start + 1)) ** (part / PARTS) - 1
    return min(math.floor(place), end) if end > start else max(math.ceil(place), end)


def _fits_with(fits: Callable[[Box], bool], box: Box, name: str, way: Span, more: int) -> bool:
    """Whether a box fits with an end moved by so much."""
    first, last = box[name]
    return fits({**box, name: (first + way[0] * more, last + way[1] * more)})


def _last(holds: Callable[[int], bool], end: int) -> int:
    """The last number up to an end for which something holds that holds for 0 and, once it fails, for none beyond."""
    low, high = 0, end
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
