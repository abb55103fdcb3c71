"""Which values calibration says nothing about, because an input was always the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from tsopt.compiler.analysis.non_finite import ATTENTION, BOUNDED, is_bounded
from tsopt.compiler.analysis.ranged_call import base_name
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.program import Program
from tsopt.passes.quantize.observe import Observed

# Whatever they are given, their results are within a range that other inputs show as well.
GATED = {"lstm", "rnn_tanh"}  # but not the third result of an LSTM, its cell state
SAMPLING = {"grid_sampler", "grid_sampler_2d", "grid_sampler_3d"}  # at coordinates, which choose between values
WITHIN = BOUNDED | {"softmax", "_softmax", "cos", "sin", "layer_norm", "rms_norm", "group_norm", "instance_norm"}


def float_inputs(program: Program) -> list[fx.Node]:
    """The inputs of a program that are floats of more than a byte: torch finds no range of others."""
    inputs = [node for node in program.graph.nodes if node.op == "placeholder"]
    dtypes = {node: node.meta["val"].dtype for node in inputs}
    return [node for node, dtype in dtypes.items() if dtype.is_floating_point and dtype.itemsize > 1]


def unseen_values(program: Program, values: Iterable[fx.Node], observed: Mapping[str, Observed]) -> dict[str, str]:
    """Why the range of some of these values is not known, by their names.

    A value that was always the same has no range. Nor has a value that depends on an input which was always zero: its
    range lacks what that input contributes. Other constant inputs are part of the ranges.

    Args:
        observed: of these values, and of the inputs.
    """
    found = {}
    added = _depending_on([node for node in float_inputs(program) if _is_zero(observed[node.name])], program)
    for value in values:
        seen = observed[value.name]
        if not seen.is_finite:
            continue
        if seen.is_constant:
            same = "zero" if _is_zero(seen) else f"{seen.low:.6g}"
            found[value.name] = f"its input was always {same} in the calibration data"
        elif value in added:
            unknown = f"it depends on {added[value]}, which was always zero in the calibration data"
            found[value.name] = f"{unknown} (add inputs where it is not)"
    return found


def _is_zero(seen: Observed) -> bool:
    return seen.low == seen.high == 0


def _depending_on(inputs: Iterable[fx.Node], program: Program) -> dict[fx.Node, str]:
    """The values whose range depends on one of these inputs, each with the name of that input."""
    places = [node for node in program.graph.nodes if node.op == "placeholder"]
    names = {node: item.name for node, item in zip(places, program.signature.inputs, strict=True)}
    found = {node: names[node] for node in inputs}
    for node in program.calls() if found else ():
        on = next((found[operand] for operand in _ranging(program, node) if operand in found), None)
        if on is not None:
            found[node] = on
    return found


def _ranging(program: Program, node: fx.Node) -> list[fx.Node]:
    """The operands that the range of a result depends on."""
    name = base_name(node)
    if name in WITHIN or not _is_real(node) or is_bounded(program, node):
        return []
    source = node.args[0] if name == "getitem" else None
    if isinstance(source, fx.Node) and base_name(source) in GATED and node.args[1] in (0, 1):
        return []
    if name == ATTENTION or name in SAMPLING:
        return [ops.bind(node)["value" if name == ATTENTION else "input"]]
    return list(node.all_input_nodes)


def _is_real(node: fx.Node) -> bool:
    return any(value.is_floating_point() or value.is_complex() for value in ops.tensors_of(node.meta.get("val")))
