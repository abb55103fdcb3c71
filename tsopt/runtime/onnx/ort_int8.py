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
        result = _by_groups(made, layer) if layer.has_float_input else _product(made, layer)
        result.meta = dict(layer.node.meta)
        layer.node.replace_all_uses_with(result)
        made.graph.erase_node(layer.node)
    erase_dead(made)
    return made


def _by_groups(program: Program, layer: QuantizedLayer) -> fx.Node:
    """A product with groups of GROUP weights, of which those in a row have the same scale."""
    weight, scales = (program.weights[name].detach() for name in (layer.weight, layer.scales))
    rows, size = weight.shape
    count = -(-size // GROUP)
    groups = (F.pad(weight, (0, count * GROUP - size)).int() + ZERO).to(torch.uint8).view(rows, count, GROUP)
    nothing = [None, None] if layer.bias is not None else []  # zero points, for they are all ZERO; order of columns
    inputs = [
        layer.x,
        _held(program, layer, "groups", groups),
        _held(program, layer, "group_scales", scales.repeat_interleave(count)),
        *nothing,
        *([] if layer.bias is None else [layer.bias]),
    ]
    attributes = {"K": size, "N": rows, "bits": 8, "block_size": GROUP, "accuracy_level": IN_INTEGERS}
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
