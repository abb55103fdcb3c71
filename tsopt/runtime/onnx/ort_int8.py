"""Quantized linear layers as ONNX Runtime's own operators for integer products.

As QuantizeLinear and DequantizeLinear around a product with a bias, they would run in float32: the runtime makes a Gemm
of product and bias, and fuses the integers of one only where its result is quantized too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx

from tsopt.compiler.graph.edit import fresh_name
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.quantized import GROUP, QuantizedLayer, erase_dead, quantized_layers
from tsopt.runtime.onnx.ort_kernels import operator_call

IN_INTEGERS = 4  # accuracy level of MatMulNBits: it rounds the input to int8, a scale for each group
ZERO = 128  # of its unsigned weights


def with_integer_products(program: Program) -> Program:
    """A copy with the runtime's operators for quantized linear layers. Only for the exporter.

    Layers that find the scale of their whole input in each call stay as they are.
    """
    made = program.copy()
    for layer in quantized_layers(made):
        if layer.node.target is not aten.linear.default or (layer.by is None and not layer.has_float_input):
            continue
        lower = _product if not layer.has_float_input else _by_groups if layer.group is None else _in_four_bits
        _replace(made, layer, lower(made, layer))
    erase_dead(made)
    return made


def with_products_in_four_bits(program: Program) -> Program:
    """A copy with the runtime's operator only for layers with 4-bit weights: OpenVINO reads it as well.

    ONNX has no other form of theirs that both the exporter writes and OpenVINO runs without unpacking the weights.
    """
    made = program.copy()
    for layer in quantized_layers(made):
        if layer.group is not None:
            _replace(made, layer, _in_four_bits(made, layer))
    erase_dead(made)
    return made


def _replace(program: Program, layer: QuantizedLayer, result: fx.Node) -> None:
    result.meta = dict(layer.node.meta)
    layer.node.replace_all_uses_with(result)
    program.graph.erase_node(layer.node)


def _by_groups(program: Program, layer: QuantizedLayer) -> fx.Node:
    """A product with groups of GROUP weights, of which those in a row have the same scale."""
    weight, scales = (program.weights[name].detach() for name in (layer.weight, layer.scales))
    rows, size = weight.shape
    count = -(-size // GROUP)
    groups = (F.pad(weight, (0, count * GROUP - size)).int() + ZERO).to(torch.uint8).view(rows, count, GROUP)
    return _by_bits(program, layer, groups, scales.repeat_interleave(count), None, 8)


def _in_four_bits(program: Program, layer: QuantizedLayer) -> fx.Node:
    """The same in 4 bits: a byte holds two integers, or two zero points, the first one in its lower half."""
    integers, scales, zeros = (program.weights[name].detach() for name in (layer.weight, layer.scales, layer.zeros))
    groups = _paired(integers).unflatten(1, (scales.shape[1], -1))
    return _by_bits(program, layer, groups, scales.flatten(), _paired(zeros.to(torch.uint8)).flatten(), 4)


def _paired(integers: torch.Tensor) -> torch.Tensor:
    """Packs two neighbours of a row into each byte; a row of odd length is padded with a zero."""
    even = F.pad(integers, (0, integers.shape[1] % 2))
    return even[:, ::2] | (even[:, 1::2] << 4)


def _by_bits(
    program: Program,
    layer: QuantizedLayer,
    groups: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bits: int,
) -> fx.Node:
    nothing = [None] if layer.bias is not None else []  # order of columns
    inputs = [
        layer.x,
        _held(program, layer, "groups", groups.contiguous()),
        _held(program, layer, "group_scales", scales.contiguous()),
        *(nothing if zeros is None else [_held(program, layer, "group_zeros", zeros)]),  # by default all ZERO
        *nothing,
        *([] if layer.bias is None else [layer.bias]),
    ]
    rows, size = program.weights[layer.weight].shape
    attributes = {"K": size, "N": rows, "bits": bits, "block_size": layer.group or GROUP}
    attributes["accuracy_level"] = IN_INTEGERS
    return operator_call(program, layer.node, "com.microsoft::MatMulNBits", inputs, _shape(layer), **attributes)


def _product(program: Program, layer: QuantizedLayer) -> fx.Node:
    assert layer.by is not None
    weight, scales = (program.weights[name].detach() for name in (layer.weight, layer.scales))
    integers = layer.dequantized.args[0]
    inputs = [
        integers,
        _held(program, layer, "columns", weight.t().contiguous()),
        _held(program, layer, "input_scale", torch.tensor(layer.by.scale, device="cpu")),
        _held(program, layer, "output_scales", scales.contiguous()),
        _held(program, layer, "input_zero", torch.tensor(layer.by.zero, dtype=torch.uint8, device="cpu")),
        None,  # zero points of the weight: all 0
        *([] if layer.bias is None else [layer.bias]),
    ]
    return operator_call(program, layer.node, "com.microsoft::MatMulIntegerToFloat", inputs, _shape(layer))


def _held(program: Program, layer: QuantizedLayer, name: str, value: torch.Tensor) -> fx.Node:
    name = fresh_name(f"{layer.weight}.{name}", program.weights)
    program.weights[name] = value
    with program.graph.inserting_before(layer.node):
        made = program.graph.create_node("get_attr", name)
    made.meta = {"val": value}
    return made


def _shape(layer: QuantizedLayer) -> list[int]:
    return list(layer.node.meta["val"].shape)
