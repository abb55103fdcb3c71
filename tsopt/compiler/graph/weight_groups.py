"""Weights in 4 bits: integers from 0 to 15, with a scale and a zero point for each group of neighbours in a row."""

from __future__ import annotations

import torch
from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.edit import fresh_name, new_call, new_weight
from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.quantized import FOUR_BITS, SMALLEST, Known, quantized

MOST = FOUR_BITS[1]
SHARES = tuple(1 - step / 20 for step in range(9))  # of the range of a group: from all of it to three fifths
AT_ONCE = 1 << 22  # weights of which the error is computed together
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # integers, scales, zero points


class Rounded:
    """Weights in 4 bits by name: rounding takes nine passes over a weight, and its result serves all trials.

    Only that for the last group size is kept.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, Parts]] = {}

    def parts(self, program: Program, weight: str, group: int) -> Parts:
        """A weight of a program, as `in_groups` rounds it."""
        known, parts = self._known.get(weight, (0, None))
        if parts is None or known != group:
            parts = in_groups(program.weights[weight].detach(), group)
            self._known[weight] = group, parts
        return parts


def quantize_weight_by_groups(program: Program, layer: fx.Node, group: int, known: Known, rounded: Rounded) -> fx.Node:
    """A call before a linear layer that dequantizes its weight from 4 bits.

    Args:
        group: how many neighbours share a scale: a divisor of the length of a row.
        known: such calls by the name of the weight, for layers that share one; a new call is added.
    """
    weight = str(ops.bind(layer)["weight"].target)
    if weight in known:
        return known[weight]
    place = ops.bind(layer)["weight"].next
    parts = zip(("int4", "scales", "zeros"), rounded.parts(program, weight, group), strict=True)
    held = [new_weight(program, place, fresh_name(f"{weight}.{name}", program.weights), value) for name, value in parts]
    args = (*held, *FOUR_BITS, group, torch.float32)
    known[weight] = new_call(program, layer, layer, quantized.dequantize_per_channel_group.default, args, {})
    return known[weight]


def in_groups(weight: torch.Tensor, group: int) -> Parts:
    """The integers of a weight, uint8, [out, in], and scales, float32, and zero points, int8, both [out, in / group].

    The range of each group includes 0, which is exact. Of SHARES of it, the one with the least squared error is taken:
    clipping the largest weights a little rounds all others less.
    """
    rows = max(AT_ONCE // max(weight.shape[1], 1), 1)
    parts = [_in_groups(part.unflatten(1, (-1, group))) for part in weight.split(rows)]
    integers, scales, zeros = (torch.cat(items) for items in zip(*parts, strict=True))
    return integers.flatten(1), scales, zeros


def _in_groups(weight: torch.Tensor) -> Parts:
    """Of a weight, [out, groups, group]."""
    low, high = weight.amin(2).clamp(max=0), weight.amax(2).clamp(min=0)
    errors = torch.stack([_error(weight, low * share, high * share) for share in SHARES])
    share = torch.tensor(SHARES, device="cpu")[errors.argmin(0)]
    return _rounded(weight, low * share, high * share)


def _error(weight: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """The squared error of each group, [out, groups], if it covers a range."""
    steps, scales, zeros = _rounded(weight, low, high)
    found = steps.float().sub_(zeros[..., None]).mul_(scales[..., None])
    return found.sub_(weight).square_().sum(2)


def _rounded(weight: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> Parts:
    """The integers of each group, with the scale and the zero point that cover a range."""
    scales = (high / MOST - low / MOST).clamp(min=SMALLEST)
    zeros = (-low / scales).round_().clamp_(0, MOST)
    steps = (weight / scales[..., None]).round_().add_(zeros[..., None]).clamp_(0, MOST)
    return steps.to(torch.uint8), scales, zeros.to(torch.int8)
