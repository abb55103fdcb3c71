"""What this machine can do at best: how fast it multiplies, and how fast it moves bytes. Measured, not looked up.

The roofline model: Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore
architectures", 2009.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch

from tsopt.compiler.graph.ops import HALVES
from tsopt.compiler.precision_names import FP32, INT4, INT8, INT8_STATIC, INT8_WEIGHTS, INTEGER_VARIANTS
from tsopt.runtime.profiling.work import Work
from tsopt.runtime.thread_count import torch_threads

SIDES = (256, 512, 1024)  # of square matrices: the fastest product counts
IMAGES = ((64, 56), (128, 28), (256, 14))  # channels and side: convolutions reach a tenth more than products
SIZES = tuple(1 << exponent for exponent in range(14, 28, 2))  # bytes that are moved: caches are faster than memory
SECONDS = 0.03  # for each of these
# What a layer in a lower precision reads of its weights, and what it reads and writes of other values: at least this
# share of the bytes in float32. Engines pass integers on between layers only if the scales are known before the call.
WIDTHS = {name: (0.5, 0.5) for name in HALVES} | {
    INT8: (0.25, 1.0),
    INT8_WEIGHTS: (0.25, 1.0),
    INT8_STATIC: (0.25,) * 2,
    INT4: (0.125, 1.0),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of this machine.

    Attributes:
        macs: float32 multiply-accumulates per second, in products of matrices or convolutions, whichever are faster;
            in a profile, at least as many as a layer of it has reached.
        moved: bytes per second, read and written, by the size of what is moved, smaller sizes first.
        lowered: what `macs` is in lower precisions, by name, as far as they were measured.
    """

    macs: float
    moved: tuple[tuple[int, float], ...]
    lowered: Mapping[str, float] = field(default_factory=dict)

    def rate(self, precision: str) -> float | None:
        """Multiply-accumulates per second in a precision; None where that is not known."""
        return self.macs if precision == FP32 else self.lowered.get(precision)

    def seconds(self, work: Work, precision: str = FP32) -> float | None:
        """The least time that a layer can take: to multiply, or to read and write its working set.

        None where the rate in that precision is not known.

        Args:
            work: in full precision.
        """
        rate, moved = self.rate(precision), narrowed(work, precision).bytes
        return None if rate is None else max(work.macs / rate, moved / self.bandwidth(moved))

    def bandwidth(self, size: int) -> float:
        """Bytes per second for a working set of a size: the best that was measured for any that is not smaller."""
        place = max(bisect_right([known for known, _ in self.moved], size) - 1, 0)
        return max(rate for _, rate in self.moved[place:])


def narrowed(work: Work, precision: str) -> Work:
    """The work of a layer whose values have the width of a precision, from that in full precision."""
    of_weights, of_others = WIDTHS.get(precision, (1.0, 1.0))
    others = (round(size * of_others) for size in (work.inputs, work.outputs))
    return Work(work.macs, next(others), round(work.weights * of_weights), next(others))


def measured(threads: int | None = None, precisions: Collection[str] = ()) -> Limits:
    """The limits of this machine now. Takes about 0.5 s, and a tenth of a second for each precision.

    Args:
        threads: that compute; None: torch's number.
        precisions: lower ones to measure as well.
    """
    with torch_threads(threads):
        macs = [*map(_product, SIDES), *(_convolution(*size) for size in IMAGES)]
        moved = tuple((size, _copy(size)) for size in SIZES)
        found = {precision: _lower_product(precision) for precision in precisions}
    return Limits(max(macs), moved, {precision: rate for precision, rate in found.items() if rate})


def _lower_product(precision: str) -> float:
    """Multiply-accumulates per second in products in a lower precision; 0 where they cannot be measured."""
    if precision in HALVES:
        return max(_product(side, HALVES[precision]) for side in SIDES)
    has_kernel = torch.backends.mkldnn.is_available() and hasattr(torch.ops.onednn, "qlinear_pointwise")
    return max(map(_integer_product, SIDES)) if precision in INTEGER_VARIANTS and has_kernel else 0.0


def _product(side: int, dtype: torch.dtype = torch.float32) -> float:
    """Multiply-accumulates per second in a product of two square matrices, by torch and by oneDNN.

    torch's own product may be the slower one: on processors of AMD it is half as fast.
    """
    a, b, out = (torch.ones(side, side, dtype=dtype, device="cpu") for _ in range(3))
    seconds = _best(lambda: torch.mm(a, b, out=out))
    if torch.backends.mkldnn.is_available():
        linear = torch.ops.mkldnn._linear_pointwise
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(b, side)
            seconds = min(seconds, _best(lambda: linear(a, packed, None, "none", [], "")))
        except RuntimeError:  # not in this dtype on this processor
            pass
    return side**3 / seconds


def _integer_product(side: int) -> float:
    """Multiply-accumulates per second in a product of uint8 by int8, by oneDNN."""
    x = torch.ones(side, side, dtype=torch.uint8, device="cpu")
    weight = torch.ones(side, side, dtype=torch.int8, device="cpu")
    scales = torch.ones(side, dtype=torch.float32, device="cpu")
    zeros = torch.zeros(side, dtype=torch.int64, device="cpu")
    packed, linear = torch.ops.onednn.qlinear_prepack(weight, [side, side]), torch.ops.onednn.qlinear_pointwise.default
    as_float = (1.0, 0, torch.float32)
    return side**3 / _best(lambda: linear(x, 1.0, 0, packed, scales, zeros, None, *as_float, "none", [], ""))


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
