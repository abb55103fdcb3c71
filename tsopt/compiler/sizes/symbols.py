"""Turns torch.export's size symbols into Dims: which axes have the same size, and their ranges."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch.export import Dim as ExportDim
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from tsopt.compiler.calls.conditions import ALWAYS, Condition, Places
from tsopt.compiler.calls.counters import axes_of, replaced
from tsopt.compiler.calls.signature import DERIVED, Axes, Dim, dim_of, misfit
from tsopt.compiler.calls.structure import Structure
from tsopt.compiler.graph.program import Program
from tsopt.compiler.sizes.dims import Dynamic, Place
from tsopt.compiler.sizes.guards import Range, Ties, conditions_of, in_python, narrow
from tsopt.compiler.sizes.specialize import retyped, traced_sizes
from tsopt.errors import CaptureError

PLACES = "places"  # of the output node's meta: `Symbols.places`


def hinted(size: Any) -> int:
    """The size that was traced."""
    return size if isinstance(size, int) else int(size.node.hint)


def shapes_of(wanted: Dynamic, inputs: Sequence[torch.Tensor]) -> tuple[dict[int, Any], ...]:
    """The `dynamic_shapes` of torch.export for flat inputs."""
    return tuple(
        {axis: _hint(dim) for axis, dim in wanted.axes.get(position, {}).items()} for position in range(len(inputs))
    )


def _hint(dim: Dim | None) -> Any:
    return ExportDim.AUTO if dim is None or dim.high is None else ExportDim.AUTO(max=dim.high)


@dataclass(frozen=True, slots=True)
class Symbols:
    """What torch.export has found.

    dims: the sizes that may differ.
    inputs, outputs: the names of their axes, in the order of the exported program: the user's inputs; all outputs.
    conditions: on the sizes, besides the ranges.
    places: where the outputs lie in their memory; None where that is not known for all sizes.
    """

    dims: tuple[Dim, ...]
    inputs: tuple[Axes, ...]
    outputs: tuple[Axes, ...]
    conditions: tuple[Condition, ...]
    places: tuple[Places | None, ...]

    def misfit(self, sizes: Mapping[Place, int]) -> tuple[str, str] | None:
        """Why what was traced is not for a call of these sizes, and the line that decides so; None where it is."""
        found: dict[str, set[int]] = {dim.name: set() for dim in self.dims}
        for (position, axis), size in sizes.items():
            axes = self.inputs[position] if position < len(self.inputs) else ()
            name = axes[axis] if axis < len(axes) else None
            if name is not None:
                dim, more = dim_of(name)
                found[dim].add(size - more)
        reason = misfit(self.dims, found)
        if reason:
            return reason, ""
        alone = {name: next(iter(each)) for name, each in found.items() if each}
        known = (item for item in self.conditions if alone.keys() >= set(item.dims))
        failed = next((item for item in known if not item.holds_at(alone)), None)
        return None if failed is None else (f"{failed} does not hold", failed.where)


def symbols_of(exported: ExportedProgram, wanted: Dynamic, names: Sequence[str]) -> Symbols:
    """Reads the symbols of an exported program.

    Raises:
        CaptureError: the model has but one size where several are wanted, or decides by a size, so that what was traced
            is not for all of the examples.
    """
    import sympy

    users = [item.arg.name for item in exported.graph_signature.input_specs if item.kind == InputKind.USER_INPUT]
    values = {node.name: node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder"}
    placed: dict[Any, list[Place]] = {}  # symbol -> where it is a size
    derived: dict[Any, Any] = {}  # `s + 1`, a size of the call as well -> a symbol in its place
    for position, axes in sorted(wanted.axes.items()):
        for axis in sorted(axes):
            size = values[users[position]].shape[axis]
            if isinstance(size, int) or not (size.node.expr.is_Symbol or _is_apart(size.node.expr)):
                raise _fixed(f"axis {axis} of {names[position]}", size)
            symbol = size.node.expr
            if not symbol.is_Symbol:
                symbol = derived.setdefault(symbol, sympy.Dummy(str(symbol), integer=True, positive=True))
            placed.setdefault(symbol, []).append((position, axis))
    ties = Ties(placed, wanted, names)
    for expression, symbol in derived.items():
        (base,) = expression.free_symbols
        if base not in placed:
            position, axis = placed[symbol][0]
            raise _fixed(f"axis {axis} of {names[position]}", values[users[position]].shape[axis])
        ties.tie(symbol, base, int(expression - base))
    found = {symbol: _dim(exported, symbol, places, wanted, names) for symbol, places in placed.items()}
    ranges = {symbol: Range(dim.low, dim.high) for symbol, dim in found.items()}
    traced = {s: hinted(values[users[p[0][0]]].shape[p[0][1]]) for s, p in placed.items()}
    guards = narrow(exported, ties, ranges, traced)
    dims: dict[Any, Dim] = {}
    more: dict[Any, int] = {}
    as_first: dict[Any, Any] = {}
    for group in ties.groups():
        least = min(group, key=ties.more.__getitem__)
        more |= {symbol: ties.more[symbol] - ties.more[least] for symbol in group}
        as_first |= {symbol: least + more[symbol] for symbol in group if symbol != least}
        parts = [_shifted(ranges[symbol], more[symbol]) for symbol in group]
        highs = [part.high for part in parts if part.high is not None]
        low, step = max(part.low for part in parts), math.lcm(*(part.step for part in parts))
        dims |= dict.fromkeys(group, Dim(found[least].name, low, min(highs, default=None), step))
    _name_apart(dims)

    def named(value: Any) -> Axes:
        if not isinstance(value, torch.Tensor) or all(isinstance(size, int) for size in value.shape):
            return ()
        return tuple(
            None if isinstance(size, int) else _name(derived.get(size.node.expr, size.node.expr), dims, more)
            for size in value.shape
        )

    outputs = [node.meta["val"] for node in exported.graph.output_node().args[0]]
    made = Symbols(
        tuple(dict.fromkeys(dims.values())),
        tuple(named(values[name]) for name in users),
        tuple(named(value) for value in outputs),
        tuple(conditions_of(guards, dims, as_first)),
        tuple(_places(value, dims, as_first) for value in outputs),
    )
    _check_examples(made, wanted)
    return made


def _check_examples(symbols: Symbols, wanted: Dynamic) -> None:
    """Only one of the examples was traced, with larger sizes in place of 0 and 1: what was found must be for all."""
    for number, sizes in enumerate(wanted.calls):
        found = symbols.misfit(sizes)
        if found is None:
            continue
        reason, where = found
        if number == wanted.largest:
            shown: dict[str, tuple[int, int]] = {}
            for (position, axis), size in sizes.items():
                name, more = dim_of(symbols.inputs[position][axis] or "")
                if wanted.traced[position, axis] != size:
                    shown[name] = (size - more, wanted.traced[position, axis] - more)
            mine, theirs = (" and ".join(f"{name} = {pair[i]}" for name, pair in shown.items()) for i in range(2))
            raise CaptureError(
                "the model depends on a size that is too small in the example to be traced",
                where=where or None,
                why=f"the example has {mine}, and was traced with {theirs}, for which the model does something else",
                fix="pass an example with a larger size, or leave this size out of dynamic: each size is captured when "
                "it is first called",
            )
        error = CaptureError(
            "the model depends on a size that differs between the examples",
            where=where or None,
            why=f"the largest example was traced; in another one {reason}",
            fix="leave this size out of dynamic: each size is captured when it is first called; or pass examples "
            "for which the model does the same",
        )
        error.admits = partial(_admits, symbols)
        raise error


def _admits(symbols: Symbols, sizes: Mapping[Place, int]) -> bool:
    return symbols.misfit(sizes) is None


def _places(value: Any, dims: dict[Any, Dim], as_first: dict[Any, Any]) -> Places | None:
    """Where an output lies in its memory, by the strides and the offset that torch.export has found."""
    import sympy

    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    found = (n if isinstance(n, int) else n.node.expr for n in (*value.stride(), value.storage_offset()))
    numbers = [sympy.sympify(number).xreplace(as_first) for number in found]
    symbols = sorted(set().union(*(number.free_symbols for number in numbers)), key=str)
    if not all(symbol in dims for symbol in symbols):
        return None
    try:
        *stride, offset = (in_python(number, symbols) for number in numbers)
    except ValueError:  # then results are copies
        return None
    return Places(tuple(stride), offset, tuple(dims[symbol].name for symbol in symbols))


def with_sizes(found: Structure, outer: Structure, leaves: Sequence[torch.Tensor]) -> Structure:
    """What a traced call returns or stores, with integers that equal a size of the call plus a number as `size` nodes.

    Args:
        outer, leaves: of the call.
    """
    axes = cache(lambda: axes_of(outer, leaves))  # only where needed: other front ends trace with other objects

    def number(node: Structure) -> Structure:
        if node.kind != "const" or not isinstance(node.value, torch.SymInt):
            return node
        wanted = node.value.node.expr
        for axis in axes():
            size = leaves[axis.leaf].shape[axis.axis]
            more = wanted - size.node.expr if isinstance(size, torch.SymInt) else None
            if more is not None and more.is_Integer:
                return axis.and_more(int(more))
        return node

    return replaced(found, number)


def _is_apart(expression: Any) -> bool:
    """Whether a size is another one and a number."""
    free = expression.free_symbols
    return len(free) == 1 and bool((expression - next(iter(free))).is_Integer)


def _name(expression: Any, dims: dict[Any, Dim], more: dict[Any, int]) -> str:
    if expression not in dims:
        return DERIVED
    return dims[expression].name + (f"+{more[expression]}" if more[expression] else "")


def _shifted(known: Range, more: int) -> Range:
    """The range of a size, as one of another that is so much smaller."""
    if more and known.step > 1:
        raise CaptureError(
            f"the model needs a size that is both a multiple of {known.step} and {more} larger than another",
            fix="leave dynamic out: each size is captured when it is first called",
        )
    if not more:
        return known
    return Range(max(known.low - more, 0), None if known.high is None else known.high - more, known.step)


def _dim(
    exported: ExportedProgram, symbol: Any, places: Sequence[tuple[int, int]], wanted: Dynamic, names: Sequence[str]
) -> Dim:
    """The Dim of a symbol: by the user's name and range, within what torch.export found."""
    given = [dim for position, axis in places if (dim := wanted.axes[position][axis]) is not None]
    if len({dim.name for dim in given}) > 1:
        raise CaptureError(
            f"{' and '.join(sorted({dim.name for dim in given}))} must be the same size in this model",
            why="the model combines tensors of these sizes",
            fix=f"give all of them the name {given[0].name}",
        )
    (position, axis), constraint = places[0], exported.range_constraints.get(symbol)
    name = given[0].name if given else "batch" if axis == 0 else f"{names[position]}_{axis}"
    least_seen = min(min(wanted.seen[place]) for place in places)
    low, high = (given[0].low, given[0].high) if given else (min(least_seen, 1), None)
    if constraint is not None:
        least, most = int(constraint.lower), constraint.upper
        low = max(low, least) if least > ALWAYS else low
        if most.is_Integer and int(most) < (math.inf if high is None else high):
            high = int(most)
    return Dim(name, low, high)


