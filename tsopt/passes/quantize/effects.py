"""How much of the error of a model's outputs each quantized layer causes, by gradients."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from tsopt.compiler.graph.program import Program
from tsopt.passes.quantize.observe import Call
from tsopt.passes.quantize.sensitivity import LayerErrors, Rounding, channel_of

log = logging.getLogger("tsopt")
DRAWS = 8  # of signs, over all calls: an estimate with a standard deviation of half of the value


def effects_of(
    program: Program,
    layers: Sequence[fx.Node],
    calls: Sequence[Call],
    *,
    rounding: Rounding,
    largest: int,
    shifts: Mapping[str, torch.Tensor],
    progress: Callable[[str], None],
) -> dict[str, float]:
    """The squared relative error of the outputs that each layer causes, by node name.

    To first order, an error e of a layer changes the outputs y by J e. For random signs v, the mean of (v J e)^2 is
    |J e|^2 (Hutchinson's estimator), and v J is the gradient of v y, so one backward pass serves all layers. Errors of
    different layers are taken to be uncorrelated: what several layers cause is the sum of what each causes.

    Args:
        rounding, largest: as in `losses_of`.
        shifts: what is added to the result of a quantized layer, float32, [out], by node name.

    Returns:
        Nothing where the outputs cannot be differentiated, or a gradient is not finite.
    """
    measured = _Gradients(program, layers, rounding, largest, shifts)
    draws, draw = -(-DRAWS // len(calls)), torch.Generator().manual_seed(0)
    sums = dict.fromkeys(measured.layers, 0.0)
    is_result = [item.writes is None for item in program.signature.outputs]
    for number, call in enumerate(calls, 1):
        progress(f"{number} of {len(calls)}")
        try:
            with _differentiating():
                measured.found.clear()
                outputs = measured.run(*map(_differentiable, call))
                results = [y for y, wanted in zip(outputs, is_result, strict=True) if wanted]
                for name, square in measured.squares(results, draws, draw):
                    sums[name] += square
        except RuntimeError as error:
            log.info("%s cannot be differentiated: %s", program.name, error)
            return {}
    effects = {name: sums[name] / (draws * len(calls)) for name in measured.layers}
    return effects if all(map(math.isfinite, effects.values())) else {}


class _Gradients(LayerErrors):
    """Keeps the result and the error of each layer for a backward pass."""

    def __init__(
        self,
        program: Program,
        layers: Sequence[fx.Node],
        rounding: Rounding,
        largest: int,
        shifts: Mapping[str, torch.Tensor],
    ) -> None:
        super().__init__(program, layers, rounding, largest)
        self._shifts = shifts

    def add(self, name: str, value: torch.Tensor, quantized: torch.Tensor) -> None:
        shift, channel = self._shifts.get(name, torch.zeros(1)), channel_of(self.layers[name])
        shifted = (quantized.movedim(channel, -1) + shift).movedim(-1, channel)
        self.found[name] = value, shifted - value.detach()
        if not value.requires_grad:
            value.requires_grad_()

    def squares(self, results: Sequence[Any], draws: int, draw: torch.Generator) -> Iterator[tuple[str, float]]:
        """(v J e)^2 of each layer and draw, with results of norm 1."""
        parts = [y[y.isfinite()] for y in results if isinstance(y, torch.Tensor) and y.requires_grad]
        parts = [part / part.detach().norm() for part in parts if part.any()]
        values = [value for value, _ in self.found.values()]
        for left in reversed(range(draws if parts and values else 0)):
            signed = torch.stack([(part * _signs(part, draw)).sum() for part in parts]).sum()
            gradients = torch.autograd.grad(signed, values, retain_graph=left > 0, allow_unused=True)
            for (name, (_, error)), gradient in zip(self.found.items(), gradients, strict=True):
                if gradient is not None:
                    yield name, float((gradient * error).sum(dtype=torch.float64).square())


@contextmanager
def _differentiating() -> Iterator[None]:
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ops without a derivative
        yield


def _signs(like: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, like.shape, generator=draw).to(like.dtype) * 2 - 1


def _differentiable(value: Any) -> Any:
    """A value that a backward pass may read: not a tensor that was made in inference mode."""
    return value.clone() if isinstance(value, torch.Tensor) and value.is_inference() else value
