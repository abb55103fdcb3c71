"""Extreme inputs: the limits of each dtype and realistic large numbers, on which narrower arithmetic goes wrong.

Generated only for programs in which no input value decides how much is computed, or can crash the process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from tsopt.compiler.analysis.intervals import Range, of_dtype
from tsopt.compiler.analysis.jumps import is_cut, quotients, rounds_quotient
from tsopt.compiler.analysis.range_rules import PLACES, RULES
from tsopt.compiler.analysis.ranged_call import base_name
from tsopt.compiler.analysis.ranges import recorded
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.control import all_calls
from tsopt.compiler.graph.program import Program
from tsopt.runtime.onnx.integers.indices import USES, affine, uses_of
from tsopt.runtime.onnx.integers.least_time import PRODUCTS

EXTREME = "extreme"
MIDDLES, MULTIPLES = f"{EXTREME} halves", f"{EXTREME} multiples"
ROUNDS = 3  # sets for an input that has fewer elements than there are numbers to try

# Times in seconds and milliseconds, hashes, the ends of int32, what float32 and float64 hold, the ends of bytes.
WHOLE = (
    *(2**31, 1_700_000_000_123, 2**53 + 1, 255, -(2**31) - 1, 2**24 + 1, 1_700_000_000, 2**31 - 1, -128, 2**40),
    *(2**32 + 5, -1, 128, 0x5BD1E995_9E3779B9, -(2**53) - 1, 65_536, 1, 0, 127, 32_767, -(2**24) - 1, 256),
)
REAL = {
    torch.float64: (
        1.7e9 + 0.25,
        3e9,
        2.0**53,
        1 + 2.0**-40,
        1.7e12 + 0.5,
        16_777_217.0,
        255.0,
        -0.0,
        0.1,
        -3e9,
    ),
    torch.float32: (3e9, 1.7e9, 255.0, -3e9, 65_504.0, 2.0**24 + 2, 0.1, -128.5, 1.7e12, 256.5, -0.0),
    torch.float16: (65_504.0, 2047.0, 255.0, -65_504.0, 1e-7, 0.1, -0.0, -128.5),
    torch.bfloat16: (3e9, 257.0, 65_536.0, -3e9, 0.1, -0.0, -128.5),
}
# Exponents that float32 does not have. In a set of their own: float32 makes an infinity of 1e300, which spreads to all
# that it is added to, and then nothing else is compared.
EXPONENTS = {torch.float64: (1e300, 1e-300)}
# Values decide how much these make or how long they take, or they are not checked before memory is read or written.
VALUES_DECIDE = frozenset(
    {
        "bincount",
        "repeat_interleave",
        "nonzero",
        "unique",
        "unique2",
        "masked_select",
        "embedding_bag",
        "segment_reduce",
    }
    | {"max_unpool2d", "max_unpool3d", "histc", "item", "local_scalar_dense", "tensor_split", "combinations"}
)
REDUCTIONS = frozenset({"mean", "var", "std", "all", "any", "prod", "cumprod", "norm", "cummax", "cummin", "equal"})
# Integer division of the lowest number by -1, and by zero, ends the process.
DIVISIONS = frozenset({"div", "floor_divide", "remainder", "fmod", "divide", "gcd", "lcm"})
# Of floats: here the size of a number decides another one than itself.
CUTTING = frozenset({"floor", "ceil", "round", "trunc", "frac", "remainder", "fmod", "floor_divide", "special_round"})


ROUNDING = frozenset({"round", "rint", "special_round"})  # and what quantizes, which has steps of its own
STEPS = (1.0, 0.25)
HALVES = 32  # to either side of zero, in the set of values in the middle between two steps
MOST_MULTIPLES, MOST_DIVISORS = 1024, 16


def extreme_values(
    program: Program, leaves: Sequence[torch.Tensor], generator: torch.Generator
) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """The values of all inputs, with extremes in place of one of them, or of all.

    Those of an input that is an index are the first and the last that exist. Where the program rounds, one set is of
    floats that lie in the middle between two steps; where it rounds or compares a quotient, one is of multiples of the
    divisor, and of whole numbers of which two factors make others.
    """
    if len(leaves) != len(program.signature.user_inputs) or not is_safe(program):
        return
    indices = index_inputs(program)
    wanted = [position for position, leaf in enumerate(leaves) if _is_tried(leaf, program)]

    def changed(position: int, numbers: Sequence[float], number: int = 0) -> torch.Tensor:
        leaf, limit = leaves[position], indices.get(position)
        return extreme(leaf, numbers, generator, number) if limit is None else index_within(leaf, generator, limit)

    for position in wanted:
        leaf, name = leaves[position], program.signature.user_inputs[position].name
        for title, numbers in ((name, numbers_of(leaf.dtype)), (f"{name} exponents", EXPONENTS.get(leaf.dtype, ()))):
            rounds = min(ROUNDS, -(-len(numbers) // leaf.numel())) if position not in indices else min(1, len(numbers))
            for number in range(rounds):
                values = [*leaves[:position], changed(position, numbers, number), *leaves[position + 1 :]]
                yield f"{EXTREME} {title}{f' {number + 1}' if number else ''}", values
    if len(wanted) > 1:
        yield EXTREME, [changed(i, numbers_of(leaf.dtype)) if i in wanted else leaf for i, leaf in enumerate(leaves)]
    steps = _steps(program)
    if steps and any(leaf.is_floating_point() and leaf.numel() for leaf in leaves):
        yield MIDDLES, [_middles(leaf, steps, generator) if leaf.is_floating_point() else leaf for leaf in leaves]
    multiples = [k * divisor for divisor in _divisors(program) for k in _telling(divisor)] + _whole(program)
    if multiples:
        known = torch.tensor(multiples, dtype=torch.float64, device="cpu")
        drawn = [_drawn_from(known, leaf, generator) for leaf in leaves]
        yield MULTIPLES, [leaf if i in indices else drawn[i] for i, leaf in enumerate(leaves)]


def index_inputs(program: Program) -> dict[int, Range]:
    """The inputs that are indices, by position, and those that exist: eager refuses all others."""
    values = recorded(program)
    positions = {node: i for i, node in enumerate(n for n in program.graph.nodes if n.op == "placeholder")}
    found: dict[int, Range] = {}
    for use in uses_of(program, values):
        source = affine(use.index, values)
        if source is not None:
            position = positions[source.input]
            found[position] = found.get(position, of_dtype(values[source.input].dtype)) & source.inverse(use.range)
    return found


def index_within(leaf: torch.Tensor, generator: torch.Generator, limit: Range) -> torch.Tensor:
    """A tensor like another one, of indices that exist, the first and the last among them."""
    if limit.low > limit.high:
        return leaf
    low, high = int(limit.low), int(limit.high)
    values = torch.randint(low, high + 1, (leaf.numel(),), generator=generator, device="cpu")
    ends = torch.tensor([low, high], device="cpu")[: leaf.numel()]
    values[: len(ends)] = ends
    return like(leaf, values.to(leaf.dtype).reshape(leaf.shape).to(leaf.device))


def numbers_of(dtype: torch.dtype) -> tuple[float, ...]:
    """What is tried of a dtype; nothing of one whose numbers are not kept apart here."""
    if dtype in REAL:
        return REAL[dtype]
    if dtype.is_floating_point or dtype.is_complex or dtype not in _INTEGERS:
        return ()
    info = torch.iinfo(dtype)
    return tuple(dict.fromkeys((info.max, info.min, *(n for n in WHOLE if info.min <= n <= info.max), info.min + 1)))


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def extreme(leaf: torch.Tensor, numbers: Sequence[float], generator: torch.Generator, number: int = 0) -> torch.Tensor:
    """A tensor like another one, of these numbers in any order."""
    known = torch.tensor(numbers, dtype=leaf.dtype, device="cpu")
    count = leaf.numel()
    places = (torch.arange(count, device="cpu") + number * count) % len(known)
    return like(
        leaf,
        known[places][torch.randperm(count, generator=generator, device="cpu")].reshape(leaf.shape).to(leaf.device),
    )


def _steps(program: Program) -> list[float]:
    """The step sizes that a program rounds to; empty if it does not round."""
    found: dict[float, None] = {}
    for node in all_calls(program):
        name = base_name(node)
        if "quantize" in name and "dequantize" not in name:
            call = ops.bind(node)
            scale = call.get("scales", call.get("scale"))
            if isinstance(scale, fx.Node):
                constant = program.weights.get(str(scale.target)) if scale.op == "get_attr" else None
                scale = None if constant is None else float(constant.reshape(-1)[0])
            found |= dict.fromkeys(STEPS if scale is None else (*STEPS, float(scale)))
        elif name in ROUNDING:
            found |= dict.fromkeys(STEPS)
    return list(found)


def _middles(leaf: torch.Tensor, steps: Sequence[float], generator: torch.Generator) -> torch.Tensor:
    """A tensor like another one, of multiples of half of each step."""
    numbers = torch.randint(-HALVES, HALVES + 1, leaf.shape, generator=generator, device="cpu")
    widths = torch.tensor(steps, dtype=torch.float64, device="cpu")
    which = torch.arange(leaf.numel(), device="cpu").reshape(leaf.shape) % len(steps)
    return like(leaf, (numbers * widths[which] / 2).to(leaf.dtype).to(leaf.device))


def _divisors(program: Program) -> list[float]:
    """What a program divides by where it then rounds or compares the quotient."""
    found: dict[float, None] = {}
    for quotient in quotients(program):
        if is_cut(program, quotient.node):
            value = quotient.divisor
            numbers = value.reshape(-1)[:MOST_DIVISORS].tolist() if isinstance(value, torch.Tensor) else [value]
            found |= dict.fromkeys(float(number) for number in numbers if math.isfinite(number) and number != 0)
    return list(found)[:MOST_DIVISORS]


def _telling(divisor: float) -> list[int]:
    """Which multiples of a number become another one by its rounded inverse in float32; any if none does."""
    number = torch.tensor(divisor, dtype=torch.float32, device="cpu")
    wanted = torch.arange(1, MOST_MULTIPLES, dtype=torch.float32, device="cpu")
    found = wanted[(wanted * number) * (1 / number) != wanted] if bool(number) else wanted
    return [int(k) for k in (found if len(found) else wanted)[:HALVES].tolist()]


def _whole(program: Program) -> list[float]:
    """Whole numbers of which two factors make others, but their product does not, where a program then cuts these."""
    found: dict[float, None] = {}
    whole = torch.arange(1, MOST_MULTIPLES, dtype=torch.float32, device="cpu")
    for node in program.calls():
        second, before = _factor(node), node.all_input_nodes[:1]
        first = _factor(before[0]) if second is not None and before else None
        if first is None or second is None or not is_cut(program, node):
            continue
        made = whole * first * second
        tells = (made != whole * (first * second)) & (made == made.round())
        found |= dict.fromkeys(whole[tells][:HALVES].tolist())
    return list(found)


def _factor(node: fx.Node) -> float | None:
    """The literal by which a call multiplies floats."""
    value = node.meta.get("val")
    if base_name(node) != "mul" or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return None
    other = ops.bind(node)["other"]
    return other if isinstance(other, (int, float)) else None


def _drawn_from(known: torch.Tensor, leaf: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A tensor like another one, of those of these numbers, with both signs, that its dtype holds."""
    both = torch.cat([known, -known])
    if leaf.dtype in _INTEGERS:
        both = both[both == both.to(leaf.dtype).double()]
    if not leaf.numel() or not len(both) or not (leaf.is_floating_point() or leaf.dtype in _INTEGERS):
        return leaf
    places = torch.randint(len(both), leaf.shape, generator=generator, device="cpu")
    return like(leaf, both[places].to(leaf.dtype).to(leaf.device))


