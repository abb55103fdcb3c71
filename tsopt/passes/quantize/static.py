"""Static int8 quantization: activation scales and zero points come from calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import fx

from tsopt.compiler.analysis.integer_sums import least_scales
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.edit import fresh_name, new_weight
from tsopt.compiler.graph.origin import origin_of
from tsopt.compiler.graph.program import Numerics, Program
from tsopt.compiler.graph.quantized import (
    CONVOLUTIONS,
    LARGEST,
    QParams,
    erase_dead,
    quantize_value,
    quantize_weight,
    rewire,
)
from tsopt.compiler.precision_names import INT8_STATIC
from tsopt.compiler.rewriting.pass_base import Changes, Done, Limits, Pass
from tsopt.passes.quantize.layers import fits_in_sums, layers_of, readers_of_integers


@dataclass(frozen=True, slots=True, eq=False)
class StaticInt8(Pass):
    """Linear layers and convolutions of float32 with constant weights, on 8-bit integers. LOSSY.

    Weights are symmetric and have a scale for each output; activations are unsigned, with one scale and one zero point
    for the whole tensor, the same in every call. A layer with an input whose parameters are not known stays as it is,
    and so does one whose sums might not fit in 32 bits.

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
        layers = [layer for layer in known if self._is_chosen(program, layer) and limits.take()]
        in_float = [layer for layer in known if layer.name in self.in_float]
        if not layers:
            return Changes()
        least = self._least_scales(program, layers)
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
            held = quantize_weight(program, layer, self.largest, weights, least.get(_weight_of(layer)))
            rewire(layer, ops.bind(layer)["input"], held)
            self._shift(program, layer)
            done.append(Done("quantize_layer", origin_of(layer)))
        erase_dead(program)
        return Changes(tuple(done), numerics=Numerics.LOSSY)

    def _is_chosen(self, program: Program, layer: fx.Node) -> bool:
        wanted = self.only is None or layer.name in self.only
        return wanted and ops.bind(layer)["input"].name in self.qparams and fits_in_sums(program, layer, self.largest)

    def _least_scales(self, program: Program, layers: Sequence[fx.Node]) -> dict[str, torch.Tensor]:
        """The smallest scales of the weights of convolutions, by their names: an output may have hardly any weights."""
        found: dict[str, torch.Tensor] = {}
        for layer in layers:
            call, name = ops.bind(layer), _weight_of(layer)
            by = self.qparams[ops.bind(layer)["input"].name]
            if layer.target not in CONVOLUTIONS or call["bias"] is None or call["bias"].op != "get_attr":
                continue
            bias = program.weights[str(call["bias"].target)].detach().abs()
            least = least_scales(bias + self.shifts.get(layer.name, bias.new_zeros(())).abs(), by.scale)
            found[name] = torch.maximum(least, found.get(name, least))
        return found

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


def _weight_of(layer: fx.Node) -> str:
    return str(ops.bind(layer)["weight"].target)
