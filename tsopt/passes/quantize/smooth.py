"""Takes outlier channels out of the inputs of linear layers, and puts them into the weights.

A few channels of a transformer's activations are often a hundred times as large as the others, to which a scale for the
whole tensor leaves few steps. Dividing each channel of the input by a factor, and multiplying the weight by it, changes
nothing but rounding. Method: Xiao et al., "SmoothQuant", 2022, with the exponent searched for each value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.edit import fresh_name, new_call, new_weight
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.origin import origin_of
from tsopt.compiler.graph.program import Numerics, Program
from tsopt.compiler.graph.quantized import QParams, dequantized_weight, erase_dead, quantized_weight, rewire
from tsopt.compiler.rewriting.pass_base import Changes, Done, Limits, Pass
from tsopt.passes.quantize.layers import layers_of
from tsopt.passes.quantize.observe import Call, Watched
from tsopt.passes.quantize.weights import linear_layers

EXPONENTS = (0.4, 0.55, 0.7, 0.85)  # of the input's range in a channel; the weight's has the rest
WORTHWHILE = 0.5  # of the noise that is left: 3 dB
RANGES = (1.0, 0.85, 0.7, 0.55, 0.4)  # shares of the largest range; the one that loses least is what will be chosen
MOST = 1e4  # factor
ROWS = 128  # that errors are measured on
# Norms with a weight, and a bias if any, that their factors can go into: where these are among their arguments.
NORMS = (aten.layer_norm.default, aten.rms_norm.default)
# Of x / f for a positive f, these are what they are of x, divided by f.
HOMOGENEOUS = (aten.relu.default, aten.leaky_relu.default)


@dataclass(frozen=True, slots=True, eq=False)
class Smooth(Pass):
    """Divides channels of values by factors, and multiplies the weights of the linear layers that read them. ROUNDING.

    A norm with a weight, or a linear layer with or without a ReLU, that only those layers read is divided itself;
    elsewhere the values are.

    Attributes:
        factors: float32, [in], by the name of the value.
        only: the names of the linear layers.
    """

    name = "smooth"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    factors: Mapping[str, torch.Tensor]
    only: frozenset[str]

    def run(self, program: Program, limits: Limits) -> Changes:
        done = []
        chosen = [layer for layer in layers_of(program) if layer.name in self.only]
        for value, layers in readers(chosen).items():
            factors = self.factors.get(value.name)
            if factors is None or not limits.take():
                continue
            divided = (
                _divided_norm(program, value, layers, factors)
                or _divided_layer(program, value, layers, factors)
                or _divided(program, value, layers, factors)
            )
            for layer in layers:
                weight = ops.bind(layer)["weight"]
                name = fresh_name(f"{weight.target}.smooth", program.weights)
                scaled = program.weights[str(weight.target)].detach() * factors
                rewire(layer, divided, new_weight(program, layer, name, scaled))
            done.append(Done("smooth_channels", origin_of(value)))
        if done:
            erase_dead(program)
        return Changes(tuple(done), numerics=Numerics.ROUNDING if done else Numerics.EXACT)


def readers(layers: Iterable[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """The inputs of the linear layers among these, each with the layers that read it, in graph order."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for layer in linear_layers(list(layers)):
        found.setdefault(ops.bind(layer)["input"], []).append(layer)
    return found


def _divided_norm(program: Program, value: fx.Node, layers: Sequence[fx.Node], factors: torch.Tensor) -> fx.Node | None:
    """The norm with its weight and bias divided, if that is what the value is and nothing else reads it."""
    if value.target not in NORMS or not set(value.users) <= set(layers):
        return None
    affine = _affine(program, value)
    if not affine or any(weight.shape != factors.shape for weight in affine.values()):
        return None
    _divide(program, value, {held: weight / factors for held, weight in affine.items()})
    return value


def _divided_layer(
    program: Program, value: fx.Node, layers: Sequence[fx.Node], factors: torch.Tensor
) -> fx.Node | None:
    """The value behind a linear layer whose outputs were divided, if it is one and nothing else reads these."""
    layer: fx.Node = value.all_input_nodes[0] if value.target in HOMOGENEOUS else value
    if layer.target is not aten.linear.default or not set(value.users) <= set(layers):
        return None
    if layer is not value and len(layer.users) > 1:
        return None
    affine = _affine(program, layer)
    if not affine:
        return None
    weight, *bias = affine.values()
    if weight.dim() != 2 or any(held.shape != factors.shape for held in bias):  # torch takes others, and broadcasts
        return None
    rows = [factors.reshape(-1, *[1] * (held.dim() - 1)) for held in affine.values()]
    _divide(program, layer, {node: held / by for (node, held), by in zip(affine.items(), rows, strict=True)})
    return value


