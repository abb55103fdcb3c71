"""Engines that compute a dtype in fewer bits than PyTorch: which programs are refused, and which inputs are checked.

An engine declares which integers it represents exactly, by dtype, and by op if a kernel is wrong beyond them. Interval
arithmetic shows whether a program stays within these ranges. If it does for inputs of ordinary size, the inputs are
checked at each call; if not, the program is refused, naming the value. Values that are only used as indices are left
alone: PyTorch refuses the numbers that an engine would truncate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from tsopt.compiler.analysis.intervals import ANY, FLAG, Range, of_dtype, wrapped
from tsopt.compiler.analysis.ranged_call import Ranges, base_name
from tsopt.compiler.analysis.ranges import ranges_of, recorded
from tsopt.compiler.calls.signature import Signature, dim_of
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.origin import origin_of
from tsopt.compiler.graph.program import Program
from tsopt.runtime.backends.backend import Unsupported
from tsopt.runtime.calling.value_checks import RANGE, Bound
from tsopt.runtime.onnx.integers.ends import At, below, ends_of, is_too_large
from tsopt.runtime.onnx.integers.engine import AS_BOOL, Engine, signed
from tsopt.runtime.onnx.integers.indices import Affine, Use, affine, is_whole, uses_of
from tsopt.runtime.onnx.integers.least_time import least_seconds

# What inputs are checked for where a program is right for smaller numbers only: bits of their size. Beyond any token,
# any position and any class; what needs still smaller ones is not worth a check that ordinary calls would fail.
LADDER = (31, 24, 15)
CHECK_SECONDS, CHECK_SECONDS_EACH = 4e-6, 1e-9  # what looking at an input costs, and at each of its numbers
NEVER = 1 << 30  # threads: so fast that no check is worth its time
CASTS = frozenset({"to", "to_copy", "type_as"})
ELEMENTWISE = frozenset({"where", "masked_fill"})
SHARE = 0.01  # of a call, for checks that nobody has asked for


@dataclass(frozen=True, slots=True)
class Examined:
    """What an engine makes of a program: why it is refused, what is checked at each call, and what callers are told."""

    refused: tuple[Unsupported, ...] = ()
    bounds: tuple[Bound, ...] = ()
    notes: tuple[str, ...] = ()

    def is_enough_for(self, wider: Examined) -> bool:
        """Whether what is checked at each call is enough for wider ranges, as examined there."""
        fits = (any(mine == bound or mine.is_within(bound) for mine in self.bounds) for bound in wider.bounds)
        return set(wider.refused) <= set(self.refused) and all(fits)


def examine(program: Program, engine: Engine, check_indices: bool = False, threads: int = 1) -> Examined:
    """What an engine makes of a program.

    Args:
        check_indices: look at indices at each call, whatever that costs; otherwise where it is not noticed.
        threads: that a call has; 0: torch's own number.
    """
    places = ends_of(program)
    inputs = [node for node in program.graph.nodes if node.op == "placeholder"]
    demands = _demands(places)
    absent = partial(_too_large, program, engine=engine)
    examined = [*places, *(below(program, absent) if len(places) > 1 and absent(places[-1]) else ())]
    refused: list[Unsupported] = []
    limits: dict[fx.Node, Range] | None = None
    for allowed in _ladder(inputs, demands, engine):
        found = [item for place in examined for item in _faults(program, place, allowed(place), engine)]
        if not found:
            limits = dict(zip(inputs, allowed(places[0]), strict=True))
            break
        refused = refused or found
        if not any(is_whole(places[0].values[node]) for node in inputs):
            break
    if limits is None:
        return Examined(tuple(dict.fromkeys(refused)))
    checked = {node: limit for node, limit in limits.items() if _is_bounding(node, limit, places[0])}
    bounds, unchecked = _bounds(program, places, demands, checked, check_indices, threads)
    sizes = dict.fromkeys(_size(limit) for limit in checked.values())
    notes = [
        f"{engine.name} serves calls whose integers are at most {size} in magnitude; PyTorch serves all others"
        for size in sizes
    ]
    if unchecked:
        notes.append(
            f"{engine.name} {engine.beyond} for which PyTorch raises IndexError or "
            f"RuntimeError: {', '.join(unchecked[:3])}{', ...' if len(unchecked) > 3 else ''}"
            f"{'' if check_indices else '; check_indices=True checks those that are inputs'}"
        )
    return Examined((), tuple(bounds), tuple(notes))


def _ladder(
    inputs: Sequence[fx.Node], demands: Mapping[fx.Node, list[tuple[Use, Affine]]], engine: Engine
) -> Iterator[Any]:
    """What may be asked of inputs, the least first: a function of the place."""

    def allowed(bits: int | None, demanded: bool) -> Any:
        def at(place: At) -> list[Range]:
            return [limit(node, place) for node in inputs]

        def limit(node: fx.Node, place: At) -> Range:
            value = place.values[node]
            found = of_dtype(value.dtype)
            if not is_whole(value) or node in place.lookups:
                return found
            found &= engine.dtypes.get(value.dtype, ANY)
            if bits is not None and value.dtype.itemsize >= 4:
                found &= signed(bits)
            if demanded:
                for use, source in demands.get(node, ()):
                    found &= source.inverse(place.use(use).range)
            return found

        return at

    yield allowed(None, False)
    for bits in LADDER:
        yield allowed(bits, False)
    yield allowed(LADDER[0], True)
    yield allowed(LADDER[1], True)


def _demands(places: Sequence[At]) -> dict[fx.Node, list[tuple[Use, Affine]]]:
    """By input: as what it is used as an index, all of it."""
    found: dict[fx.Node, list[tuple[Use, Affine]]] = {}
    for use in places[0].uses:
        source = affine(use.index, places[0].values)
        if source is not None and use.also is None:
            found.setdefault(source.input, []).append((use, source))
    return found


# ---- what does not fit --------------------------------------------------------------------------------------


def _faults(program: Program, place: At, inputs: Sequence[Range], engine: Engine) -> Iterator[Unsupported]:
    ranges = ranges_of(program, place.values, inputs)
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        if blocks := ops.blocks_of(node):
            for block in blocks:
                yield from _faults_within(node, block, engine)
            continue
        why = _fault(node, place, ranges, engine)
        if why:
            yield Unsupported(origin_of(node) or _name(program, node), f"{engine.name} {why}")


def _faults_within(call: fx.Node, block: Program, engine: Engine) -> Iterator[Unsupported]:
    """Of a branch or a loop, whose values may be anything."""
    place = At.of(block, None)
    inputs = [of_dtype(node.meta["val"].dtype) for node in block.graph.nodes if node.op == "placeholder"]
    for found in _faults(block, place, inputs, engine):
        yield replace(found, where=origin_of(call) or found.where)


def _fault(node: fx.Node, place: At, ranges: Ranges, engine: Engine) -> str:
    value, name = place.values.get(node), base_name(node) or node.op
    if not isinstance(value, torch.Tensor):
        return _fault_of_operands(node, name, place, ranges, engine) if ops.is_call(node) else ""
    if value.dtype in engine.absent:
        return f"does not support {_of(value.dtype)}: {engine.absent[value.dtype]}"
    if name in engine.rounds and value.dtype.is_floating_point and _cuts(node):
        return f"rounds the quotient before {name} truncates it"
    narrow = engine.dtypes.get(value.dtype)
    if narrow is not None and node not in place.lookups and ranges[node] not in narrow:
        return f"represents {_of(value.dtype)} only up to {_size(narrow)}, and {name} may exceed that"
    if not ops.is_call(node) or value.dtype.is_floating_point:
        return ""
    for number in ops.whole_literals(node, place.values):
        if narrow is not None and Range(number, number) not in narrow and name not in engine.compared:
            return f"represents {_of(value.dtype)} only up to {_size(narrow)}, and {name} is given {number}"
    return _fault_of_operands(node, name, place, ranges, engine)


def _fault_of_operands(node: fx.Node, name: str, place: At, ranges: Ranges, engine: Engine) -> str:
    made = place.values.get(node)
    if name in CASTS and isinstance(made, torch.Tensor) and made.dtype == torch.bool:
        name = AS_BOOL
    found = [wrapped(ranges[n], place.values[n].dtype) for n in node.all_input_nodes if is_whole(place.values.get(n))]
    limit, compared = engine.by_op.get(name), engine.compared.get(name)
    if _is_absent(name, made, engine):
        return ""
    if compared is not None:
        found += [Range(number, number) for number in ops.whole_literals(node, place.values)]
        beyond = max(sum(item.high > compared.high for item in found), sum(item.low < compared.low for item in found))
        return f"compares integers in {name} correctly only {_within(compared)}" if beyond > 1 else ""
    if limit is None:
        return ""
    if found and node in ranges:
        found.append(ranges[node])
        if isinstance(made, torch.Tensor) and all(item in limit for item in found):
            # What it computes in other numbers does not wrap around at the ends of the dtype.
            limit, found = limit & of_dtype(made.dtype), found[-1:]
    if all(item in limit for item in found):
        return ""
    return f"computes {name} of integers correctly only {_within(limit)}"


def _is_absent(name: str, made: Any, engine: Engine) -> bool:
    """Whether a call is not examined here, because no program makes a tensor of this size."""
    return name in (*engine.compared, *ELEMENTWISE) and isinstance(made, torch.Tensor) and is_too_large(made)


def _too_large(program: Program, place: At, *, engine: Engine) -> set[fx.Node]:
    return {node for node in program.calls() if _is_absent(base_name(node), place.values.get(node), engine)}


def _within(limit: Range) -> str:
    if limit == FLAG:
        return "for 0 and 1"
    return f"from 0 to {_size(limit)}" if limit.low == 0 else f"up to {_size(limit)}"


def _cuts(node: fx.Node) -> bool:
    """Whether a quotient is rounded and then cut. By a power of two it is not rounded."""
    if base_name(node) == "div" and node.kwargs.get("rounding_mode") is None:
        return False
    divisor = node.args[1] if len(node.args) > 1 else None
    return not (isinstance(divisor, (int, float)) and divisor != 0 and abs(math.frexp(divisor)[0]) == 0.5)


def _of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(found: Range) -> str:
    most = max(abs(found.low), abs(found.high))
    return f"2^{int(most - 1).bit_length()}" if most < math.inf else "any size"


def _name(program: Program, node: fx.Node) -> str:
    return program.value_names().get(node, "").removeprefix("%")


# ---- what is checked at the call ----------------------------------------------------------------------------


def _is_bounding(node: fx.Node, limit: Range, place: At) -> bool:
    value = place.values[node]
    return is_whole(value) and of_dtype(value.dtype) not in limit


def _bounds(
    program: Program,
    places: Sequence[At],
    demands: Mapping[fx.Node, list[tuple[Use, Affine]]],
    limits: Mapping[fx.Node, Range],
    check_indices: bool,
    threads: int,
) -> tuple[list[Bound], list[str]]:
    """The checks, and the indices that are not looked at."""
    positions = {node: i for i, node in enumerate(n for n in program.graph.nodes if n.op == "placeholder")}
    bounds = [Bound(positions[node], int(limit.low), int(limit.high), RANGE) for node, limit in limits.items()]
    ranges = [ranges_of(program, place.values, _usual(program, limits), with_nan=True) for place in places]
    ready = least_seconds(program, places[0].values, threads) * SHARE
    unchecked: list[str] = []
    for use in places[0].uses:
        if all(_exists(use, place, found) for place, found in zip(places, ranges, strict=True)):
            continue
        source = affine(use.index, places[0].values)
        made = None if source is None else _bound(program, places, use, source, positions[source.input])
        if made is not None and source is not None:
            cost = CHECK_SECONDS + CHECK_SECONDS_EACH * places[-1].values[source.input].numel()
            if check_indices or source.input in limits or cost < ready:
                ready -= 0 if check_indices or source.input in limits else cost
                bounds.append(made)
                continue
        unchecked.append(origin_of(use.call) or base_name(use.call))
    inner = [n for call in program.calls() for block in ops.blocks_of(call) for n in uses_of(block, recorded(block))]
    unchecked += [origin_of(use.call) or base_name(use.call) for use in inner]
    return _merged(bounds), list(dict.fromkeys(unchecked))


def _merged(bounds: Sequence[Bound]) -> list[Bound]:
    """One look at an input for all its fixed ends: those of an index, which say what eager raises, are the first."""
    fixed: dict[int, Bound] = {}
    rest: list[Bound] = []
    for bound in sorted(bounds, key=lambda bound: bound.kind == RANGE):
        if bound.also is not None or bound.above:
            rest.append(bound)
            continue
        first = fixed.setdefault(bound.input, bound)
        fixed[bound.input] = replace(first, low=max(first.low, bound.low), high=min(first.high, bound.high))
    return [*fixed.values(), *dict.fromkeys(rest)]


def _usual(program: Program, limits: Mapping[fx.Node, Range]) -> list[Range]:
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    return [limits.get(node, of_dtype(node.meta["val"].dtype)) for node in nodes]


def _exists(use: Use, place: At, ranges: Ranges) -> bool:
    """Whether whatever the index is exists, by its range; a negative one only where the engine need not count."""
    here = place.use(use)
    return wrapped(ranges[here.index], place.values[here.index].dtype) in here.range


def _bound(program: Program, places: Sequence[At], use: Use, source: Affine, position: int) -> Bound | None:
    """The check of an input that is an index; None where its size is not one of the call's."""
    if program.signature.dims and len(places) == 1:
        return None
    here = [place.use(use) for place in places]
    if len({item.size for item in here}) == 1:
        found = source.inverse(here[0].range)
        return Bound(position, int(found.low), int(found.high), use.error, use.also)
    sized = _size_of(program.signature, places, [item.size for item in here])
    if sized is None or source.factor != 1:
        return None
    of, axis, more = sized
    # The index lies from 0, or -(size + more), to size + more - 1; the input is what it was before the offset.
    low = -source.offset - (more if use.negative else 0)
    below = -1 if use.negative else 0
    return Bound(position, low, more - 1 - source.offset, use.error, use.also, of, axis, below, 1)


def _size_of(signature: Signature, places: Sequence[At], sizes: Sequence[int]) -> tuple[int, int, int] | None:
    """An input and an axis of it whose size is this one, and how much is to be added."""
    for position, item in enumerate(signature.inputs):
        for axis, name in enumerate(item.axes):
            if name is None:
                continue
            dim, more = dim_of(name)
            apart = {size - (place.sizes[dim] + more) for size, place in zip(sizes, places, strict=True)}
            if len(apart) == 1:
                return position, axis, apart.pop()
    return None
