"""Measures of how closely the outputs of several calls agree with eager's, pooled into one number."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tsopt.runtime.checking.compare import FLIPPED

Outputs = list[torch.Tensor]  # of one call


def relative_error(found: Sequence[Outputs], wanted: Sequence[Outputs]) -> float:
    """The largest over the outputs of |found - wanted| / |wanted|, over all inputs; infinite where it is undefined.

    At most 1 % of integer and boolean values may differ.
    """
    worst = 0.0
    for pairs in _pairs(found, wanted):
        if any(a.shape != b.shape for a, b in pairs):
            return math.inf
        if not pairs[0][1].is_floating_point():
            worst = max(worst, math.inf if 1 - _share_equal(pairs) > FLIPPED else 0.0)
            continue
        # The positions of NaN and infinities are compared elsewhere.
        finite = [(a[b.isfinite()].double(), b[b.isfinite()].double()) for a, b in pairs]
        away = math.sqrt(sum(float((a - b).square().sum()) for a, b in finite))
        size = math.sqrt(sum(float(b.square().sum()) for _, b in finite))
        worst = max(worst, away / size if size else math.inf if away else 0.0)
    return worst if worst == worst else math.inf


def cosine(found: Sequence[Outputs], wanted: Sequence[Outputs]) -> float:
    """The cosine similarity to eager, averaged over inputs; the lowest over the outputs.

    Of integer and boolean outputs, the share of values that are equal.
    """
    means = []
    for pairs in _pairs(found, wanted):
        if pairs[0][1].is_floating_point():
            means.append(sum(_cosine_of(a, b) for a, b in pairs) / len(pairs))
        else:
            means.append(_share_equal(pairs))
    return min(means, default=1.0)


def _cosine_of(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape:
        return -1.0
    a, b = a.flatten().double(), b.flatten().double()
    size = float(a.norm() * b.norm())
    if not size:
        return 1.0 if torch.equal(a, b) else 0.0
    value = float(a @ b) / size
    return value if value == value else -1.0


def top1(found: Sequence[Outputs], wanted: Sequence[Outputs]) -> float:
    """The share of rows of the first floating-point output whose largest value is where eager has it.

    Without such an output, the share of values that are equal, because classes may already have been chosen.
    """
    if not any(leaf.is_floating_point() and leaf.dim() for theirs in wanted for leaf in theirs):
        return min(map(_share_equal, _pairs(found, wanted)), default=1.0)
    same = count = 0
    for mine, theirs in zip(found, wanted, strict=True):
        position = next((i for i, leaf in enumerate(theirs) if leaf.is_floating_point() and leaf.dim()), None)
        if position is not None and mine[position].shape == theirs[position].shape:
            same += int((mine[position].argmax(-1) == theirs[position].argmax(-1)).sum())
            count += theirs[position][..., 0].numel()
    return same / count if count else 0.0


def _pairs(found: Sequence[Outputs], wanted: Sequence[Outputs]) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Of each output, what was found and what is wanted, for all calls."""
    columns = zip(zip(*found, strict=True), zip(*wanted, strict=True), strict=True)
    return [[(_real(a), _real(b)) for a, b in zip(mine, theirs, strict=True)] for mine, theirs in columns]


def _real(value: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of real ones."""
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def _share_equal(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The share of values that are equal; 0 where shapes differ."""
    if any(a.shape != b.shape for a, b in pairs):
        return 0.0
    count = sum(b.numel() for _, b in pairs)
    return sum(int((a == b).sum()) for a, b in pairs) / count if count else 1.0
