"""Quantization error of each layer in isolation, measured on calibration data."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.fake_quantized import rounded_by_group
from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.quantized import (
    CONVOLUTIONS,
    GROUP,
    QParams,
    dequantized_groups,
    dequantized_weight,
    quantized_weight,
)
from tsopt.compiler.graph.weight_groups import Parts
from tsopt.passes.quantize.observe import Call

Weights = Mapping[str, Parts] | None
Rounding = Callable[[fx.Node, torch.Tensor], torch.Tensor]  # a layer and its input -> the input after quantization


@dataclass
class Loss:
    """The error of one layer's output when its input and weight are quantized, accumulated over calls.

    Attributes:
        errors: of each output channel, summed up, float64, [out].
        squares: of all errors; `size`: of all results without quantization.
        count: results of each output channel.
        effect: the squared relative error of the program's outputs that it causes; None if that is not known.
    """

    errors: torch.Tensor
    squares: float = 0.0
    size: float = 0.0
    count: int = 0
    effect: float | None = None

    @property
    def shift(self) -> torch.Tensor:
        """The bias correction that makes the mean error of each output channel zero: float32, [out]."""
        return (-self.errors / max(self.count, 1)).float()

    @property
    def sqnr(self) -> float:
        """Signal-to-quantization-noise ratio after bias correction, in dB."""
        noise = self.squares - float(self.errors.square().sum()) / max(self.count, 1)
        if not math.isfinite(noise) or not math.isfinite(self.size):
            return -math.inf
        if noise <= 0:
            return math.inf
        return 10 * math.log10(self.size / noise) if self.size > 0 else -math.inf


class LayerErrors(fx.Interpreter, ABC):
    """Runs a program in float32, and runs each layer a second time with quantized input and weight.

    Args:
        rounding: of the input of a layer.
        largest: the largest magnitude of a weight.
        weights: of these layers, rounded to 4 bits, by name; None: in 8 bits.

    Attributes:
        layers: by node name, without those whose input was not finite in some call.
        found: what is known of each of them, by node name.
    """

    def __init__(
        self, program: Program, layers: Sequence[fx.Node], rounding: Rounding, largest: int, weights: Weights = None
    ) -> None:
        super().__init__(program.module())
        self._rounding = rounding
        self.layers = {layer.name: layer for layer in layers}
        names = {str(ops.bind(layer)["weight"].target) for layer in layers}
        self._in_float: Any = dequantized_weight if weights is None else dequantized_groups
        in_int8 = {} if weights else {name: quantized_weight(program.weights[name].detach(), largest) for name in names}
        self._weights: Mapping[str, Any] = weights or in_int8
        self.found: dict[str, Any] = {}

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        layer = self.layers.get(node.name)
        if layer is not None and value.numel():
            args, kwargs = self.fetch_args_kwargs_from_env(node)
            if bool(args[0].isfinite().all()):
                with torch.no_grad():
                    quantized = self._quantized(layer, args, kwargs)
                self.add(layer.name, value, quantized)
            else:
                self.layers.pop(node.name)
                self.found.pop(node.name, None)
        return value

    def _quantized(self, layer: fx.Node, args: Any, kwargs: Any) -> torch.Tensor:
        x, _, *others = args
        weight = self._in_float(*self._weights[str(ops.bind(layer)["weight"].target)])
        target: Any = layer.target
        result: torch.Tensor = target(self._rounding(layer, x), weight, *others, **kwargs)
        return result

    @abstractmethod
    def add(self, name: str, value: torch.Tensor, quantized: torch.Tensor) -> None:
        """Takes the result of a layer in float32, and with quantization."""


class Losses(LayerErrors):
    """The loss of each layer."""

    def add(self, name: str, value: torch.Tensor, quantized: torch.Tensor) -> None:
        self.note(name, value, quantized - value)

    def note(self, name: str, value: torch.Tensor, errors: torch.Tensor) -> None:
        """Takes the result of a layer in float32, and what quantization adds to it."""
        by_channel = errors.movedim(channel_of(self.layers[name]), 0).flatten(1)
        loss = self.found.setdefault(name, Loss(torch.zeros(len(by_channel), dtype=torch.float64, device="cpu")))
        loss.errors += by_channel.sum(1, dtype=torch.float64)
        loss.squares += _squares(errors)
        loss.size += _squares(value)
        loss.count += by_channel.shape[1]


def _squares(value: torch.Tensor) -> float:
    """The sum of squares, in float64."""
    return float(torch.linalg.vector_norm(value, dtype=torch.float64)) ** 2


def channel_of(layer: fx.Node) -> int:
    """The dimension of the output channels in the result of a layer."""
    return 1 if layer.target in CONVOLUTIONS else -1


def by_tensor(layer: fx.Node, x: torch.Tensor) -> torch.Tensor:
    """Rounds as an engine does that finds the range of the whole tensor in each call."""
    return _quantized(x, QParams.of_range(*map(float, torch.aminmax(x))))


def by_group(layer: fx.Node, x: torch.Tensor, group: int = GROUP) -> torch.Tensor:
    """Rounds as an engine does that finds the range of each group of a row in each call."""
    rounded: torch.Tensor = rounded_by_group(x, x.shape[-1], lambda target, *args: target(*args), group)
    return rounded


def by_qparams(qparams: Mapping[str, QParams]) -> Rounding:
    """Rounds with parameters that are known, by the name of the input."""
    return lambda layer, x: _quantized(x, qparams[ops.bind(layer)["input"].name])


def _quantized(x: torch.Tensor, by: QParams) -> torch.Tensor:
    return torch.fake_quantize_per_tensor_affine(x.contiguous(), by.scale, by.zero, *by.integers[:2])


def losses_of(
    program: Program,
    layers: Sequence[fx.Node],
    calls: Iterable[Call],
    *,
    rounding: Rounding,
    largest: int,
    progress: Callable[[str], None],
    weights: Weights = None,
) -> dict[str, Loss]:
    """The loss of each layer by node name. All layers before it run in float32."""
    measured, calls = Losses(program, layers, rounding, largest, weights), list(calls)
    for number, call in enumerate(calls, 1):
        progress(f"{number} of {len(calls)}")
        with torch.no_grad():
            measured.run(*call)
    return measured.found
