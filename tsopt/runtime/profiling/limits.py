"""What this machine can do at best: how fast it multiplies, and how fast it moves bytes. Measured, not looked up.

The roofline model: Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore
architectures", 2009.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tsopt.runtime.profiling.work import Work
from tsopt.runtime.thread_count import torch_threads

SIDES = (256, 512, 1024)  # of square matrices: the fastest product counts
IMAGES = ((64, 56), (128, 28), (256, 14))  # channels and side: convolutions reach a tenth more than products
SIZES = tuple(1 << exponent for exponent in range(14, 28, 2))  # bytes that are moved: caches are faster than memory
SECONDS = 0.03  # for each of these


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of this machine.

    Attributes:
        macs: float32 multiply-accumulates per second, in products of matrices or convolutions, whichever are faster;
            in a profile, at least as many as a layer of it has reached.
        moved: bytes per second, read and written, by the size of what is moved, smaller sizes first.
    """

    macs: float
    moved: tuple[tuple[int, float], ...]

    def seconds(self, work: Work) -> float:
        """The least time that a layer can take: to multiply, or to read and write its working set."""
        return max(work.macs / self.macs, work.bytes / self.bandwidth(work.bytes))

    def bandwidth(self, size: int) -> float:
        """Bytes per second for a working set of a size: the best that was measured for any that is not smaller."""
        place = max(bisect_right([known for known, _ in self.moved], size) - 1, 0)
        return max(rate for _, rate in self.moved[place:])


def measured(threads: int | None = None) -> Limits:
    """The limits of this machine now. Takes about 0.5 s.

    Args:
        threads: that compute; None: torch's number.
    """
    with torch_threads(threads):
        macs = [*map(_product, SIDES), *(_convolution(*size) for size in IMAGES)]
        return Limits(max(macs), tuple((size, _copy(size)) for size in SIZES))


def _product(side: int) -> float:
    """Multiply-accumulates per second in a product of two square matrices, by torch and by oneDNN.

    torch's own product may be the slower one: on processors of AMD it is half as fast.
    """
    a, b, out = (torch.ones(side, side, dtype=torch.float32, device="cpu") for _ in range(3))
    seconds = _best(lambda: torch.mm(a, b, out=out))
    if torch.backends.mkldnn.is_available():
        linear, packed = torch.ops.mkldnn._linear_pointwise, torch.ops.mkldnn._reorder_linear_weight(b, side)
        seconds = min(seconds, _best(lambda: linear(a, packed, None, "none", [], "")))
    return side**3 / seconds


def _convolution(channels: int, side: int) -> float:
    """Multiply-accumulates per second in a convolution of 3x3 pixels by oneDNN; 0 where there is none."""
    if not torch.backends.mkldnn.is_available():
        return 0.0
    shape, ones, kernels = (1, channels, side, side), [1, 1], torch.ops.mkldnn
    image = torch.ones(shape, dtype=torch.float32, device="cpu").contiguous(memory_format=torch.channels_last)
    weight = torch.ones(channels, channels, 3, 3, dtype=torch.float32, device="cpu")
    packed = kernels._reorder_convolution_weight(weight, ones, ones, ones, 1, list(shape))
    seconds = _best(lambda: kernels._convolution_pointwise(image, packed, None, ones, ones, ones, 1, "none", [], ""))
    return (channels * 3 * side) ** 2 / seconds


def _copy(size: int) -> float:
    """Bytes per second that are read or written where so many are."""
    source, target = (torch.ones(size // 2, dtype=torch.uint8, device="cpu") for _ in range(2))
    return size / _best(lambda: target.copy_(source))


def _best(call: Callable[[], object]) -> float:
    """Seconds of the fastest of several calls."""
    with torch.inference_mode():
        call()
        found: list[float] = []
        end = time.perf_counter() + SECONDS
        while time.perf_counter() < end or not found:
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
    return max(min(found), 1e-9)
