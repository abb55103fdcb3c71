"""Static int8 quantization: activation scales and zero points come from calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.edit import fresh_name, new_weight
from tsopt.compiler.graph.origin import origin_of
from tsopt.compiler.graph.program import Numerics, Program
from tsopt.compiler.graph.quantized import LARGEST, QParams, erase_dead, quantize_value, quantize_weight, rewire
from tsopt.compiler.precision_names import INT8_STATIC
from tsopt.compiler.rewriting.pass_base import Changes, Done, Limits, Pass
from tsopt.passes.quantize.layers import layers_of, readers_of_integers


@dataclass(frozen=True, slots=True, eq=False)
class StaticInt8(Pass):
    """Linear layers and convolutions of float32 with constant weights, on 8-bit integers. LOSSY.

    Weights are symmetric and have a scale for each output; activations are unsigned, with one scale and one zero point
    for the whole tensor, the same in every call. A layer with an input whose parameters are not known stays as it is.

    Attributes:
        qparams: of values, by the names of their nodes.
        shifts: what is added to the result of a layer, float32, [out], by its name: the mean error of its integers.
        only: the names of the layers to quantize; None for all.
        in_float: the names of layers that read floats, which may have been rounded further ahead; other layers that
            are not quantized may read what was rounded for their neighbours.
        largest: the largest magnitude of a weight; see `largest_weight`.
    """

    name = INT8_STATIC
    numerics: ClassVar[Numerics] = Numerics.LOSSY
    qparams: Mapping[str, QParams]
    shifts: Mapping[str, torch.Tensor] = field(default_factory=dict)
    only: frozenset[str] | None = None
    in_float: frozenset[str] = frozenset()
    largest: int = LARGEST

    def run(self, program: Program, limits: Limits) -> Changes:
        known = layers_of(program)
        layers = [layer for layer in known if self._is_chosen(layer) and limits.take()]
        in_float = [layer for layer in known if layer.name in self.in_float]
        if not layers:
            return Changes()
        for value, users in readers_of_integers(layers, in_float).items():
            by = self.qparams.get(value.name)
            if by is None:
                continue
            integers = quantize_value(program, value, by)
            for user in users:
                user.replace_input_with(value, integers)
        weights: dict[str, fx.Node] = {}
        done = []
        for layer in layers:
            rewire(layer, ops.bind(layer)["input"], quantize_weight(program, layer, self.largest, weights))
            self._shift(program, layer)
            done.append(Done("quantize_layer", origin_of(layer)))
        erase_dead(program)
        return Changes(tuple(done), numerics=Numerics.LOSSY)

    def _is_chosen(self, layer: fx.Node) -> bool:
        wanted = self.only is None or layer.name in self.only
        return wanted and ops.bind(layer)["input"].name in self.qparams

    def _shift(self, program: Program, layer: fx.Node) -> None:
        """Applies the bias correction to a layer, unless its bias is computed."""
        shift, call = self.shifts.get(layer.name), ops.bind(layer)
        bias = call["bias"]
        if shift is None or (bias is not None and bias.op != "get_attr"):
            return
        value = shift if bias is None else program.weights[str(bias.target)].detach() + shift
        name = fresh_name(f"{layer.name}.bias.int8" if bias is None else f"{bias.target}.int8", program.weights)
        first, weight, _, *others = call.values()
        layer.args = (first, weight, new_weight(program, layer, name, value), *others)
