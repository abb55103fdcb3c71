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
WITHOUT_KERNELS = (
    torch.uint16,
    torch.uint32,
    torch.uint64,
)  # torch can store these dtypes, but has few kernels for them


def of_dtype(dtype: torch.dtype) -> Range:
    """All that a dtype holds; ANY for what is not a whole number."""
    if dtype == torch.bool:
        return FLAG
    if dtype.is_floating_point or dtype.is_complex:
        return ANY
    info = torch.iinfo(dtype)
    return Range(info.min, info.max)


def wraps(number: float, dtype: torch.dtype) -> bool:
    """Whether a kernel for whole numbers takes a literal for another number: -5 is 251 in uint8."""
    if dtype == torch.bool or dtype.is_floating_point or dtype.is_complex or not math.isfinite(number):
        return False
    return Range(number, number) not in of_dtype(dtype)


def range_of_tensor(tensor: torch.Tensor) -> Range:
    """What a tensor holds, where that is whole numbers or it is one number."""
    if tensor.numel() == 0 or tensor.is_complex() or tensor.device.type == "meta":
        return of_dtype(tensor.dtype)
    if tensor.is_floating_point():
        number = float(tensor.detach().item()) if tensor.numel() == 1 else math.nan
        return Range(number, number) if number == number else ANY
    if tensor.dtype in WITHOUT_KERNELS:
        array = tensor.numpy(force=True)
        return Range(int(array.min()), int(array.max()))
    low, high = tensor.detach().aminmax()
    return Range(int(low), int(high))


def rounded(found: Range, dtype: torch.dtype, steps: int = 0) -> Range:
    """A range of real numbers after they were rounded to a float dtype, whichever way.

    Ends that the dtype holds stay, because rounding keeps the order of numbers.

    Args:
        steps: by how many units in the last place a kernel is off; then no end stays but zero.
    """
    limits = torch.finfo(dtype)
    return Range(-_rounded_up(-found.low, limits, steps), _rounded_up(found.high, limits, steps))


def _rounded_up(end: float, limits: torch.finfo, steps: int) -> float:
    if not end or not math.isfinite(end):
        return end
    above = float(end) if float(end) >= end else math.nextafter(float(end), math.inf)  # of an integer beyond 2**53
    if abs(above) < limits.smallest_normal:  # may be flushed to zero
        return limits.smallest_normal if above > 0 else 0.0
    digits, exponent = math.frexp(above)
    above = math.ldexp(math.ceil(digits * 2 / limits.eps) * limits.eps / 2, exponent)
    above += steps * abs(above) * limits.eps
    return max(above, -limits.max) if above <= limits.max else math.inf


def wrapped(found: Range, dtype: torch.dtype) -> Range:
    """What is left of a range in a dtype: the range itself, or all of the dtype where it would wrap around."""
    whole = of_dtype(dtype)
    return found if found in whole else whole
