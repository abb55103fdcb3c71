"""Linear layers with int8 or int4 weights, whose inputs stay float32 in the program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.origin import origin_of
from tsopt.compiler.graph.program import Numerics, Program
from tsopt.compiler.graph.quantized import LARGEST, erase_dead, quantize_weight, rewire
from tsopt.compiler.graph.weight_groups import Rounded, quantize_weight_by_groups
from tsopt.compiler.precision_names import INT4, INT8_WEIGHTS
from tsopt.compiler.rewriting.pass_base import Changes, Done, Limits, Pass
from tsopt.passes.quantize.layers import layers_of, multiplications

INT4_GROUP = 32  # neighbours that share a scale in 4 bits
LARGER_GROUPS = (128, 64)  # a product with them takes less time, and loses more
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


@dataclass(frozen=True, slots=True)
class Int4Weights(Pass):
    """Linear layers of float32 with weights in 4 bits, the others in 8 bits. LOSSY.

    Weights in 4 bits have a scale and a zero point for each group of neighbours in a row, and engines round the inputs
    in the same groups. Weights in 8 bits are as in `Int8Weights`.

    Attributes:
        only: the names of the layers to quantize; None for all.
        wider: the names of those among them that have 8 bits.
        group: how many neighbours share a scale. Layers whose rows it does not divide have 8 bits.
        rounded: weights that were rounded before.
    """

    name = INT4
    numerics: ClassVar[Numerics] = Numerics.LOSSY
    only: frozenset[str] | None = None
    wider: frozenset[str] = frozenset()
    group: int = INT4_GROUP
    rounded: Rounded = field(default_factory=Rounded, compare=False)

    def run(self, program: Program, limits: Limits) -> Changes:
        narrow: dict[str, fx.Node] = {}
        wide: dict[str, fx.Node] = {}
        done = []
        for layer in linear_layers(layers_of(program)):
            if (self.only is not None and layer.name not in self.only) or not limits.take():
                continue
            x = ops.bind(layer)["input"]
            if layer.name in self.wider or not is_divisible(program, layer, self.group):
                rewire(layer, x, quantize_weight(program, layer, LARGEST, wide))
            else:
                rewire(layer, x, quantize_weight_by_groups(program, layer, self.group, narrow, self.rounded))
            done.append(Done("quantize_layer", origin_of(layer)))
        if done:
            erase_dead(program)
        return Changes(tuple(done), numerics=Numerics.LOSSY if done else Numerics.EXACT)


def is_divisible(program: Program, layer: fx.Node, group: int = INT4_GROUP) -> bool:
    """Whether the rows of a linear layer's weight can be split into groups."""
    return program.weights[str(ops.bind(layer)["weight"].target)].shape[1] % group == 0


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
