"""Which inputs can make a value of the program NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import IntEnum
from typing import Any

from torch import fx

from tsopt.compiler.analysis.range_rules import SAME_VALUES
from tsopt.compiler.analysis.ranged_call import base_name
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.program import Program


class Harm(IntEnum):
    """What in an operand makes a result NaN or infinite; each kind includes those before it."""

    NONE = 0
    NAN = 1
    POSITIVE_INFINITY = 2
    NEGATIVE_INFINITY = 3


# Infinities pass, and so does NaN.
PASSING = SAME_VALUES | {
    "max_pool1d",
    "max_pool2d",
    "dropout",
    "to",
    "to_copy",
    "cat",
    "stack",
    "where",
    "masked_fill",
    "constant_pad_nd",
    "getitem",
}
BOUNDED = frozenset({"sigmoid", "tanh", "erf", "atan", "relu6", "hardsigmoid"})
CLAMPS = {"clamp": ("min", "max"), "hardtanh": ("min_val", "max_val")}
ZERO_AT_NEGATIVE_INFINITY = frozenset({"softmax", "exp", "relu"})
ATTENTION, MASK = "scaled_dot_product_attention", "attn_mask"


def harmful_inputs(program: Program, values: Iterable[fx.Node]) -> dict[fx.Node, Harm]:
    """The inputs of a program by which one of these values can become NaN or infinite, and what has to be in them.

    Integers and booleans are neither, so an input that is only compared is not among them. A mask that is added to
    attention scores may contain -inf; only NaN and inf in it are harmful. Not considered: finite inputs that overflow,
    and masks that hide a whole row, for which softmax returns NaN.
    """
    harms: dict[fx.Node, Harm] = dict.fromkeys(values, Harm.NEGATIVE_INFINITY)
    for node in reversed(program.graph.nodes):
        if node.op != "call_function" or node not in harms:
            continue
        for operand in node.all_input_nodes:
            harm = _harm_of(program, node, operand, harms[node]) if _is_real(operand) else Harm.NONE
            if harm:
                harms[operand] = max(harm, harms.get(operand, Harm.NONE))
    return {node: harms[node] for node in program.graph.nodes if node.op == "placeholder" and node in harms}


def _is_real(node: fx.Node) -> bool:
    """Whether a value, or one of several, can be NaN."""
    return any(value.is_floating_point() or value.is_complex() for value in ops.tensors_of(node.meta.get("val")))


def _harm_of(program: Program, node: fx.Node, operand: fx.Node, harm: Harm) -> Harm:
    """What in an operand of a call has such an effect, if this in its result has."""
    name = base_name(node)
    if name == "nan_to_num":
        return _harm_of_what_is_put_in(node, harm)
    if name in BOUNDED or is_bounded(program, node):
        return Harm.NAN
    if name in ZERO_AT_NEGATIVE_INFINITY:
        return Harm.POSITIVE_INFINITY
    if name == ATTENTION and operand not in [item for key, item in ops.bind(node).items() if key != MASK]:
        return Harm.POSITIVE_INFINITY
    if name in PASSING or (name == "add" and harm > Harm.NAN and ops.bind(node).get("alpha") == 1):
        return harm
    return Harm.NEGATIVE_INFINITY  # by inf - inf or 0 * inf, or the sign changes


def _harm_of_what_is_put_in(node: fx.Node, harm: Harm) -> Harm:
    """Of `nan_to_num`, which may be asked to put in what it is there to take out."""
    call, found = ops.bind(node), Harm.NONE
    for kind, name in ((Harm.NAN, "nan"), (Harm.POSITIVE_INFINITY, "posinf"), (Harm.NEGATIVE_INFINITY, "neginf")):
        given = call.get(name)
        if isinstance(given, float) and not math.isfinite(given):
            made = Harm.NAN if math.isnan(given) else Harm.POSITIVE_INFINITY if given > 0 else Harm.NEGATIVE_INFINITY
            found = max(found, kind if made <= harm else Harm.NONE)
    return found


def is_bounded(program: Program, node: fx.Node) -> bool:
    """Whether a call is a clamp with two bounds that are finite numbers."""
    ends = bounds(node)
    return bool(ends) and all(_is_finite(program, end) for end in ends)


def bounds(node: fx.Node) -> tuple[Any, ...]:
    """The two bounds of a clamp; nothing for another call, or a clamp with one."""
    names, call = CLAMPS.get(base_name(node), ()), ops.bind(node)
    ends = tuple(call.get(name) for name in names)
    return () if None in ends else ends


def _is_finite(program: Program, end: Any) -> bool:
    if isinstance(end, fx.Node):
        if ops.is_call(end):
            return base_name(end) in SAME_VALUES and _is_finite(program, end.args[0])
        constant = program.weights.get(str(end.target)) if end.op == "get_attr" else None
        return constant is not None and bool(constant.isfinite().all())
    return not isinstance(end, float) or math.isfinite(end)
