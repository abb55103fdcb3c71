"""Errors of those parts of an output that are much smaller than others, such as probabilities beside boxes in pixels.

An error relative to the whole output says nothing of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

APART = 100.0  # times smaller than the largest part
NOTHING = 1e-6  # of the largest part: what is smaller is rounding in float32
VALUES = 8  # of a part, at least: fewer may be small by accident

Pair = tuple[torch.Tensor, torch.Tensor]


def error_of_small_parts(pairs: Sequence[Pair], size: float = 0.0) -> float:
    """|found - wanted| / |wanted| over the small parts of an output in several calls; 0 if it has none.

    A part has one position along the last axis or axis 1, where outputs of different kinds are concatenated. Whether
    it is small is judged by its root mean square. Values that are not finite do not count.

    Args:
        pairs: what was found and what is wanted, of one shape and of a real dtype, for each call.
        size: the root mean square that the whole output counts as where its own is smaller.
    """
    rank = pairs[0][1].dim()
    axes = {1, rank - 1} if rank > 1 else set()
    return max((_along(axis, pairs, size) for axis in axes), default=0.0)


def _along(axis: int, pairs: Sequence[Pair], size: float) -> float:
    if len({b.dim() for _, b in pairs}) > 1 or len({b.shape[axis] for _, b in pairs}) > 1:
        return 0.0
    squares = sum(_squares(b, axis) for _, b in pairs)
    count = sum(b.numel() // max(b.shape[axis], 1) for _, b in pairs)
    if count < VALUES or not isinstance(squares, torch.Tensor):
        return 0.0
    roots = (squares / count).sqrt()
    largest = max(float(roots.max()), size) if roots.numel() else 0.0
    small = (roots < largest / APART) & (roots > largest * NOTHING)
    if not bool(small.any()):
        return 0.0
    places = small.nonzero()[:, 0]
    away = sum(float(_differences(a, b, axis, places).square().sum()) for a, b in pairs)
    own = max(float(squares[small].sum()), count * len(places) * (size / APART) ** 2)
    return math.sqrt(away / own)


def _differences(a: torch.Tensor, b: torch.Tensor, axis: int, places: torch.Tensor) -> torch.Tensor:
    wanted = b.index_select(axis, places)
    return torch.where(wanted.isfinite(), a.index_select(axis, places).double() - wanted.double(), 0.0)


def _squares(value: torch.Tensor, axis: int) -> torch.Tensor:
    """The sum of the squares of each part, in float64."""
    others = [other for other in range(value.dim()) if other != axis]
    found = torch.linalg.vector_norm(value, dim=others, dtype=torch.float64)
    if not bool(found.isfinite().all()):
        found = torch.linalg.vector_norm(torch.where(value.isfinite(), value, 0.0), dim=others, dtype=torch.float64)
    return found.square()