def _affine(program: Program, call: fx.Node) -> dict[fx.Node, torch.Tensor]:
    """The weight and the bias, if any, of a layer or a norm; empty if it has no weight, or one of them is computed."""
    given = ops.bind(call)
    held = [given[name] for name in ("weight", "bias") if given.get(name) is not None]
    if given["weight"] is None or any(item.op != "get_attr" for item in held):
        return {}
    return {item: program.weights[str(item.target)].detach() for item in held}


def _divide(program: Program, call: fx.Node, divided: Mapping[fx.Node, torch.Tensor]) -> None:
    for held, value in divided.items():
        name = fresh_name(f"{held.target}.smooth", program.weights)
        call.replace_input_with(held, new_weight(program, call, name, value))


def _divided(program: Program, value: fx.Node, layers: Sequence[fx.Node], factors: torch.Tensor) -> fx.Node:
    name = fresh_name(f"{value.name}.smooth", program.weights)
    held = new_weight(program, layers[0], name, 1 / factors)
    return new_call(program, layers[0], layers[0], aten.mul.Tensor, (value, held), {})


class _Seen:
    """What calibration has shown of one value.

    Attributes:
        low, high: of each channel, [in].
        rows: some of its rows, each [n, in].
    """

    def __init__(self, channels: int) -> None:
        self.low, self.high = (torch.full((channels,), end, device="cpu") for end in (torch.inf, -torch.inf))
        self.rows: list[torch.Tensor] = []

    def add(self, value: torch.Tensor, count: int) -> None:
        """Takes in one more call, and keeps about so many of its rows."""
        rows = value.detach().flatten(0, -2)
        if not len(rows):
            return
        low, high = torch.aminmax(rows, dim=0)
        self.low, self.high = torch.minimum(self.low, low), torch.maximum(self.high, high)
        self.rows.append(rows[:: max(1, len(rows) // count)][:count].clone())

    @property
    def is_finite(self) -> bool:
        return bool((self.low.isfinite() & self.high.isfinite()).all())


def factors_for(
    program: Program,
    layers: Sequence[fx.Node],
    calls: Sequence[Call],
    *,
    largest: int,
    progress: Callable[[str], None],
) -> dict[str, torch.Tensor]:
    """Factors for the values whose linear layers lose clearly less with them, by the name of the value.

    Args:
        largest: the largest magnitude of a weight.
    """
    groups = readers(layers)
    seen = {value.name: _Seen(value.meta["val"].shape[-1]) for value in groups}
    watched = Watched(program, lambda name, value: seen[name].add(value, -(-ROWS // len(calls))), seen)
    for number, call in enumerate(calls, 1):
        progress(f"{number} of {len(calls)}")
        with torch.no_grad():
            watched.run(*call)
    found = {}
    for value, reading in groups.items():
        weights = [program.weights[str(ops.bind(layer)["weight"].target)].detach() for layer in reading]
        factors = _best(seen[value.name], weights, largest)
        if factors is not None:
            found[value.name] = factors
    return found


def _best(seen: _Seen, weights: Sequence[torch.Tensor], largest: int) -> torch.Tensor | None:
    """The factors that leave least noise; None where they would not help much, or the value is not finite."""
    if not seen.is_finite:
        return None
    size = torch.maximum(seen.low.abs(), seen.high.abs())
    # A channel that was always zero may be as large as any other, and must then be within the range as well.
    size = torch.where(size > 0, size, size.max())
    columns = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
    plain = torch.ones_like(size)
    tried = [
        torch.where((size > 0) & (columns > 0), (size**share / columns ** (1 - share)).clamp(1 / MOST, MOST), plain)
        for share in EXPONENTS
    ]
    noise = [_noise(seen, weights, factors, largest) for factors in tried]
    best = min(range(len(tried)), key=noise.__getitem__)
    return tried[best] if noise[best] < WORTHWHILE * _noise(seen, weights, plain, largest) else None


def _noise(seen: _Seen, weights: Sequence[torch.Tensor], factors: torch.Tensor, largest: int) -> float:
    """The relative square error of all layers together, with a scale for the whole input."""
    low, high = float((seen.low / factors).min()), float((seen.high / factors).max())
    rows = torch.cat(seen.rows)
    ranges = [QParams.of_range(share * low, share * high) for share in RANGES]
    rounded = [
        torch.fake_quantize_per_tensor_affine(rows / factors, by.scale, by.zero, *by.integers[:2]) for by in ranges
    ]
    near = min(rounded, key=lambda tried: float((tried - rows / factors).square().sum()))
    total = 0.0
    for weight in weights:
        wanted = F.linear(rows, weight)
        found = F.linear(near, dequantized_weight(*quantized_weight(weight * factors, largest)))
        total += float((found - wanted).square().sum() / wanted.square().sum().clamp(min=1e-30))
    return total
