"""Sums with large constants, kept apart from the factors after them.

OpenVINO makes `x * c + b * c` of `(x + b) * c`: where b is much larger than what is left of it, as in
`(pressure - 101325) / 30`, the last digits are lost.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tsopt.compiler.analysis.jumps import is_power_of_two
from tsopt.compiler.analysis.large_terms import SUMS, constant_of, ends_of, terms_of
from tsopt.compiler.analysis.non_finite import PASSING
from tsopt.compiler.analysis.ranged_call import base_name
from tsopt.compiler.graph.control import Control, with_blocks
from tsopt.compiler.graph.edit import new_call
from tsopt.compiler.graph.ops import aten, bind
from tsopt.compiler.graph.program import Program

LARGE = 16.0  # a term, or what becomes of it, that would cost more than the last bits of numbers around 1
SCALES = frozenset({"mul", "div", "divide", "true_divide"})


def with_sums_apart(program: Program) -> Program:
    """A copy in which an op comes between the sum with a large constant and the factor after it.

    That op does nothing: a leaky ReLU of slope 1.
    """
    made = program.copy()
    for node in list(made.graph.nodes):
        if isinstance(node.target, Control):
            node.target = with_blocks(node.target, with_sums_apart)
        elif base_name(node) in SCALES and (x := _loses_digits(made, node)) is not None:
            node.replace_input_with(x, new_call(made, node, x, aten.leaky_relu.default, (x, 1.0), {}))
    return made


def _loses_digits(program: Program, node: fx.Node) -> fx.Node | None:
    """The operand of a product with a constant which is a sum that would lose digits if it were multiplied out."""
    call, value = bind(node), node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or call.get("rounding_mode") is not None:
        return None
    operands = [(call["self"], call["other"])] + ([(call["other"], call["self"])] if base_name(node) == "mul" else [])
    for x, factor in operands:
        ends = ends_of(program, factor)
        if not isinstance(x, fx.Node) or ends is None:
            continue
        known: Any = constant_of(program, factor) if isinstance(factor, fx.Node) else factor
        sizes = [abs(end) if base_name(node) == "mul" else 1 / (abs(end) or 1.0) for end in ends]
        if not is_power_of_two(known) and _term(program, x) * max(1.0, *sizes) >= LARGE:
            return x
    return None


def _term(program: Program, x: fx.Node) -> float:
    """The largest constant that a sum adds to a computed value; 0 for anything else."""
    while (base_name(x) in PASSING or base_name(x) == "neg") and len(x.all_input_nodes) == 1:
        x = x.all_input_nodes[0]
    if base_name(x) not in SUMS or not _depends_on_inputs(x):
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
