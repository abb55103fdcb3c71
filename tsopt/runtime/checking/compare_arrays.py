"""Compares a numpy array with its reference, like `compare` for tensors: for bundles without torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tsopt.compiler.precision_names import INTEGER_VARIANTS

Array = NDArray[np.generic]

# rtol and atol of the element test by dtype, and the limits of lower precisions: those of `compare` and `accuracy`.
TOLERANCES: dict[str, tuple[float, float]] = {
    "float64": (1e-7, 1e-7),
    "float32": (1e-4, 1e-5),
    "float16": (1e-2, 1e-3),
    "complex128": (1e-7, 1e-7),
    "complex64": (1e-4, 1e-5),
}
LIMITS = {"tf32": 1e-2, "bf16": 3e-2, "fp16": 1e-2, **dict.fromkeys(INTEGER_VARIANTS, 4.4e-2)}
HUGE = 2.0**480  # see `compare`
FLIPPED = 0.01  # of values that are not floating-point numbers, such as classes


@dataclass(frozen=True, slots=True)
class Compared:
    """Whether an array matches its reference, and the largest difference between finite values."""

    ok: bool
    max_difference: float = 0.0
    reason: str = ""


def compare_arrays(result: Array, reference: Array, *, limit: float | None = None) -> Compared:
    """Compares two arrays by the element test.

    Args:
        limit: of the relative difference, each the root of the sum of squares, for a lower precision.
    """
    if (result.dtype, result.shape) != (reference.dtype, reference.shape):
        return Compared(
            False, reason=f"{result.dtype} {list(result.shape)}, expected {reference.dtype} {reference.shape}"
        )
    name = str(reference.dtype)
    if name not in TOLERANCES:
        return _discrete(result, reference, limit)
    wide = np.complex128 if np.iscomplexobj(reference) else np.float64
    res, ref = result.astype(wide).reshape(-1).view(np.float64), reference.astype(wide).reshape(-1).view(np.float64)
    finite = np.isfinite(ref)
    if not np.array_equal(np.where(finite, 0.0, ref), np.where(np.isfinite(res), 0.0, res), equal_nan=True):
        return Compared(False, reason="NaN or infinities at different positions")
    res, ref = np.where(finite, res, 0.0), np.where(finite, ref, 0.0)
    difference = float(np.abs(res - ref).max(initial=0.0))
    if limit is not None:
        away, size = _rms(res - ref), _rms(ref)
        ok = away <= limit * size
        return Compared(ok, difference, "" if ok else f"RMSE {away:.3g} on values of RMS {size:.3g}, limit {limit:.2%}")
    rtol, atol = TOLERANCES[name]
    scale = _rms(np.where(np.abs(ref) < HUGE, ref, 0.0)) or _rms(ref) or 1.0
    bad = int((np.abs(res - ref) > atol * scale + rtol * np.abs(ref)).sum())
    return Compared(not bad, difference, f"{bad} of {ref.size} values exceed rtol {rtol:g}" if bad else "")


def _rms(value: NDArray[np.float64]) -> float:
    """The root mean square, of numbers whose squares may be beyond float64 too."""
    largest = float(np.abs(value).max(initial=0.0))
    return largest * float(np.sqrt(np.square(value / largest).mean())) if largest else 0.0


def _discrete(result: Array, reference: Array, limit: float | None) -> Compared:
    count = int((result != reference).sum())
    if not count or (limit is not None and count <= FLIPPED * reference.size):
        return Compared(True)
    return Compared(False, reason=f"{count} of {reference.size} {reference.dtype} values differ")
