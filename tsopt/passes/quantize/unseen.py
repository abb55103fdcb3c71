"""Which values calibration says nothing about, because an input was always the same."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx

from tsopt.compiler.analysis.intervals import ANY, FLAG, Range, range_of_tensor
from tsopt.compiler.analysis.jumps import MIXING
from tsopt.compiler.analysis.non_finite import ATTENTION, bounds
from tsopt.compiler.analysis.ranged_call import RangedCall, Ranges, base_name
from tsopt.compiler.analysis.ranges import range_of, recorded
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.program import Program
from tsopt.passes.quantize.observe import Observed

# Whatever they are given, their results are within a range that other inputs show as well.
WITHIN = {"softmax", "_softmax", "layer_norm", "rms_norm", "group_norm", "instance_norm"}
AROUND_ZERO = Range(-1, 1)
# Whatever they are given, their results are within these bounds, but one input need not show all of that.
BOUNDS = {
    **dict.fromkeys(("sigmoid", "hardsigmoid"), FLAG),
    **dict.fromkeys(("tanh", "erf", "sin", "cos"), AROUND_ZERO),
    "atan": Range(-math.pi / 2, math.pi / 2),
    "relu6": Range(0, 6),
}
GATED = {"lstm", "rnn_tanh"}  # but not the third result of an LSTM, its cell state
SAMPLING = {"grid_sampler", "grid_sampler_2d", "grid_sampler_3d"}
BICUBIC = 2  # interpolation that goes beyond the values that it is between


def float_inputs(program: Program) -> list[fx.Node]:
    """The inputs of a program that are floats of more than a byte: torch finds no range of others."""
    inputs = [node for node in program.graph.nodes if node.op == "placeholder"]
    dtypes = {node: node.meta["val"].dtype for node in inputs}
    return [node for node, dtype in dtypes.items() if dtype.is_floating_point and dtype.itemsize > 1]


def unseen_values(program: Program, values: Iterable[fx.Node], observed: Mapping[str, Observed]) -> dict[str, str]:
    """Why the range of some of these values is not known, by their names.

    A value that was always the same has no range. Nor has a value that depends on an input which was always zero: its
    range lacks what that input contributes. Where such a value is bounded all the same, as a gate is, its range is
    widened to these bounds. Other constant inputs are part of the ranges.

    Args:
        observed: of these values, and of the inputs.
    """
    found = {}
    silent = [node for node in float_inputs(program) if _is_zero(observed[node.name])]
    added, ranges = _depending_on(silent, program, observed)
    for value in values:
        seen = observed[value.name]
        if not seen.is_finite:
            continue
        if seen.is_constant:
            same = "zero" if _is_zero(seen) else f"{seen.low:.6g}"
            found[value.name] = f"its input was always {same} in the calibration data"
        elif value in added and _is_known(ranges.get(value, ANY)):
            seen.cover(ranges[value].low, ranges[value].high)
        elif value in added:
            unknown = f"it depends on {added[value]}, which was always zero in the calibration data"
            found[value.name] = f"{unknown} (add inputs where it is not)"
    return found


def _is_zero(seen: Observed) -> bool:
    return seen.low == seen.high == 0


def _is_known(found: Range) -> bool:
    return math.isfinite(found.low) and math.isfinite(found.high)


def _depending_on(
    inputs: Sequence[fx.Node], program: Program, observed: Mapping[str, Observed]
) -> tuple[dict[fx.Node, str], Ranges]:
    """The values whose range depends on one of these inputs, each with the name of that input; and all ranges.

    A sum of many products does not depend on them any more where what it reads is within bounds: its own bounds are
    never met, and what other inputs show of it is about as large.
    """
    places = [node for node in program.graph.nodes if node.op == "placeholder"]
    names = {node: item.name for node, item in zip(places, program.signature.inputs, strict=True)}
    added, ranges = {node: names[node] for node in inputs}, Ranges()
    values = recorded(program) if added else {}
    for node in program.graph.nodes if added else ():
        if ops.is_call(node):
            on = [operand for operand in _ranging(node) if operand in added]
            is_bounded = base_name(node) in MIXING and all(_is_known(ranges.get(operand, ANY)) for operand in on)
            if on and not is_bounded:
                added[node] = added[on[0]]
        seen = observed.get(node.name)
        if node not in added and seen is not None and seen.is_finite:
            ranges[node] = Range(seen.low, seen.high)
        elif node.op == "placeholder":
            ranges[node] = ANY
        elif node.op == "get_attr" and str(node.target) in program.weights:
            ranges[node] = range_of_tensor(program.weights[str(node.target)])
        elif ops.is_call(node) and isinstance(values.get(node), torch.Tensor):
            ranges[node] = _bounds_of(node, ranges) or range_of(RangedCall(node, values, ranges))
    return added, ranges


def _ranging(node: fx.Node) -> list[fx.Node]:
    """The operands that the range of a result depends on."""
    name = base_name(node)
    if name in WITHIN or not _is_real(node):
        return []
    return [ops.bind(node)["value"]] if name == ATTENTION else list(node.all_input_nodes)


def _is_real(node: fx.Node) -> bool:
    return any(value.is_floating_point() or value.is_complex() for value in ops.tensors_of(node.meta.get("val")))


def _bounds_of(node: fx.Node, found: Ranges) -> Range | None:
    """Those of a call whose results are within bounds, if it is one."""
    name, ends = base_name(node), bounds(node)
    if all(isinstance(end, (int, float)) for end in ends) and ends:
        return Range(*ends)
    source = node.args[0] if name == "getitem" else None
    if isinstance(source, fx.Node) and base_name(source) in GATED and node.args[1] in (0, 1):
        return None if _is_projected(source) else AROUND_ZERO
    if name in SAMPLING and ops.bind(node)["interpolation_mode"] != BICUBIC:
        return found.get(ops.bind(node)["input"], ANY) | Range(0, 0)
    return BOUNDS.get(name)


def _is_projected(node: fx.Node) -> bool:
    """Whether the outputs of an LSTM are not those of its gates, but a product of these with a matrix."""
    if base_name(node) != "lstm":
        return False
    hidden, cell = ops.bind(node)["hx"]
    return bool(hidden.meta["val"].shape[-1] != cell.meta["val"].shape[-1])
