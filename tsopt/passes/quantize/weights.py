"""Linear layers with int8 weights, whose inputs stay float32 in the program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.origin import origin_of
from tsopt.compiler.graph.program import Numerics, Program
from tsopt.compiler.graph.quantized import LARGEST, erase_dead, quantize_weight, rewire
from tsopt.compiler.precision_names import INT8_WEIGHTS
from tsopt.compiler.rewriting.pass_base import Changes, Done, Limits, Pass
from tsopt.passes.quantize.layers import layers_of, multiplications

WORTHWHILE = 0.1  # share of the linear layers in the multiplications or in the weights of all layers


@dataclass(frozen=True, slots=True)
class Int8Weights(Pass):
    """Linear layers of float32 with weights in int8. LOSSY.

    Weights are symmetric and have a scale for each output. ONNX Runtime and OpenVINO round the inputs as well, with a
    scale for each group of 128 elements in a row, so that an outlier costs only its neighbours.

    Attributes:
        only: the names of the layers to quantize; None for all.
    """

    name = INT8_WEIGHTS
    numerics: ClassVar[Numerics] = Numerics.LOSSY
    only: frozenset[str] | None = None

    def run(self, program: Program, limits: Limits) -> Changes:
        weights: dict[str, fx.Node] = {}
        done = []
        for layer in linear_layers(layers_of(program)):
            if (self.only is not None and layer.name not in self.only) or not limits.take():
                continue
            rewire(layer, ops.bind(layer)["input"], quantize_weight(program, layer, LARGEST, weights))
            done.append(Done("quantize_layer", origin_of(layer)))
        if done:
            erase_dead(program)
        return Changes(tuple(done), numerics=Numerics.LOSSY if done else Numerics.EXACT)


def linear_layers(layers: Sequence[fx.Node]) -> list[fx.Node]:
    """The linear layers among these."""
    return [layer for layer in layers if layer.target is aten.linear.default]


def share_of_linear(program: Program, layers: Sequence[fx.Node]) -> float:
    """The share of linear layers in the multiplications of all layers, or in their weights, whichever is larger."""
    linear = linear_layers(layers)
    if not linear:
        return 0.0
    sizes = {layer: program.weights[str(ops.bind(layer)["weight"].target)].numel() for layer in layers}
    used = {layer: multiplications(program, layer) for layer in layers}
    return max(sum(map(costs.__getitem__, linear)) / sum(costs.values()) for costs in (sizes, used))
