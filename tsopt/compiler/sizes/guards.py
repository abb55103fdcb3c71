"""torch.export's guards on sizes: which sizes they make equal, and the ranges they leave."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import fx
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.origin import is_library, short_path
from tsopt.compiler.sizes.conditions import ALWAYS, Condition, holds_at
from tsopt.compiler.sizes.dims import Dynamic, Place
from tsopt.errors import CaptureError

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
HORIZON = 1 << 16  # how far conditions are looked at for a size without an end
FARTHEST = 1 << 22  # and for one with an end: it gets a nearer one
FIRST_BLOCK = 1 << 10  # sizes that are looked at together; then twice as many each time
USUAL = 4096  # a size without an end, while others are looked at
LONGEST_STEP = 1024  # how far apart sizes may be, where they have to be multiples
CHECKS = ("_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size")


def is_of_values(size: object) -> bool:
    """Whether a size or a number is computed from values of tensors."""
    return isinstance(size, SYMBOLIC) and bool(free_unbacked_symbols(size))


def is_settled(node: fx.Node) -> bool:
    """Whether a call is a condition on sizes that Dims say, or is there for one."""
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

    def _apart(self, symbol: Any, other: Any) -> int | None:
        """How much larger one size is than another, if the same in every example; one example shows only equality."""
        mine, theirs = (self.wanted.seen[self.placed[s][0]] for s in (symbol, other))
        differences = {a - b for a, b in zip(mine, theirs, strict=True)}
        return differences.pop() if len(differences) == 1 and (len(mine) > 1 or differences == {0}) else None


@dataclass(frozen=True, slots=True)
class Range:
    """What a size may be, as far as is known."""

    low: int
    high: int | None
    step: int = 1


def narrow(
    exported: ExportedProgram, ties: Ties, ranges: dict[Any, Range], traced: dict[Any, int]
) -> tuple[Condition, ...]:
    """Narrows the ranges until the guards of the trace hold in each of them, and returns the guards.

    Those on several sizes are looked at for the usual sizes of the others: what is promised in the end is checked then.

    Raises:
        CaptureError: a range would shrink to one size: the model specializes on it.
    """
    conditions: dict[Any, Condition] = {}
    for found, where in _guards(exported):
        expression = ties.read(found)
        free: set[Any] = getattr(expression, "free_symbols", set())
        symbols = [symbol for symbol in ranges if symbol in free]
        if not symbols or free - set(symbols) or (len(symbols) > 1 and ties.settles(expression, ranges)):
            continue
        if expression in conditions:
            continue
        places = tuple((symbol, ties.placed[symbol][0]) for symbol in symbols)
        made = conditions[expression] = Condition(expression, places, _shown(expression, ties), where)
        for symbol in symbols:
            others = {other: _ends(ranges[other], traced[other]) for other in symbols if other != symbol}
            ranges[symbol] = _narrowed(made, symbol, ranges[symbol], traced[symbol], others)
    return tuple(conditions.values())


def _narrowed(
    condition: Condition, symbol: Any, known: Range, traced: int, others: Mapping[Any, Sequence[int]]
) -> Range:
    holds = partial(_holds, condition.expression, symbol, others)
    made = _shrunk(known, traced, holds) or _stepped(known, traced, holds)
    if made is None:
        raise CaptureError(
            f"the model specializes on a size: {condition.text}",
            where=condition.where,
            why="sizes that fail this guard need a different program",
            fix="leave this size out of dynamic, or remove the branch from the model; without dynamic, each "
            "size is captured when it is first called",
        )
    return made


def _holds(expression: Any, symbol: Any, others: Mapping[Any, Sequence[int]], sizes: Any) -> Any:
    """For each size whether a condition holds, whatever the others are; False if it cannot be evaluated."""
    found = np.ones(len(sizes), dtype=bool)
    try:
        for chosen in itertools.product(*others.values()):
            found &= holds_at(expression, {symbol: sizes, **dict(zip(others, chosen, strict=True))})
    except TypeError:
        return np.zeros(len(sizes), dtype=bool)
    return found


def _ends(known: Range, traced: int) -> list[int]:
    return sorted({max(known.low, ALWAYS), traced, min(known.high or USUAL, USUAL)})


def _shrunk(known: Range, traced: int, holds: Callable[[Any], Any]) -> Range | None:
    """The sizes around the traced one for which a condition holds; those below 2 are for who runs them."""
    step, least = known.step, max(known.low, ALWAYS)
    farthest = traced + FARTHEST * step
    high = None if known.high is None else min(known.high, farthest)
    low, all_below = _reach(traced, -step, (traced - least) // step, holds)
    top, all_above = _reach(traced, step, HORIZON if high is None else (high - traced) // step, holds)
    if low == top:
        return None
    return Range(known.low if all_below else low, high if all_above else top, step)


def _reach(start: int, step: int, count: int, holds: Callable[[Any], Any]) -> tuple[int, bool]:
    """The last of so many sizes up to which a condition holds, and whether it holds for them all."""
    done, block = 0, FIRST_BLOCK
    while done < count:
        now = min(block, count - done)
        found = holds(start + step * np.arange(done + 1, done + now + 1, dtype=np.int64))
        if not found.all():
            return start + step * (done + int(found.argmin())), False
        done, block = done + now, 2 * block
    return start + step * max(count, 0), True


def _stepped(known: Range, traced: int, holds: Callable[[Any], Any]) -> Range | None:
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


def _guards(exported: ExportedProgram) -> Iterator[tuple[Any, str | None]]:
    """Every condition on sizes under which torch.export has traced, with where the model asks."""
    environments = {}
    for node in exported.graph.nodes:
        for tensor in ops.tensors_of(node.meta.get("val")):
            environment = getattr(tensor.fake_mode, "shape_env", None)
            if environment is not None:
                environments[id(environment)] = environment
    for environment in environments.values():
        for guard in environment.guards:
            yield environment.simplify(environment.replace(guard.expr)), _place(guard)
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymBool) and not is_of_values(value):
            yield value.node.expr, None


def _place(guard: Any) -> str | None:
    """`model.py:12` of the line that asks."""
    frame: Any = getattr(getattr(guard, "sloc", None), "framework_loc", None)
    if frame is None or is_library(frame.filename):
        return None
    return f"{short_path(frame.filename)}:{frame.lineno}"
