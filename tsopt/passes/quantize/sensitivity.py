"""Quantization error of each layer in isolation, measured on calibration data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.quantized import HIGHEST, QParams, dequantized_weight, quantized_weight, rounded_by_group
from tsopt.passes.quantize.observe import Call

Rounding = Callable[[fx.Node, torch.Tensor], torch.Tensor]  # a layer and its input -> the input after quantization


@dataclass
class Loss:
    """The error of one layer's output when its input and weight are quantized, accumulated over calls.

    Attributes:
        errors: of each output channel, summed up, float64, [out].
        squares: of all errors; `size`: of all results without quantization.
        count: results of each output channel.
    """

    errors: torch.Tensor
    squares: float = 0.0
    size: float = 0.0
    count: int = 0

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


class Measured(fx.Interpreter):
    """Runs a program in float32, and runs each layer a second time with quantized input and weight.

    A layer whose input is not finite in some call is left out of `losses`.

    Args:
        rounding: of the input of a layer.
        largest: the largest magnitude of a weight.
    """

    def __init__(self, program: Program, layers: Sequence[fx.Node], rounding: Rounding, largest: int) -> None:
        super().__init__(program.module())
        self._rounding = rounding
        self._layers = {layer.name: layer for layer in layers}
        weights = {str(ops.bind(layer)["weight"].target) for layer in layers}
        self._weights = {name: quantized_weight(program.weights[name].detach(), largest) for name in weights}
        self.losses: dict[str, Loss] = {}

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        layer = self._layers.get(node.name)
        if layer is not None:
            args, kwargs = self.fetch_args_kwargs_from_env(node)
            if bool(args[0].isfinite().all()):
                self._measure(layer, value, args, kwargs)
            else:
                self._layers.pop(node.name)
                self.losses.pop(node.name, None)
        return value

    def _measure(self, layer: fx.Node, value: torch.Tensor, args: Any, kwargs: Any) -> None:
        x, _, *others = args
        near = self._rounding(layer, x)
        integers, scales = self._weights[str(ops.bind(layer)["weight"].target)]
        target: Any = layer.target
        errors = target(near, dequantized_weight(integers, scales), *others, **kwargs).double() - value
        channel = 1 if errors.dim() == 4 else errors.dim() - 1
        by_channel = errors.movedim(channel, 0).flatten(1)
        loss = self.losses.setdefault(layer.name, Loss(torch.zeros(len(by_channel), dtype=torch.float64)))
        loss.errors += by_channel.sum(1)
        loss.squares += float(errors.square().sum())
        loss.size += float(value.double().square().sum())
        loss.count += by_channel.shape[1]


def by_tensor(layer: fx.Node, x: torch.Tensor) -> torch.Tensor:
    """Rounds as an engine does that finds the range of the whole tensor in each call."""
    return _quantized(x, QParams.of_range(*map(float, torch.aminmax(x))))


def by_group(layer: fx.Node, x: torch.Tensor) -> torch.Tensor:
    """Rounds as an engine does that finds the range of each group of a row in each call."""
    rounded: torch.Tensor = rounded_by_group(x, x.shape, lambda target, *args: target(*args))
    return rounded


def by_qparams(qparams: Mapping[str, QParams]) -> Rounding:
    """Rounds with parameters that are known, by the name of the input."""
    return lambda layer, x: _quantized(x, qparams[ops.bind(layer)["input"].name])


def _quantized(x: torch.Tensor, by: QParams) -> torch.Tensor:
    return torch.fake_quantize_per_tensor_affine(x.contiguous(), by.scale, by.zero, 0, HIGHEST)


def losses_of(
    program: Program,
    layers: Sequence[fx.Node],
    calls: Iterable[Call],
    *,
    rounding: Rounding,
    largest: int,
    progress: Callable[[str], None],
) -> dict[str, Loss]:
    """The loss of each layer by node name. All layers before it run in float32."""
    measured, calls = Measured(program, layers, rounding, largest), list(calls)
    for number, call in enumerate(calls, 1):
        progress(f"{number} of {len(calls)}")
        with torch.no_grad():
            measured.run(*call)
    return measured.losses
