"""torch.export's guards on sizes: which sizes they make equal, the ranges they leave, what calls are checked for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, cast

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

from tsopt.compiler.calls.conditions import ALWAYS, MANY, Condition, function_of, plain
from tsopt.compiler.calls.signature import ENDLESS, Dim
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.origin import is_library, short_path
from tsopt.compiler.sizes.dims import Dynamic, Place
from tsopt.errors import CaptureError

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
MOST_CHOICES = 81  # of the other sizes, beside which a size is looked at
HORIZON = 4096  # how far conditions are looked at for a size without an end
LONGEST_STEP = 1024  # and how far apart sizes may be, where they have to be multiples
CHECKS = ("_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size")


def is_of_values(size: object) -> bool:
    """Whether a size or a number is computed from values of tensors."""
    return isinstance(size, SYMBOLIC) and bool(free_unbacked_symbols(size))


def is_settled(node: fx.Node) -> bool:
    """Whether a call is a condition on sizes, which the signature checks, or is there for one."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymBool):
        return not is_of_values(value) and all(is_settled(user) for user in node.users)
    if getattr(node.target, "_opname", "") not in CHECKS:
        return False
    source = node.args[0]
    return not (isinstance(source, fx.Node) and is_of_values(source.meta.get("val")))


class Ties:
    """Symbols that are one size: by the user's word, or because the model asks for it and every example has it so.

    Or that are always the same amount apart: a mask is one longer than the cache.
    """

    def __init__(self, placed: dict[Any, list[Place]], wanted: Dynamic, names: Sequence[str]) -> None:
        self.placed, self.wanted, self.names = placed, wanted, names
        self.first = {symbol: symbol for symbol in placed}
        self.more = dict.fromkeys(placed, 0)  # than the first of its group
        by_name: dict[str, Any] = {}
        for symbol, places in placed.items():
            for position, axis in places:
                given = wanted.axes[position][axis]
                if given is not None:
                    self.tie(symbol, by_name.setdefault(given.name, symbol))

    def tie(self, a: Any, b: Any, more: int = 0) -> None:
        """From now on `a` is `b + more`."""
        mine, other = self.first[a], self.first[b]
        shift = self.more[b] + more - self.more[a]
        for symbol in [symbol for symbol, first in self.first.items() if first == mine and mine != other]:
            self.first[symbol], self.more[symbol] = other, self.more[symbol] + shift

    def groups(self) -> list[list[Any]]:
        return [[s for s in self.first if self.first[s] == head] for head in dict.fromkeys(self.first.values())]

    def read(self, expression: Any) -> Any:
        """The condition, where those that are one size are one symbol."""
        known = {symbol: first + self.more[symbol] for symbol, first in self.first.items() if symbol != first}
        return expression.xreplace(known) if known else expression

    def settles(self, expression: Any, symbols: Collection[Any]) -> bool:
        """Whether the condition always holds once symbols of the same size in all examples are one."""
        import sympy

        found = [symbol for symbol in symbols if symbol in expression.free_symbols]
        apart = [self._apart(symbol, found[0]) for symbol in found]
        if None in apart:
            return False
        as_first = {symbol: found[0] + more for symbol, more in zip(found, apart, strict=True)}
        if sympy.simplify(expression.xreplace(as_first)) != sympy.true:
            return False
        for symbol, more in zip(found[1:], apart[1:], strict=True):
            self.tie(symbol, found[0], cast(int, more))
        return True

    def seen(self, symbol: Any) -> tuple[int, ...]:
        """Its size in each example."""
        return self.wanted.seen[self.placed[symbol][0]]

    def _apart(self, symbol: Any, other: Any) -> int | None:
        """How much larger one size is than another, if the same in every example; one example shows only equality."""
        mine, theirs = self.seen(symbol), self.seen(other)
        differences = {a - b for a, b in zip(mine, theirs, strict=True)}
        return differences.pop() if len(differences) == 1 and (len(mine) > 1 or differences == {0}) else None


@dataclass(frozen=True, slots=True)
class Range:
    """What a size may be, as far as is known."""

    low: int
    high: int | None
    step: int = 1


@dataclass(frozen=True, slots=True)
class Guard:
    """A condition of the trace: an expression of sympy over symbols, and the line of the user's that branches on it."""

    expression: Any
    where: str


