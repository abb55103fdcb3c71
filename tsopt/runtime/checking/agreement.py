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
    for mine, theirs in zip(zip(*found, strict=True), zip(*wanted, strict=True), strict=True):
        pairs = list(zip(mine, theirs, strict=True))
        if any(a.shape != b.shape for a, b in pairs):
            return math.inf
        if not theirs[0].is_floating_point():
            flipped = sum(int((a != b).sum()) for a, b in pairs) / max(1, sum(b.numel() for b in theirs))
            worst = max(worst, math.inf if flipped > FLIPPED else 0.0)
            continue
        # The positions of NaN and infinities are compared elsewhere.
        finite = [(a[b.isfinite()].double(), b[b.isfinite()].double()) for a, b in pairs]
        away = math.sqrt(sum(float((a - b).square().sum()) for a, b in finite))
        size = math.sqrt(sum(float(b.square().sum()) for _, b in finite))
        worst = max(worst, away / size if size else math.inf if away else 0.0)
    return worst if worst == worst else math.inf


def cosine(found: Sequence[Outputs], wanted: Sequence[Outputs]) -> float:
    """The cosine similarity to eager, averaged over inputs; the lowest over the floating-point outputs."""
    means = []
    for mine, theirs in zip(zip(*found, strict=True), zip(*wanted, strict=True), strict=True):
        if theirs[0].is_floating_point():
            values = [_cosine_of(a, b) for a, b in zip(mine, theirs, strict=True)]
            means.append(sum(values) / len(values))
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
    """The share of rows of the first floating-point output whose largest value is where eager has it."""
    same = count = 0
    for mine, theirs in zip(found, wanted, strict=True):
        position = next((i for i, leaf in enumerate(theirs) if leaf.is_floating_point() and leaf.dim()), None)
        if position is not None and mine[position].shape == theirs[position].shape:
            same += int((mine[position].argmax(-1) == theirs[position].argmax(-1)).sum())
            count += theirs[position][..., 0].numel()
    return same / count if count else 0.0
