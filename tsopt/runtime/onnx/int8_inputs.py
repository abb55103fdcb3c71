"""NaN and infinities, which engines lose where they round to 8 bits: such calls are served by torch."""

from __future__ import annotations

from tsopt.compiler.analysis.non_finite import Harm, harmful_inputs
from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.quantized import rounded_values, without_rounded_values
from tsopt.runtime.backends.eager import by_torch
from tsopt.runtime.calling.executable import Runner
from tsopt.runtime.calling.value_checks import BELOW_INFINITY, FINITE, NOT_NAN, Bound

KINDS = {Harm.NAN: NOT_NAN, Harm.POSITIVE_INFINITY: BELOW_INFINITY, Harm.NEGATIVE_INFINITY: FINITE}


def float_bounds(program: Program) -> tuple[Bound, ...]:
    """The checks of inputs from which NaN or infinities reach a value that is rounded; state is not checked."""
    harmful = harmful_inputs(program, rounded_values(program))
    inputs = [node for node in program.graph.nodes if node.op == "placeholder"]
    return tuple(
        Bound(position, kind=KINDS[harmful[node]])
        for position, (node, item) in enumerate(zip(inputs, program.signature.inputs, strict=True))
        if node in harmful and not item.state
    )


def without_rounding(program: Program) -> Runner:
    """Runs a program with torch's own kernels; of quantized layers only the weights are rounded."""
    return by_torch(without_rounded_values(program))
