"""Takes outlier channels out of the inputs of linear layers, and puts them into the weights.

A few channels of a transformer's activations are often a hundred times as large as the others, to which a scale for the
whole tensor leaves few steps. Dividing each channel of the input by a factor, and multiplying the weight by it, changes
nothing but rounding. Method: Xiao et al., "SmoothQuant", 2022, with the exponent searched for each value.

Where a model calls a layer many times, its weight is multiplied once: all values that it reads get the same factors.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.edit import new_call
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.origin import origin_of
from tsopt.compiler.graph.program import Numerics, Program
from tsopt.compiler.graph.quantized import QParams, dequantized_weight, erase_dead, quantized_weight, rewire
from tsopt.compiler.rewriting.made_weights import MadeWeights
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
    elsewhere the values are. A layer whose weight is also read by calls with other factors, or with none, is not
    divided, because that would take another copy of the weight.

    Attributes:
        factors: float32, [in], by the name of the value; one tensor for all values that one weight is multiplied with.
        only: the names of the linear layers.
    """

    name = "smooth"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    factors: Mapping[str, torch.Tensor]
    only: frozenset[str]

    def run(self, program: Program, limits: Limits) -> Changes:
        done = []
        chosen = [layer for layer in layers_of(program) if layer.name in self.only]
        groups = {value: layers for value, layers in readers(chosen).items() if value.name in self.factors}
        ahead = self._layers_ahead(program, groups)
        made = MadeWeights(program)
        for value, layers in groups.items():
            factors = self.factors[value.name]
            if not limits.take():
                continue
            if _is_divisible_norm(program, value, layers, factors):
                _divide(made, value, factors)
                divided = value
            elif value in ahead:
                _divide(made, ahead[value], factors)
                divided = value
            else:
                divided = _divided(made, value, layers, factors)
            for layer in layers:
                weight = ops.bind(layer)["weight"]
                scaled = program.weights[str(weight.target)].detach() * factors
                rewire(layer, divided, made.read(scaled, layer, f"{weight.target}.smooth")[0])
            done.append(Done("smooth_channels", origin_of(value)))
        if done:
            erase_dead(program)
        return Changes(tuple(done), numerics=Numerics.ROUNDING if done else Numerics.EXACT)

    def _layers_ahead(self, program: Program, groups: Mapping[fx.Node, Sequence[fx.Node]]) -> dict[fx.Node, fx.Node]:
        """The linear layers that can be divided instead of the values behind them."""
        found, given = dict[fx.Node, fx.Node](), dict[fx.Node, torch.Tensor]()
        for value, layers in groups.items():
            layer = _divisible_layer(program, value, layers, self.factors[value.name])
            if layer is not None:
                found[value], given[layer] = layer, self.factors[value.name]
        calls: defaultdict[object, list[fx.Node]] = defaultdict(list)
        for node in program.graph.nodes:
            if node.op == "get_attr":
                calls[node.target] += node.users
        alone = {
            layer
            for layer, factors in given.items()
            if all(given.get(call) is factors for call in calls[ops.bind(layer)["weight"].target])
        }
        return {value: layer for value, layer in found.items() if layer in alone}


