"""Whether values share memory. Works on torch tensors and numpy arrays, and does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def overlap(a: Any, b: Any) -> bool:
    """Whether the memory of two tensors overlaps, from the first place of each to its last, gaps included."""
    if getattr(a, "device", None) != getattr(b, "device", None):
        return False
    (low, high), (other_low, other_high) = _span(a), _span(b)
    return low < other_high and other_low < high


def overlaps(values: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """The pairs of positions whose values share memory."""
    spans = [_span(value) for value in values]
    pairs = ((i, j) for j in range(len(values)) for i in range(j))
    return tuple((i, j) for i, j in pairs if spans[i][0] < spans[j][1] and spans[j][0] < spans[i][1])


def _span(value: Any) -> tuple[int, int]:
    """The first byte of a value, and the one behind its last."""
    if hasattr(value, "__array_interface__") and not hasattr(value, "data_ptr"):
        import numpy as np

        return np.lib.array_utils.byte_bounds(value)
    if not value.numel():
        return 0, 0
    start = value.data_ptr()
    places = 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    return start, start + places * value.itemsize


def is_repeated(value: Any) -> bool:
    """Whether elements of a tensor or an array are one place in memory, as `expand` makes them."""
    strides = value.stride() if hasattr(value, "stride") else value.strides
    return 0 in strides and any(step == 0 and size > 1 for step, size in zip(strides, value.shape, strict=True))