def narrow(exported: ExportedProgram, ties: Ties, ranges: dict[Any, Range], traced: dict[Any, int]) -> list[Guard]:
    """Narrows the ranges until the guards of the trace hold in them, as far as that is looked at.

    Returns:
        The guards, which each call is checked for as well.

    Raises:
        CaptureError: a range would shrink to one size: the model specializes on it. Or a guard cannot be evaluated.
    """
    kept = []
    for guard in _guards(exported):
        expression = ties.read(guard.expression)
        free: set[Any] = getattr(expression, "free_symbols", set())
        symbols = [symbol for symbol in ranges if symbol in free]
        if not symbols or free - set(symbols) or (len(symbols) > 1 and ties.settles(expression, ranges)):
            continue
        condition = _condition(expression, symbols, [_shown(symbol, ties) for symbol in symbols], guard.where)
        kept.append(guard)
        for symbol in symbols:
            others = [_ends(ranges[other], traced[other]) if other != symbol else [] for other in symbols]
            holds = partial(_holds, condition, others, symbols.index(symbol))
            seen = ties.seen(symbol) if len(symbols) == 1 else ()
            made = _remaining(expression, ranges[symbol], traced[symbol], holds, seen)
            if made is None:
                raise CaptureError(
                    f"the model specializes on a size: {_shown(expression, ties)}",
                    where=guard.where or None,
                    why="sizes that fail this guard need a different program",
                    fix="leave this size out of dynamic, or remove the branch from the model; without dynamic, each "
                    "size is captured when it is first called",
                )
            ranges[symbol] = made
    return kept


def conditions_of(guards: Sequence[Guard], dims: Mapping[Any, Dim], as_first: Mapping[Any, Any]) -> list[Condition]:
    """What each call is checked for, besides the ranges of the Dims.

    Args:
        dims: by symbol.
        as_first: symbols as expressions of the one that is the size of their Dim.
    """
    import sympy

    found: dict[str, Condition] = {}
    for guard in guards:
        expression = guard.expression.xreplace(as_first)
        symbols = sorted(getattr(expression, "free_symbols", ()), key=str)
        if expression == sympy.true or (len(symbols) == 1 and _is_certain(expression, symbols[0], dims[symbols[0]])):
            continue
        made = _condition(expression, symbols, [dims[symbol].name for symbol in symbols], guard.where)
        found.setdefault(str(made), made)
    return list(found.values())


def _condition(expression: Any, symbols: Sequence[Any], names: Sequence[str], where: str = "") -> Condition:
    """Translates a guard to Python.

    Raises:
        CaptureError: it cannot be translated.
    """
    import sympy

    try:
        text = in_python(expression, symbols)
    except ValueError as error:
        shown = str(expression.xreplace({s: sympy.Symbol(f"s{i}") for i, s in enumerate(symbols)}))
        raise CaptureError(
            f"the model depends on sizes in a way that cannot be checked for each call: "
            f"{Condition(shown, tuple(names))}",
            where=where or None,
            why=str(error),
            fix="leave dynamic out: each size is captured when it is first called",
        ) from error
    return Condition(text, tuple(names), where)


def in_python(expression: Any, symbols: Sequence[Any]) -> str:
    """Translates an expression over symbols to Python over `s0`, `s1`, ...

    Raises:
        ValueError: it cannot be translated.
    """
    import sympy

    as_python = {symbol: sympy.Symbol(f"s{i}", integer=True, positive=True) for i, symbol in enumerate(symbols)}
    try:
        text = plain(_printer().doprint(sympy.sympify(expression).xreplace(as_python)))
    except (AssertionError, NotImplementedError, TypeError) as error:  # by torch's printer
        raise ValueError(str(error) or type(error).__name__) from error
    function_of(text, len(symbols))
    return text


@cache
def _printer() -> Any:
    from torch.utils._sympy.printers import PythonPrinter

    class Plain(PythonPrinter):
        """Prints calls of Python's own functions instead of torch's."""

        def _print_ToFloat(self, expr: Any) -> str:
            return f"float({self._print(expr.args[0])})"

        def _helper_sqrt(self, expr: Any) -> str:
            return f"math.sqrt({self._print(expr)})"

        def _print_FloatPow(self, expr: Any) -> str:
            return f"math.pow({', '.join(map(self._print, expr.args))})"

    return Plain()


def _is_certain(expression: Any, symbol: Any, dim: Dim) -> bool:
    """Whether a comparison is known to hold for the whole range of its only size."""
    import sympy

    condition = _condition(expression, [symbol], [dim.name])
    if not isinstance(expression, sympy.core.relational.Relational):
        return False
    low, high = max(dim.low, ALWAYS), ENDLESS if dim.high is None else dim.high
    equation = isinstance(expression, sympy.Eq | sympy.Ne)
    if equation and isinstance(expression.lhs, Mod | PythonMod) and expression.rhs.is_Integer:
        base, period = expression.lhs.args
        if period.is_Integer and _is_linear(base, symbol) and period <= MANY:
            sizes = (size for size in dim.sizes if size >= ALWAYS)
            return all(map(condition.holds, itertools.islice(sizes, int(period))))
    difference = expression.lhs - expression.rhs
    if not _is_linear(difference, symbol):
        return False
    if isinstance(expression, sympy.Ne):
        return not low <= -difference.coeff(symbol, 0) / difference.coeff(symbol, 1) <= high
    return not equation and condition.holds(low) and condition.holds(high)


