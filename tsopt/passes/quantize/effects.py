"""How much of the error of a model's outputs each quantized layer causes, by gradients."""

from __future__ import annotations

import functools
import logging
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from tsopt.compiler.graph.program import Program
from tsopt.passes.quantize.observe import Call
from tsopt.passes.quantize.sensitivity import Loss, Losses, Rounding, Weights, channel_of, losses_of

log = logging.getLogger("tsopt")
DRAWS = 8  # of signs, over all calls: an estimate with a standard deviation of half of the value


def losses_with_effects(
    program: Program,
    layers: Sequence[fx.Node],
    calls: Sequence[Call],
    *,
    rounding: Rounding,
    largest: int,
    corrected: bool,
    progress: Callable[[str], None],
    weights: Weights = None,
) -> dict[str, Loss]:
    """The loss of each layer by node name, and its effect: the squared relative error of the outputs that it causes.

    The relative error is that of all calls together: an error counts by the size of the outputs of its call.
    To first order, an error e of a layer changes the outputs y by J e. For random signs v, the mean of (v J e)^2 is
    |J e|^2 (Hutchinson's estimator), and v J is the gradient of v y, so one backward pass serves all layers. Errors of
    different layers are taken to be uncorrelated: what several layers cause is the sum of what each causes.

    No effect is known where the outputs cannot be differentiated, or a gradient is not finite; nor that of a layer from
    which no gradient leads to an output, as where only the largest score counts.

    Args:
        rounding, largest, weights: as in `LayerErrors`.
        corrected: whether the bias of a layer will be corrected for its mean error.
    """
    measured = _Effects(program, layers, rounding, largest, weights)
    draws, draw = -(-DRAWS // len(calls)), torch.Generator().manual_seed(0)
    is_result = [item.writes is None for item in program.signature.outputs]
    for number, call in enumerate(calls, 1):
        progress(f"{number} of {len(calls)}")
        try:
            with _differentiating():
                measured.number = number
                outputs = measured.run(*map(_detached, call))
                results = [y for y, wanted in zip(outputs, is_result, strict=True) if wanted]
                measured.differentiate(results, draws, draw)
                del outputs, results  # and with them the errors of this call
        except RuntimeError as error:
            log.info("%s cannot be differentiated: %s", program.name, error)
            same: dict[str, Any] = {"rounding": rounding, "largest": largest, "weights": weights}
            return losses_of(program, layers, calls, **same, progress=progress)
    effects = {name: measured.effect(name, corrected) / draws for name in measured.found if measured.leads_on(name)}
    if all(map(math.isfinite, effects.values())):
        for name, effect in effects.items():
            measured.found[name].effect = effect
    return measured.found


class _Effects(Losses):
    """Losses, and what a backward pass finds of each layer.

    Each gradient is used as soon as it is there, so that those of all layers are never in memory together.

    Attributes:
        number: of the call at hand.
    """

    number = 0

    def __init__(
        self, program: Program, layers: Sequence[fx.Node], rounding: Rounding, largest: int, weights: Weights
    ) -> None:
        super().__init__(program, layers, rounding, largest, weights)
        self._leaves: list[torch.Tensor] = []  # results of layers that do not depend on those of others
        self._sizes: dict[int, dict[int, float]] = {}  # the squared norm of each output, by call and position
        # v J e, and v J summed up for each output channel, for each call and draw: a correction adds the same to all
        # values of a channel.
        self._products: dict[str, list[tuple[int, float, torch.Tensor]]] = defaultdict(list)

    def fetch_attr(self, target: str) -> Any:
        """A weight. It needs no gradient; for one, autograd would keep the inputs of layers."""
        found = super().fetch_attr(target)
        return found.detach() if isinstance(found, torch.Tensor) else found

    def add(self, name: str, value: torch.Tensor, quantized: torch.Tensor) -> None:
        error = quantized - value.detach()
        self.note(name, value.detach(), error)
        if not value.requires_grad:
            self._leaves.append(value.requires_grad_())
        # Not a bound method: the garbage collector does not see references from hooks.
        value.register_hook(
            functools.partial(_take, self._products[name], self.number, error, channel_of(self.layers[name]))
        )

    def differentiate(self, results: Sequence[Any], draws: int, draw: torch.Generator) -> None:
        """The backward passes of a call, with results of norm 1."""
        leaves, self._leaves = self._leaves, []
        parts, sizes = [], self._sizes.setdefault(self.number, {})
        for position, y in enumerate(results):
            if isinstance(y, torch.Tensor) and y.requires_grad:
                part = y[y.isfinite()]
                if size := float(part.detach().square().sum(dtype=torch.float64)):
                    sizes[position] = size
                    parts.append(part / math.sqrt(size))
        for left in reversed(range(draws if parts else 0)):
            signed = torch.stack([(part * _signs(part, draw)).sum() for part in parts]).sum()
            torch.autograd.grad(signed, leaves, retain_graph=left > 0, allow_unused=True)  # calls `_take`
        self.env.clear()

    def leads_on(self, name: str) -> bool:
        """Whether a gradient of the outputs has come to a layer, be it zero."""
        return bool(self._products.get(name))

    def effect(self, name: str, corrected: bool) -> float:
        """The sum of (v J e)^2 over all draws, for the error that is left after the correction."""
        shift = self.found[name].shift if corrected else torch.zeros(1, device="cpu")
        return sum(
            self._share(number) * (product + float((by_channel * shift).sum(dtype=torch.float64))) ** 2
            for number, product, by_channel in self._products[name]
        )

    def _share(self, number: int) -> float:
        """The share of a call in the squared norms of the outputs of all calls: the mean over the outputs."""
        shares = [
            size / sum(sizes.get(position, 0.0) for sizes in self._sizes.values())
            for position, size in self._sizes[number].items()
        ]
        return sum(shares) / len(shares)


def _take(
    products: list[tuple[int, float, torch.Tensor]],
    number: int,
    error: torch.Tensor,
    channel: int,
    gradient: torch.Tensor,
) -> None:
    """Notes what a gradient of the result of a layer says of its error in a call."""
    by_channel = gradient.movedim(channel, 0).flatten(1).sum(1)
    products.append((number, float((gradient * error).sum(dtype=torch.float64)), by_channel))


@contextmanager
def _differentiating() -> Iterator[None]:
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ops without a derivative
        yield


def _signs(like: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, like.shape, generator=draw, device="cpu").to(like.dtype) * 2 - 1


def _detached(value: Any) -> Any:
    """A value that a backward pass may read, and ends at: not a tensor that was made in inference mode."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if value.is_inference() else value.detach()
