"""The quantization of a program simulated in float32 (fake quantization), which torch runs several times as fast."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.edit import fresh_name, new_call, new_weight
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.quantized import (
    GROUP,
    SMALLEST,
    QuantizedLayer,
    calibrated_input,
    erase_dead,
    float_weight,
    quantized_layers,
)


def simulated(program: Program) -> Program:
    """A copy that simulates the quantization in float32 (fake quantization), which torch runs several times as fast.

    Weights are stored dequantized; quantizing and dequantizing a value is one call. Inputs that engines would round
    themselves are rounded too.
    """
    made = program.copy()
    weights, rounded = dict[Any, QuantizedLayer](), dict[tuple[fx.Node, int], fx.Node]()
    for layer in quantized_layers(made):
        weights[ops.bind(layer.node)["weight"]] = layer
        if layer.has_float_input:
            call, group = partial(_call_before, made, layer.node), layer.group or GROUP
            if (layer.x, group) not in rounded:
                size = int(layer.x.meta["val"].shape[-1])
                rounded[layer.x, group] = rounded_by_group(layer.x, size, call, group)
            layer.node.replace_input_with(layer.x, rounded[layer.x, group])
    for node in list(made.calls()):
        found = calibrated_input(node)
        if found is not None:
            x, by = found
            near: Any = aten.fake_quantize_per_tensor_affine.default
            fake = new_call(made, node, node, near, (x, by.scale, by.zero, *by.integers[:2]), {})
            node.replace_all_uses_with(fake)
        elif node in weights:
            name = fresh_name(f"{weights[node].weight}.float", made.weights)
            node.replace_all_uses_with(new_weight(made, node, name, float_weight(made, weights[node])))
    erase_dead(made)
    return made


def rounded_by_group(x: Any, size: int, call: Callable[..., Any], group: int = GROUP) -> Any:
    """What is left of a value when neighbours in a row are rounded together, to multiples of a 127th of the largest.

    This is what ONNX Runtime and OpenVINO do to the input of a linear layer with an int8 or int4 weight.

    Args:
        size: of the last axis; the others may have any.
        call: makes or computes a call of an op.
        group: how many are rounded together.
    """
    count = -(-size // group)
    padded = call(aten.constant_pad_nd.default, x, [0, count * group - size]) if size % group else x
    groups = call(aten.unflatten.int, padded, -1, [count, group])
    largest = call(aten.amax.default, call(aten.abs.default, groups), [-1], True)
    steps = call(aten.clamp.default, call(aten.div.Tensor, largest, 127.0), SMALLEST)
    near = call(aten.mul.Tensor, call(aten.round.default, call(aten.div.Tensor, groups, steps)), steps)
    joined = call(aten.flatten.using_ints, near, -2, -1)
    return call(aten.slice.Tensor, joined, -1, 0, size) if size % group else joined


def _call_before(program: Program, place: fx.Node, target: Any, *args: Any) -> fx.Node:
    return new_call(program, place, place, target, args, {})
