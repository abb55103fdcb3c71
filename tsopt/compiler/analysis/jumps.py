"""Calls whose results jump, such as `floor` and `==`, and the quotients that decide where they do.

21 / 7 is 3. 21 times the rounded inverse of 7 is 3.0000002, of which `ceil` makes 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tsopt.compiler.analysis.large_terms import NORMS, constant_of
from tsopt.compiler.analysis.next_calls import read_again
from tsopt.compiler.analysis.ranged_call import base_name
from tsopt.compiler.analysis.ranges import SHAPED
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.program import Program

COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
# Where the result of a call jumps: how far a number is from there.
JUMPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **dict.fromkeys(("floor", "ceil", "trunc", "frac"), lambda x: (x - x.round()).abs()),
    **dict.fromkeys(("round", "special_round"), lambda x: (x - x.floor() - 0.5).abs()),
    **dict.fromkeys(("sign", "sgn", "heaviside", "signbit"), torch.abs),
}
CASTS = frozenset({"to", "to_copy", "type_as"})
QUANTIZING = frozenset(
    name for part in ("tensor", "channel") for name in (f"quantize_per_{part}", f"fake_quantize_per_{part}_affine")
)
# The same for what has more than one such place, or whose place another operand says.
OTHER_JUMPS = QUANTIZING | {
    *("bucketize", "searchsorted", "remainder", "fmod", "floor_divide", "histc", "isclose", "isin"),
    *("logical_not", "logical_and", "logical_or", "logical_xor", "any", "all", "nonzero", "count_nonzero"),
    *("unique2", "unique_dim", "unique_consecutive"),
}
# Jumps too, but no decisions: where they jump is not worked out, so rounding excuses no difference behind them.
UNMEASURED = frozenset({"view_dtype", "frexp", "histogram"})
# They make no floats of floats, but only order them, look for infinities, read a shape or take one of several results.
# All others that make none cut them: casts, and whatever writes them into a tensor of integers.
UNCUT = (SHAPED - {"copy", "fill"}) | {"argmax", "argmin", "argsort", "isnan", "isinf", "isfinite", "getitem"}
UNCUT |= {"isposinf", "isneginf", "empty_like", "new_empty"}
LIMITS = {"threshold": "threshold", "hardshrink": "lambd"}  # which literal says where these jump
SAMPLERS, NEAREST = ("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"), 1
DIVISORS = {**dict.fromkeys(("div", "divide", "true_divide"), "other"), "addcdiv": "tensor2"}  # which operand it is
# Their results are rounded sums of many products, and are not whole numbers even if their operands are.
MIXING = NORMS | {
    *("linear", "matmul", "mm", "bmm", "mv", "dot", "inner", "addmm", "addmv", "addbmm", "baddbmm", "einsum"),
    *("tensordot", "bilinear", "scaled_dot_product_attention", "convolution"),
    *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)),
    *("softmax", "log_softmax", "logsumexp", "layer_norm", "group_norm", "rms_norm"),
    *("native_layer_norm", "native_group_norm", "lstm", "gru", "rnn_tanh", "rnn_relu"),
}


@dataclass(frozen=True, slots=True)
class Quotient:
    """A call that divides floats by a literal or a constant that is not a power of two."""

    node: fx.Node
    divisor: float | torch.Tensor


def is_decision(node: fx.Node) -> bool:
    """Whether a small difference of an operand may change the result of a call by a large one."""
    name = base_name(node)
    if name in SAMPLERS:
        return bool(ops.bind(node)["interpolation_mode"] == NEAREST)
    named = name in COMPARISONS or name in OTHER_JUMPS or name in LIMITS
    return named or jump(node) is not None or rounds_quotient(node)


def jump(node: fx.Node) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """How far a number is from where the result of a call jumps; None where it does not."""
    name, value = base_name(node), node.meta.get("val")
    if name in CASTS and isinstance(value, torch.Tensor) and not _is_float(value):
        return torch.abs if value.dtype == torch.bool else JUMPS["trunc"]
    limit = ops.bind(node)[LIMITS[name]] if name in LIMITS else None
    if isinstance(limit, (int, float)):
        return lambda x: ((x.abs() if name == "hardshrink" else x) - limit).abs()
    return JUMPS.get(name)


def rounds_quotient(node: fx.Node) -> bool:
    """Whether a call divides and makes a whole number of what it gets."""
    return base_name(node) in DIVISORS and ops.bind(node).get("rounding_mode") is not None


def is_cut(program: Program, node: fx.Node) -> bool:
    """Whether a call whose result jumps reads a value, or what is made of it, except by sums of many products.

    What a call of the model keeps is followed into the next one.
    """
    seen: set[fx.Node] = set()
    pending = [node]
    while pending:
        value = pending.pop()
        for reader in (*filter(ops.is_call, value.users), *read_again(program, value)):
            if reader in seen:
                continue
            seen.add(reader)
            if ops.is_call(reader) and _may_jump(reader):
                return True
            if base_name(reader) not in MIXING and _carries_floats(reader):
                pending.append(reader)
    return False


def _carries_floats(node: fx.Node) -> bool:
    """Whether a value holds floats, or is a number that was read of a tensor."""
    tensors = ops.tensors_of(node.meta.get("val"))
    return any(map(_is_float, tensors)) if tensors else node.target is not ops.SIZE


def _may_jump(node: fx.Node) -> bool:
    """Whether the result of a call, or one within it, jumps; of calls that are not known it is not known."""
    if blocks := ops.blocks_of(node):
        return any(_may_jump(inner) for block in blocks for inner in block.calls())
    named = base_name(node)
    return is_decision(node) or named in UNMEASURED or _cuts(node) or not (named or ops.is_number(node))


def _cuts(node: fx.Node) -> bool:
    """Whether a call makes something else than floats of floats."""
    made = ops.tensors_of(node.meta.get("val"))
    given = (value for source in node.all_input_nodes for value in ops.tensors_of(source.meta.get("val")))
    return bool(made) and not any(map(_is_float, made)) and any(map(_is_float, given)) and base_name(node) not in UNCUT


def quotients(program: Program) -> Iterator[Quotient]:
    """The quotients by constants, without those of programs within."""
    for node in program.calls():
        name, value = DIVISORS.get(base_name(node)), node.meta.get("val")
        if name is None or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        call = ops.bind(node)
        given = call[name]
        known: Any = given if isinstance(given, (int, float)) else constant_of(program, given)
        if not rounds_quotient(node) and known is not None and not is_power_of_two(known):
            yield Quotient(node, known)


def is_power_of_two(value: float | torch.Tensor) -> bool:
    """Whether the inverse of a number, or of each element, is not rounded."""
    if isinstance(value, torch.Tensor):
        return bool((torch.frexp(value.detach().double()).mantissa.abs() == 0.5).all())
    return abs(math.frexp(value)[0]) == 0.5


def _is_float(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()
