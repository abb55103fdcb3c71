"""Intervals of numbers, and those that dtypes and tensors hold."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Range:
    """From low to high, both included. Infinite where nothing is known."""

    low: float
    high: float

    def __contains__(self, other: Range) -> bool:
        return self.low <= other.low and other.high <= self.high

    def __or__(self, other: Range) -> Range:
        return Range(min(self.low, other.low), max(self.high, other.high))

    def __and__(self, other: Range) -> Range:
        return Range(max(self.low, other.low), min(self.high, other.high))

    def __neg__(self) -> Range:
        return Range(-self.high, -self.low)


ANY = Range(-math.inf, math.inf)
FLAG = Range(0, 1)


def of_dtype(dtype: torch.dtype) -> Range:
    """All that a dtype holds; ANY for what is not a whole number."""
    if dtype == torch.bool:
        return FLAG
    if dtype.is_floating_point or dtype.is_complex:
        return ANY
    info = torch.iinfo(dtype)
    return Range(info.min, info.max)


def range_of_tensor(tensor: torch.Tensor) -> Range:
    """What a tensor holds, where that is whole numbers or it is one number."""
    if tensor.numel() == 0 or tensor.is_complex() or tensor.device.type == "meta":
        return of_dtype(tensor.dtype)
    if tensor.is_floating_point() and tensor.numel() > 1:
        return ANY
    low, high = (float(end) if tensor.is_floating_point() else int(end) for end in tensor.detach().aminmax())
    return Range(low, high) if low == low else ANY


def wrapped(found: Range, dtype: torch.dtype) -> Range:
    """What is left of a range in a dtype: the range itself, or all of the dtype where it would wrap around."""
    whole = of_dtype(dtype)
    return found if found in whole else whole