def _name_apart(dims: dict[Any, Dim]) -> None:
    """Gives distinct names to sizes that are not tied: by argument and axis, by the path where that is not enough."""
    short = Counter(_of_the_argument(dim.name) for dim in {id(dim): dim for dim in dims.values()}.values())
    taken: dict[str, Dim] = {}
    for symbol, dim in dims.items():
        argument = _of_the_argument(dim.name)
        free = name = argument if short[argument] == 1 else dim.name.replace(".", "_")
        number = 1
        while taken.get(free, dim) is not dim:
            number += 1
            free = f"{name}_{number}"
        taken[free] = dim
        dims[symbol] = replace(dim, name=free)


def _of_the_argument(name: str) -> str:
    """`cache_2` for `cache.layers.0.keys_2`."""
    argument, dot, path = name.partition(".")
    return f"{argument}_{path.rpartition('_')[2]}" if dot else name


def _fixed(what: str, size: Any) -> CaptureError:
    number = isinstance(size, int) or size.node.expr.is_Integer
    how = f"must be {size}" if number else "is determined by another size"
    return CaptureError(
        f"{what} {how} in this model",
        why="the model uses this size as a constant, or combines the tensor with one of fixed size",
        fix="leave it out of dynamic, or read sizes from the input: x.shape[0] instead of a number",
    )


def with_dims(program: Program, symbols: Symbols) -> Program:
    """A captured program with what is known about its sizes."""
    signature = program.signature
    axes = iter(symbols.inputs)
    inputs = tuple(item if item.state else replace(item, axes=next(axes)) for item in signature.inputs)
    outputs = tuple(replace(item, axes=found) for item, found in zip(signature.outputs, symbols.outputs, strict=True))
    program.signature = replace(
        signature, inputs=inputs, outputs=outputs, dims=symbols.dims, conditions=symbols.conditions
    )
    try:
        made = retyped(program, traced_sizes(program.signature))
    except Exception as error:  # whatever an op says: torch.export has made something else of it
        raise CaptureError(
            "the dynamic graph from torch.export does not run at the sizes it was traced with",
            why=f"{type(error).__name__}: {str(error)[:200]}",
            fix="leave dynamic out: each size is captured when it is first called",
        ) from error
    made.graph.output_node().meta[PLACES] = symbols.places
    return made
