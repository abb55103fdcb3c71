"""Quantized linear layers as ONNX Runtime's own operator for integer products.

As QuantizeLinear and DequantizeLinear around a product with a bias, they would run in float32: the runtime makes a Gemm
of product and bias, and fuses the integers of one only where its result is quantized too.
"""

from __future__ import annotations

import torch
from torch import fx

from tsopt.compiler.graph.edit import fresh_name
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.quantized import QuantizedLayer, erase_dead, quantized_layer
from tsopt.runtime.onnx.ort_kernels import operator_call


def with_integer_products(program: Program) -> Program:
    """A copy with the runtime's operator for each statically quantized linear layer. Only for the exporter."""
    made = program.copy()
    for node in list(made.graph.nodes):
        layer = quantized_layer(made, node) if node.target is aten.linear.default else None
        if layer is not None and layer.by is not None:
            result = _product(made, node, layer)
            result.meta = dict(node.meta)
            node.replace_all_uses_with(result)
            made.graph.erase_node(node)
    erase_dead(made)
    return made


def _product(program: Program, node: fx.Node, layer: QuantizedLayer) -> fx.Node:
    assert layer.by is not None
    weight, scales = (program.weights[name].detach() for name in (layer.weight, layer.scales))

    def held(name: str, value: torch.Tensor) -> fx.Node:
        name = fresh_name(f"{layer.weight}.{name}", program.weights)
        program.weights[name] = value
        with program.graph.inserting_before(node):
            made = program.graph.create_node("get_attr", name)
        made.meta = {"val": value}
        return made

    integers = layer.dequantized.args[0]
    inputs = [
        integers,
        held("columns", weight.t().contiguous()),
        held("input_scale", torch.tensor(layer.by.scale)),
        held("output_scales", scales.contiguous()),
        held("input_zero", torch.tensor(layer.by.zero, dtype=torch.uint8)),
        None,  # zero points of the weight: all 0
        *([] if layer.bias is None else [layer.bias]),
    ]
    shape = list(node.meta["val"].shape)
    return operator_call(program, node, "com.microsoft::MatMulIntegerToFloat", inputs, shape)