def readers(layers: Iterable[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """The inputs of the linear layers among these, each with the layers that read it, in graph order."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for layer in linear_layers(list(layers)):
        found.setdefault(ops.bind(layer)["input"], []).append(layer)
    return found


def _is_divisible_norm(program: Program, value: fx.Node, layers: Sequence[fx.Node], factors: torch.Tensor) -> bool:
    """Whether a value is a norm with constants of an element for each factor, and nothing else reads it."""
    if value.target not in NORMS or not set(value.users) <= set(layers):
        return False
    affine = _affine(program, value)
    return bool(affine) and all(weight.shape == factors.shape for weight in affine.values())


def _divisible_layer(
    program: Program, value: fx.Node, layers: Sequence[fx.Node], factors: torch.Tensor
) -> fx.Node | None:
    """The linear layer whose outputs a value is, with or without a ReLU, if nothing else reads these."""
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
    return layer


def _affine(program: Program, call: fx.Node) -> dict[fx.Node, torch.Tensor]:
    """The weight and the bias, if any, of a layer or a norm; empty if it has no weight, or one of them is computed."""
    given = ops.bind(call)
    held = [given[name] for name in ("weight", "bias") if given.get(name) is not None]
    if given["weight"] is None or any(item.op != "get_attr" for item in held):
        return {}
    return {item: program.weights[str(item.target)].detach() for item in held}


def _divide(made: MadeWeights, call: fx.Node, factors: torch.Tensor) -> None:
    """Divides the outputs of a layer or a norm, in its weight and its bias."""
    for held, value in _affine(made.program, call).items():
        divided = value / factors.reshape(-1, *[1] * (value.dim() - 1))
        call.replace_input_with(held, made.read(divided, call, f"{held.target}.smooth")[0])


def _divided(made: MadeWeights, value: fx.Node, layers: Sequence[fx.Node], factors: torch.Tensor) -> fx.Node:
    held, _ = made.read(1 / factors, layers[0], f"{value.name}.smooth")
    return new_call(made.program, layers[0], layers[0], aten.mul.Tensor, (value, held), {})


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

    @property
    def size(self) -> torch.Tensor:
        """The largest magnitude in each channel.

        A channel that was always zero may be as large as any other, and must then be within the range as well.
        """
        size = torch.maximum(self.low.abs(), self.high.abs())
        return torch.where(size > 0, size, size.max())


def factors_for(
    program: Program,
    layers: Sequence[fx.Node],
    calls: Sequence[Call],
    *,
    largest: int,
    progress: Callable[[str], None],
) -> dict[str, torch.Tensor]:
    """Factors for the values whose linear layers lose clearly less with them, by the name of the value.

    Finite values whose layers share a weight have the same factors, or none.

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
    finite = {value: reading for value, reading in groups.items() if seen[value.name].is_finite}
    found: dict[str, torch.Tensor] = {}
    for together in _sharing_weights(finite):
        pairs = [(seen[value.name], [program.weights[name].detach() for name in names]) for value, names in together]
        factors = _best(pairs, largest)
        if factors is not None:
            found |= {value.name: factors for value, _ in together}
    return found


def _sharing_weights(groups: Mapping[fx.Node, Sequence[fx.Node]]) -> list[list[tuple[fx.Node, list[str]]]]:
    """The values, each with the names of the weights that its layers have; those that share one are in one list."""
    found: list[list[tuple[fx.Node, list[str]]]] = []
    for value, layers in groups.items():
        names = [str(ops.bind(layer)["weight"].target) for layer in layers]
        mine = set(names)
        joined = [together for together in found if not all(mine.isdisjoint(others) for _, others in together)]
        found = [together for together in found if together not in joined]
        found.append([*itertools.chain.from_iterable(joined), (value, names)])
    return found


_Pair = tuple[_Seen, Sequence[torch.Tensor]]  # a value, and the weights that it is multiplied with


def _best(pairs: Sequence[_Pair], largest: int) -> torch.Tensor | None:
    """The factors that leave least noise; None where they would not help much."""
    size = torch.stack([seen.size for seen, _ in pairs]).amax(0)
    columns = torch.stack([weight.abs().amax(0) for _, weights in pairs for weight in weights]).amax(0)
    plain = torch.ones_like(size)
    tried = [
        torch.where((size > 0) & (columns > 0), (size**share / columns ** (1 - share)).clamp(1 / MOST, MOST), plain)
        for share in EXPONENTS
    ]

    def noise(factors: torch.Tensor) -> float:
        return sum(_noise(seen, weights, factors, largest) for seen, weights in pairs)

    left = [noise(factors) for factors in tried]
    best = min(range(len(tried)), key=left.__getitem__)
    return tried[best] if left[best] < WORTHWHILE * noise(plain) else None


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