def _is_linear(expression: Any, symbol: Any) -> bool:
    import sympy

    return bool(expression.is_polynomial(symbol)) and sympy.degree(expression, symbol) == 1


def _holds(condition: Condition, others: Sequence[Sequence[int]], place: int, size: int) -> bool:
    """Whether a condition holds for a size, beside the ends of the ranges of the others."""
    choices = itertools.product(*[[size] if i == place else other for i, other in enumerate(others)])
    return all(condition.holds(*sizes) for sizes in itertools.islice(choices, MOST_CHOICES))


def _ends(known: Range, traced: int) -> list[int]:
    return sorted({max(known.low, ALWAYS), traced, min(known.high or HORIZON, HORIZON)})


def _remaining(
    expression: Any, known: Range, traced: int, holds: Callable[[int], bool], seen: Sequence[int]
) -> Range | None:
    """What a condition leaves of a range; None for a single size.

    A condition on a remainder (`if length % 8: pad`) leaves all of it, unless steps say the same: each call is checked
    for the condition itself.

    Args:
        seen: this size in each example; empty for a condition on several sizes.
    """
    made = _shrunk(known, traced, holds) or _stepped(known, traced, holds)
    period = _period(expression)
    if not seen or not _recurs(period, known, made, traced, holds):
        return made

    def is_met(size: int) -> bool:
        return holds(size if size >= ALWAYS else size + period)  # which says nothing of 0 and 1 themselves

    met = all(map(is_met, seen))
    if made is None and (not met or len(seen) == 1):
        return None
    if made is not None and made.step > known.step and (not met or all(size % made.step == 0 for size in seen)):
        return made
    low = max(known.low, ALWAYS)
    while low > known.low and is_met(low - 1):
        low -= 1
    return replace(known, low=low)


def _recurs(period: int, known: Range, made: Range | None, traced: int, holds: Callable[[int], bool]) -> bool:
    """Whether a condition on remainders has left less of a range than one period, and recurs beyond it."""
    if not 1 < period <= LONGEST_STEP:
        return False
    if made is not None and made.step == known.step and (made.high is None or made.high - made.low >= period):
        return False
    return all(holds(size) == holds(size + period) for size in range(max(traced - period, ALWAYS), traced + period))


def _period(expression: Any) -> int:
    """After how many sizes the remainders in a condition come again; 0 where there are none."""
    remainders, quotients = expression.atoms(Mod, PythonMod), expression.atoms(FloorDiv)
    by = [[item.args[1] for item in items] for items in (remainders, quotients)]
    if not remainders or not all(number.is_Integer and number > 0 for number in (*by[0], *by[1])):
        return 0
    return math.lcm(*map(int, by[0])) * math.prod(map(int, by[1]))


def _shrunk(known: Range, traced: int, holds: Callable[[int], bool]) -> Range | None:
    """The sizes around the traced one for which a condition holds; those below 2 are for who runs them."""
    step, least = known.step, max(known.low, ALWAYS)
    most = traced + HORIZON * step
    most = most if known.high is None else min(known.high, most)
    low = high = traced
    while low - step >= least and holds(low - step):
        low -= step
    while high + step <= most and holds(high + step):
        high += step
    if low == high:
        return None
    return Range(known.low if low - step < least else low, known.high if high + step > most else high, step)


def _stepped(known: Range, traced: int, holds: Callable[[int], bool]) -> Range | None:
    """The same with larger steps: a condition on a remainder."""
    for step in range(2 * known.step, min(traced, LONGEST_STEP) + 1, known.step):
        if traced % step == 0:
            made = _shrunk(replace(known, step=step), traced, holds)
            if made is not None:
                return made
    return None


def _shown(expression: Any, ties: Ties) -> str:
    """A condition with sizes as PyTorch writes them."""
    text = str(expression)
    for symbol, places in ties.placed.items():
        text = text.replace(str(symbol), f"{ties.names[places[0][0]]}.shape[{places[0][1]}]")
    return text


def _guards(exported: ExportedProgram) -> Iterator[Guard]:
    """Every condition on sizes under which torch.export has traced, with the place in the model."""
    environments = {}
    for node in exported.graph.nodes:
        for tensor in ops.tensors_of(node.meta.get("val")):
            environment = getattr(tensor.fake_mode, "shape_env", None)
            if environment is not None:
                environments[id(environment)] = environment
    for environment in environments.values():
        for guard in environment.guards:
            yield Guard(environment.replace(guard.expr), _place(guard))
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymBool) and not is_of_values(value):
            yield Guard(value.node.expr, "")


def _place(guard: Any) -> str:
    """`model.py:12` of the line that branches; empty for torch's own."""
    frame: Any = getattr(getattr(guard, "sloc", None), "framework_loc", None)
    if frame is None or is_library(frame.filename):
        return ""
    return f"{short_path(frame.filename)}:{frame.lineno}"
