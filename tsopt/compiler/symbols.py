"""torch.export's symbols for sizes as Dims: which axes are one, their ranges, and what it has found beside these."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import fx
from torch.export import Dim as ExportDim
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from tsopt.compiler import ops
from tsopt.compiler.dims import Dynamic, Place
from tsopt.compiler.origin import is_library, short_path
from tsopt.compiler.program import Program
from tsopt.compiler.signature import DERIVED, Axes, Dim
from tsopt.compiler.sizes import retyped, traced_sizes
from tsopt.errors import CaptureError, UsageError

# What torch writes into conditions on sizes, for whole numbers that are not negative.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("FloorDiv", "CleanDiv"), operator.floordiv),
    **dict.fromkeys(("Mod", "PythonMod"), operator.mod),
    "ModularIndexing": lambda base, divisor, modulus: base // divisor % modulus,
    **{"Max": max, "Min": min},
}
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
HORIZON = 4096  # how far conditions are looked at for a size without an end
LONGEST_STEP = 1024  # and how far apart sizes may be, where they have to be multiples
ALWAYS = 2  # torch.export takes sizes of 0 and 1 for another program; whether they are is found out by running it
CHECKS = ("_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size")


def is_of_values(size: object) -> bool:
    """Whether a size or a number is computed from values of tensors."""
    return isinstance(size, SYMBOLIC) and bool(free_unbacked_symbols(size))


def hinted(size: Any) -> int:
    """The size that was traced."""
    return size if isinstance(size, int) else int(size.node.hint)


def is_settled(node: fx.Node) -> bool:
    """Whether a call is a condition on sizes that Dims say, or is there for one."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymBool):
        return not is_of_values(value) and all(is_settled(user) for user in node.users)
    if getattr(node.target, "_opname", "") not in CHECKS:
        return False
    source = node.args[0]
    return not (isinstance(source, fx.Node) and is_of_values(source.meta.get("val")))


def shapes_of(wanted: Dynamic, inputs: Sequence[torch.Tensor]) -> tuple[dict[int, Any], ...]:
    """The `dynamic_shapes` of torch.export for flat inputs."""
    return tuple(
        {axis: _hint(dim, tensor.shape[axis]) for axis, dim in wanted.axes.get(position, {}).items()}
        for position, tensor in enumerate(inputs)
    )


def _hint(dim: Dim | None, traced: int) -> Any:
    if dim is None or dim.high is None:
        return ExportDim.AUTO
    if traced > dim.high:
        raise UsageError(f"the example has {dim.name} = {traced}", why=f"its range is {dim}", fix="a size in the range")
    return ExportDim.AUTO(max=dim.high)


@dataclass(frozen=True, slots=True)
class Symbols:
    """What torch.export has found.

    dims: the sizes that may differ.
    inputs, outputs: the names of their axes, in the order of the exported program: the user's inputs; all outputs.
    """

    dims: tuple[Dim, ...]
    inputs: tuple[Axes, ...]
    outputs: tuple[Axes, ...]


