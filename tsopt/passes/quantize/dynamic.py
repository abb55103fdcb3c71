"""Linear layers and convolutions on 8-bit integers, with scales of the activations that each call computes itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.origin import origin_of
from tsopt.compiler.graph.program import Numerics, Program
from tsopt.compiler.graph.quantized import LARGEST, erase_dead, quantize_input, quantize_weight, rewire
from tsopt.compiler.precision_names import INT8
from tsopt.compiler.rewriting.pass_base import Changes, Done, Limits, Pass
from tsopt.passes.quantize.layers import fits_in_sums, layers_of


@dataclass(frozen=True, slots=True)
class DynamicInt8(Pass):
    """Linear layers and convolutions of float32 with constant weights, on 8-bit integers. LOSSY.

    Weights are symmetric and have a scale for each output; activations are unsigned, with one scale and one zero point
    for the whole tensor. A layer whose sums might not fit in 32 bits stays as it is.

    Attributes:
        only: the names of the layers to quantize; None for all.
        largest: the largest magnitude of a weight; see `largest_weight`.
    """

    name = INT8
    numerics: ClassVar[Numerics] = Numerics.LOSSY
    largest: int = LARGEST
    only: frozenset[str] | None = None

    def run(self, program: Program, limits: Limits) -> Changes:
        values: dict[fx.Node, fx.Node] = {}  # what is quantized once for all layers that read it
        weights: dict[str, fx.Node] = {}
        done = []
        for node in layers_of(program):
            is_chosen = self.only is None or node.name in self.only
            if not is_chosen or not fits_in_sums(program, node, self.largest) or not limits.take():
                continue
            done.append(Done("quantize_layer", origin_of(node)))
            x = ops.bind(node)["input"]
            if x not in values:
                values[x] = quantize_input(program, node, x)
            rewire(node, values[x], quantize_weight(program, node, self.largest, weights))
        if done:
            erase_dead(program)
        return Changes(tuple(done), numerics=Numerics.LOSSY if done else Numerics.EXACT)