def like(leaf: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values in the layout of a tensor, where its elements do not share memory."""
    if any(step == 0 for step in leaf.stride()):
        return values
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device).copy_(values)


def _is_tried(leaf: torch.Tensor, program: Program) -> bool:
    """Whether extremes of an input show what ordinary numbers do not: of float32, where it becomes a whole number."""
    if not leaf.numel() or not numbers_of(leaf.dtype):
        return False
    return leaf.dtype != torch.float32 or any(_cuts(node) for node in program.calls())


def _cuts(node: fx.Node) -> bool:
    made = node.meta.get("val")
    taken = [value for source in node.all_input_nodes for value in ops.tensors_of(source.meta.get("val"))]
    if not isinstance(made, torch.Tensor) or not any(value.is_floating_point() for value in taken):
        return False
    name = base_name(node)
    if name in CUTTING or rounds_quotient(node):
        return True
    return name in ("to", "to_copy", "type_as") and not made.dtype.is_floating_point


def is_safe(program: Program) -> bool:
    """Whether any whole number may be given to a program: eager refuses what it does not take, and survives."""
    return not any(_is_unsafe(node) for node in program.calls())


def _is_known(name: str, node: fx.Node) -> bool:
    """Whether it is known what becomes of a whole number: others may take it for a place in memory, unchecked."""
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return pointwise or name in RULES or name in PLACES or name in USES or name in PRODUCTS or name in REDUCTIONS


def _is_unsafe(node: fx.Node) -> bool:
    if is_unchecked(node):
        return True
    name = base_name(node)
    if name not in DIVISIONS or not _takes_whole_numbers(node) or ops.is_number(node) or ops.is_settled_check(node):
        return False
    call = ops.bind(node)
    if name in ("div", "divide") and call.get("rounding_mode") is None:
        return False  # of floats
    divisor = call.get("other")
    return not (isinstance(divisor, (int, float)) and divisor not in (0, -1))


def is_unchecked(node: fx.Node) -> bool:
    """Whether a whole number decides how much a call computes, or may be taken for a place in memory unchecked."""
    if ops.blocks_of(node):
        return True  # a loop goes on for as long as a value says
    name = base_name(node)
    if not _takes_whole_numbers(node) or name == "getitem" or ops.is_number(node) or ops.is_settled_check(node):
        return False
    return name in VALUES_DECIDE or not _is_known(name, node)


def _takes_whole_numbers(node: fx.Node) -> bool:
    values = [value for source in node.all_input_nodes for value in ops.tensors_of(source.meta.get("val"))]
    return any(value.dtype in _INTEGERS for value in values)
