"""Sums with large constants, kept apart from the factors and terms after them.

OpenVINO makes `x * c + b * c` of `(x + b) * c`, and `x + (b + c)` of `x + b + c`: where b is much larger than what is
left of it, as in `(pressure - 101325) / 30`, the last digits are lost.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tsopt.compiler.analysis.jumps import is_power_of_two
from tsopt.compiler.analysis.large_terms import SUMS, constant_of, ends_of, factors_of, terms_of
from tsopt.compiler.analysis.non_finite import PASSING
from tsopt.compiler.analysis.ranged_call import base_name
from tsopt.compiler.graph.control import Control, with_blocks
from tsopt.compiler.graph.edit import new_call
from tsopt.compiler.graph.ops import Arguments, aten, bind
from tsopt.compiler.graph.program import Program

LARGE = 16.0  # a term, or what becomes of it, that would cost more than the last bits of numbers around 1
SCALES = frozenset({"mul", "div", "divide", "true_divide"})


def with_sums_apart(program: Program) -> Program:
    """A copy in which an op comes between a sum with a large constant and what follows, up to a factor or another term.

    That op does nothing: a leaky ReLU of slope 1.
    """
    made = program.copy()
    for node in list(made.graph.nodes):
        if isinstance(node.target, Control):
            node.target = with_blocks(node.target, with_sums_apart)
        elif (found := _large_sum(made, node)) is not None:
            x, reader = found
            reader.replace_input_with(x, new_call(made, reader, x, aten.leaky_relu.default, (x, 1.0), {}))
    return made


def _large_sum(program: Program, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The sum that would lose digits if its constant became one with that of a later call, and what reads it.

    In between there may be more sums and products with constants. By a power of two alone, no digit is lost.
    """
    if base_name(node) not in SUMS | SCALES or _scales_exactly(program, node):
        return None
    reader, most = node, 1.0  # the largest factor, or product of factors, that the term would get
    while (step := _linear(program, reader)) is not None:
        x, factor = step
        most = max(1.0, factor * most)
        if _term(program, x) * most >= LARGE and _depends_on_inputs(x):
            return x, reader
        reader = x
    return None


def _linear(program: Program, node: fx.Node) -> tuple[fx.Node, float] | None:
    """What a call moves, or combines with constants in a sum or a product, and the largest factor that it gets."""
    name, value, call = base_name(node), node.meta.get("val"), bind(node)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return None
    if (name in PASSING or name == "neg") and len(node.all_input_nodes) == 1:
        (x,) = node.all_input_nodes
        return (x, 1.0) if x.meta["val"].is_floating_point() else None  # a sum of integers stays one
    if name in SUMS:
        operands = {
            key: abs(factor) for key, factor in factors_of(name, call).items() if _is_computed(program, call[key])
        }
        found = [(call[key], factor) for key, factor in operands.items()]
        return found[0] if len(found) == 1 else None
    scaled = _scaled(program, name, call)
    if scaled is None:
        return None
    x, by = scaled
    return x, max(abs(end) if name == "mul" else 1 / (abs(end) or 1.0) for end in ends_of(program, by) or (1.0,))


def _scaled(program: Program, name: str, call: Arguments) -> tuple[fx.Node, object] | None:
    """What a call multiplies or divides, and the constant that it does so by."""
    if name not in SCALES or call.get("rounding_mode") is not None:
        return None
    operands = [(call["self"], call["other"])] + ([(call["other"], call["self"])] if name == "mul" else [])
    found = [(x, by) for x, by in operands if _is_computed(program, x) and ends_of(program, by) is not None]
    return found[0] if found else None


def _scales_exactly(program: Program, node: fx.Node) -> bool:
    scaled = _scaled(program, base_name(node), bind(node))
    if scaled is None:
        return False
    known: Any = constant_of(program, scaled[1]) if isinstance(scaled[1], fx.Node) else scaled[1]
    return is_power_of_two(known)


def _is_computed(program: Program, value: object) -> bool:
    return isinstance(value, fx.Node) and constant_of(program, value) is None


def _term(program: Program, x: fx.Node) -> float:
    """The largest constant that a sum adds; 0 for anything else."""
    if base_name(x) not in SUMS:
        return 0.0
    ends = [abs(factor * end) for factor, term in terms_of(program, x) for end in ends_of(program, term) or ()]
    return max(ends, default=0.0)


def _depends_on_inputs(x: fx.Node) -> bool:
    """Whether a value differs from call to call: stored weights are unpacked by sums and products, too."""
    seen: set[fx.Node] = set()
    pending = [x]
    while pending:
        node = pending.pop()
        if node.op == "placeholder":
            return True
        if node not in seen:
            seen.add(node)
            pending += node.all_input_nodes
    return False