def symbols_of(exported: ExportedProgram, wanted: Dynamic, names: Sequence[str]) -> Symbols:
    """Reads the symbols of an exported program.

    Raises:
        CaptureError: the model has but one size where several are wanted, or decides by a size.
    """
    users = [item.arg.name for item in exported.graph_signature.input_specs if item.kind == InputKind.USER_INPUT]
    values = {node.name: node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder"}
    placed: dict[Any, list[Place]] = {}  # symbol -> where it is a size
    for position, axes in sorted(wanted.axes.items()):
        for axis in sorted(axes):
            size = values[users[position]].shape[axis]
            if isinstance(size, int) or not size.node.expr.is_Symbol:
                raise _fixed(f"axis {axis} of {names[position]}", size)
            placed.setdefault(size.node.expr, []).append((position, axis))
    ties = _Ties(placed, wanted, names)
    found = {symbol: _dim(exported, symbol, places, wanted, names) for symbol, places in placed.items()}
    ranges = {symbol: _Range(dim.low, dim.high) for symbol, dim in found.items()}
    _narrow(exported, ties, ranges, {s: hinted(values[users[p[0][0]]].shape[p[0][1]]) for s, p in placed.items()})
    dims: dict[Any, Dim] = {}
    for group in ties.groups():
        parts = [ranges[symbol] for symbol in group]
        highs = [part.high for part in parts if part.high is not None]
        low, step = max(part.low for part in parts), math.lcm(*(part.step for part in parts))
        dims |= dict.fromkeys(group, Dim(found[group[0]].name, low, min(highs, default=None), step))
    _name_apart(dims)

    def named(value: Any) -> Axes:
        if not isinstance(value, torch.Tensor) or all(isinstance(size, int) for size in value.shape):
            return ()
        return tuple(None if isinstance(size, int) else _name(size, dims) for size in value.shape)

    outputs = [node.meta["val"] for node in exported.graph.output_node().args[0]]
    return Symbols(
        tuple(dict.fromkeys(dims.values())),
        tuple(named(values[name]) for name in users),
        tuple(named(value) for value in outputs),
    )


def _name(size: Any, dims: dict[Any, Dim]) -> str:
    expression = size.node.expr
    return dims[expression].name if expression in dims else DERIVED


def _dim(
    exported: ExportedProgram, symbol: Any, places: Sequence[tuple[int, int]], wanted: Dynamic, names: Sequence[str]
) -> Dim:
    """The Dim of a symbol: by the user's name and range, within what torch.export found."""
    given = [dim for position, axis in places if (dim := wanted.axes[position][axis]) is not None]
    if len({dim.name for dim in given}) > 1:
        raise CaptureError(
            f"{' and '.join(sorted({dim.name for dim in given}))} are the same size in this model",
            why="it computes with tensors that have to fit",
            fix=f"call all of them {given[0].name}",
        )
    (position, axis), constraint = places[0], exported.range_constraints.get(symbol)
    name = given[0].name if given else "batch" if axis == 0 else f"{names[position]}_{axis}".replace(".", "_")
    low, high = (given[0].low, given[0].high) if given else (1, None)
    if constraint is not None:
        least, most = int(constraint.lower), constraint.upper
        low = max(low, least) if least > ALWAYS else low
        if most.is_Integer and int(most) < (math.inf if high is None else high):
            high = int(most)
    return Dim(name, low, high)


def _name_apart(dims: dict[Any, Dim]) -> None:
    """Sizes that nobody has tied get names of their own."""
    taken: dict[str, Dim] = {}
    for symbol, dim in dims.items():
        free, number = dim.name, 1
        while taken.get(free, dim) is not dim:
            number += 1
            free = f"{dim.name}_{number}"
        taken[free] = dim
        dims[symbol] = replace(dim, name=free)


class _Ties:
    """Symbols that are one size: by the user's word, or because the model asks for it and every example has it so."""

    def __init__(self, placed: dict[Any, list[Place]], wanted: Dynamic, names: Sequence[str]) -> None:
        self.placed, self.wanted, self.names = placed, wanted, names
        self.first = {symbol: symbol for symbol in placed}
        by_name: dict[str, Any] = {}
        for symbol, places in placed.items():
            for position, axis in places:
                given = wanted.axes[position][axis]
                if given is not None:
                    self.tie(symbol, by_name.setdefault(given.name, symbol))

    def tie(self, a: Any, b: Any) -> None:
        mine, other = self.first[a], self.first[b]
        self.first = {symbol: other if first == mine else first for symbol, first in self.first.items()}

    def groups(self) -> list[list[Any]]:
        return [[s for s in self.first if self.first[s] == head] for head in dict.fromkeys(self.first.values())]

    def read(self, expression: Any) -> Any:
        """The condition, where those that are one size are one symbol."""
        known = {symbol: first for symbol, first in self.first.items() if symbol != first}
        return expression.xreplace(known) if known else expression

    def settles(self, expression: Any, symbols: Collection[Any]) -> bool:
        """Whether the condition always holds once symbols of the same size in all examples are one."""
        import sympy

        found = [symbol for symbol in symbols if symbol in expression.free_symbols]
        same = len({self.wanted.seen[self.placed[symbol][0]] for symbol in found}) == 1
        if not same or expression.xreplace(dict.fromkeys(found, found[0])) != sympy.true:
            return False
        for symbol in found[1:]:
            self.tie(symbol, found[0])
        return True


@dataclass(frozen=True, slots=True)
class _Range:
    """What a size may be, as far as is known."""

    low: int
    high: int | None
    step: int = 1


def _narrow(exported: ExportedProgram, ties: _Ties, ranges: dict[Any, _Range], traced: dict[Any, int]) -> None:
    """Makes ranges so small that every condition under which the model was traced holds in all of them.

    Raises:
        CaptureError: a range is a single size then: the model decides by it.
    """
    for found, where in _guards(exported):
        expression = ties.read(found)
        free: set[Any] = getattr(expression, "free_symbols", set())
        symbols = [symbol for symbol in ranges if symbol in free]
        if not symbols or free - set(symbols) or (len(symbols) > 1 and ties.settles(expression, ranges)):
            continue
        condition = _as_function(expression, symbols)
        for symbol in symbols:
            others = [_ends(ranges[other], traced[other]) if other != symbol else [] for other in symbols]
            holds = partial(_holds, condition, others, symbols.index(symbol))
            made = _shrunk(ranges[symbol], traced[symbol], holds) or _stepped(ranges[symbol], traced[symbol], holds)
            if made is None:
                raise CaptureError(
                    f"the model decides by a size: {_shown(expression, ties)}",
                    where=where,
                    why="where that does not hold it is another program",
                    fix="leave this size out of dynamic, or write the model without the branch; other sizes are "
                    "captured when they are called",
                )
            ranges[symbol] = made


def _as_function(expression: Any, symbols: Sequence[Any]) -> Callable[..., bool]:
    """The condition as a function of the symbols: sympy is too slow to be asked for thousands of sizes."""
    import sympy

    return cast(Callable[..., bool], sympy.lambdify(list(symbols), expression, modules=[FUNCTIONS, "math"]))


def _holds(condition: Callable[..., bool], others: Sequence[Sequence[int]], place: int, size: int) -> bool:
    """Whether a condition holds for a size, whatever the others are; not one that nobody can work out."""
    choices = itertools.product(*[[size] if i == place else other for i, other in enumerate(others)])
    try:
        return all(condition(*sizes) for sizes in choices)
    except (NameError, TypeError, ArithmeticError):
        return False


def _ends(known: _Range, traced: int) -> list[int]:
    return sorted({max(known.low, ALWAYS), traced, min(known.high or HORIZON, HORIZON)})


def _shrunk(known: _Range, traced: int, holds: Callable[[int], bool]) -> _Range | None:
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
    return _Range(known.low if low - step < least else low, known.high if high + step > most else high, step)


def _stepped(known: _Range, traced: int, holds: Callable[[int], bool]) -> _Range | None:
    """The same with larger steps: a condition on a remainder."""
    for step in range(2 * known.step, min(traced, LONGEST_STEP) + 1, known.step):
        if traced % step == 0:
            made = _shrunk(replace(known, step=step), traced, holds)
            if made is not None:
                return made
    return None


def _shown(expression: Any, ties: _Ties) -> str:
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


def _fixed(what: str, size: Any) -> CaptureError:
    number = isinstance(size, int) or size.node.expr.is_Integer
    how = f"has to be {size}" if number else "follows from another size"
    return CaptureError(
        f"{what} {how} in this model",
        why="the model computes with this size as a number, or joins the tensor with one of that size",
        fix="leave it out of dynamic, or read sizes from the input: x.shape[0] in the place of a number",
    )


def with_dims(program: Program, symbols: Symbols) -> Program:
    """A captured program with what is known about its sizes."""
    signature = program.signature
    axes = iter(symbols.inputs)
    inputs = tuple(item if item.state else replace(item, axes=next(axes)) for item in signature.inputs)
    outputs = tuple(replace(item, axes=found) for item, found in zip(signature.outputs, symbols.outputs, strict=True))
    program.signature = replace(signature, inputs=inputs, outputs=outputs, dims=symbols.dims)
    try:
        return retyped(program, traced_sizes(program.signature))
    except Exception as error:  # whatever an op says: torch.export has made something else of it
        raise CaptureError(
            "what torch.export has found for many sizes does not run at those that it was traced with",
            why=f"{type(error).__name__}: {str(error)[:200]}",
            fix="leave dynamic out: each size is captured when it is called",
        ) from error
