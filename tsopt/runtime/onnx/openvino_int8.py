"""Rewrites quantized convolutions so that OpenVINO can fuse the activation that follows.

ONNX Runtime computes a convolution on integers only where its result is quantized at once. OpenVINO applies most
activations inside of the convolution, but not behind integers that lie between the two: 1.2 times the speed on
EfficientNet, and less rounding.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.quantized import CONVOLUTIONS, calibrated_input, erase_dead, quantized_layer

FUSED = (
    *(aten.silu.default, aten.hardswish.default, aten.sigmoid.default, aten.hardsigmoid.default),
    *(aten.gelu.default, aten.tanh.default, aten.elu.default, aten.leaky_relu.default, aten.mish.default),
)


def with_fused_activations(program: Program) -> Program:
    """A copy in which an activation reads a convolution's float result, if it is the only user of that result."""
    made = program.copy()
    for node in list(made.calls()):
        if node.target in FUSED:
            _read_in_float(made, node)
    erase_dead(made)
    return made


def _read_in_float(program: Program, activation: fx.Node) -> None:
    dequantized: Any = activation.args[0]
    found = calibrated_input(dequantized)
    if found is None or len(dequantized.users) > 1:
        return
    x, _ = found
    if len(x.users) == 1 and x.target in CONVOLUTIONS and quantized_layer(program, x) is not None:
        activation.replace_input_with(dequantized, x)
