"""Compares one tensor with its reference. Knows nothing about models.

The tests and their numbers: PyTorch's `assert_close` defaults for one op, TorchDynamo's float64 criterion
(RMSE no more than twice eager's own distance from float64) for whole graphs, with a bound on the largest
error added, because an RMSE hides one bad element in a million.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# whole-graph tolerances by dtype: rtol and atol of the element test, tol of the float64 test
TOLERANCES: dict[torch.dtype, tuple[float, float, float]] = {
    torch.float64: (1e-7, 1e-7, 1e-7),
    torch.float32: (1e-4, 1e-5, 1e-4),
    torch.float16: (1e-2, 1e-3, 1e-3),
    torch.bfloat16: (3e-2, 1e-2, 1e-2),
    torch.complex128: (1e-7, 1e-7, 1e-7),
    torch.complex64: (1e-4, 1e-5, 1e-4),
}
FLIPPED = 0.01  # of values that are not floating-point numbers, such as classes
TRUSTED = 0.05  # of the size of the output: how far eager may be from float64 for float64 to decide anything
AMPLIFIED = 8  # times its error: how far eager may be from float64 where inputs are off by one rounding
# Of the size of the output, and of its largest element: further away, a neighbour has taken another decision, such as a
# top-k.
SHAKEN = 1e-3
NOISE = 2  # neighbours: each is a call of the model, and where it is noise, one will do
# Elements that are compared at once: they stay in the cache, and one thread does it, which waits for no other one.
PART = 1 << 15
HUGE = 2.0**480  # from here on, the sum of the squares of many numbers may be beyond float64
FEW = 1000  # elements: below, an RMSE says little and gets the wider factor


@dataclass(frozen=True, slots=True)
class Comparison:
    """One tensor against its reference.

    `test` is the one that decided: bits, places (of NaN and infinities), element, float64, rounding, decision or limit;
    `undecided` where eager is far from float64, and one rounding of the inputs changes its value as much.
    """

    ok: bool
    test: str
    max_difference: float = 0.0
    reason: str = ""


def compare(
    result: torch.Tensor,
    reference: torch.Tensor,
    *,
    exact: bool = False,
    limit: float | None = None,
    size: float = 0.0,
    reference64: Callable[[], torch.Tensor | None] | None = None,
    neighbours: Callable[[], Iterable[torch.Tensor]] = tuple,
    moved: Callable[[], Iterable[torch.Tensor]] = tuple,
) -> Comparison:
    """Compares two tensors.

    Args:
        exact: require bit-equal values (including the sign of zero and the positions of NaN, not their payload).
        limit: of the relative difference |result - reference| / |reference|, each the root of the sum of squares, for
            what was computed in a lower precision on purpose; of other values 1 % may differ. Infinite: only types, and
            where NaN and infinities are, decide.
        size: for `limit`, the root mean square that the reference counts as where its own is smaller.
        reference64: gives the float64 value, when the element test has failed.
        neighbours: gives the reference for inputs that are off by one rounding, when the float64 test has failed.
        moved: gives the outputs of the model itself for such inputs. It is called only without a float64 reference.
    """
    kind = _kind(result, reference)
    if kind:
        return Comparison(False, "type", reason=kind)
    result, reference = _plain(result), _plain(reference)
    if bit_equal(result, reference):
        return Comparison(True, "bits")
    difference = _max_difference(result, reference)
    if exact:
        return Comparison(False, "bits", difference, f"not bit-equal, max difference {difference:.3g}")
    if reference.dtype not in TOLERANCES:
        count = int((result != reference).sum())
        if limit is not None and count <= (FLIPPED if math.isfinite(limit) else 1.0) * reference.numel():
            return Comparison(True, "limit", difference)
        return Comparison(
            False, "element", difference, f"{count} of {reference.numel()} {reference.dtype} values differ"
        )
    result, reference = _real(result), _real(reference)
    places = next((text for parts in _parts(result, reference) if (text := _special_places(*parts))), "")
    if places:
        return Comparison(False, "places", difference, places)
    if limit is not None:
        return _limit_test(result, reference, limit, size, difference)
    rtol, atol, tol = TOLERANCES[reference.dtype]
    # The size of the output sets the absolute tolerance: 1e-5 would hide all of an output around 1e-8. Nor may single
    # huge numbers hide all others.
    scale = size_of(reference, HUGE) or size_of(reference) or 1.0
    bad = sum(_beyond(one, other, rtol, atol * scale) for one, other in _parts(result, reference))
    if not bad:
        return Comparison(True, "element", difference)
    failed = f"{bad} of {reference.numel()} values exceed rtol {rtol:g}, atol {atol * scale:.3g}"
    failed += f"; max difference {difference:.3g}"
    # For a float64 output too: what comes before it may be float32, and then eager itself is off.
    truth = reference64() if reference64 is not None else None
    if truth is None:
        near = itertools.islice(moved(), NOISE) if _may_be_rounding(result, reference, scale) else ()
        if any(_is_rounding(_real(other), result, reference, scale) for other in near):
            return Comparison(True, "rounding", difference)
        missing = "" if reference64 is None else "; no float64 reference could be computed"
        return Comparison(False, "element", difference, failed + missing)
    truth = _real(truth)
    if not all(_is_finite(part) for (part,) in _parts(truth)) or truth.shape != reference.shape:
        return Comparison(False, "element", difference, failed)
    others = map(_real, neighbours())
    mine, eager = _errors(result, truth), _errors(reference, truth)
    against = f"against float64: RMSE {mine[0]:.3g} (eager {eager[0]:.3g}), "
    against += f"largest error {mine[1]:.3g} (eager {eager[1]:.3g})"
    factor = 3.0 if reference.dtype in (torch.float16, torch.bfloat16) or reference.numel() < FEW else 2.0
    # Further away than rounding explains: in float64 a decision on the way, such as a top-k, was a different one.
    if eager[0] > TRUSTED * size_of(truth) + tol * scale / 10:
        is_noise = any(_is_as_far(other, result, reference, factor) for other in itertools.islice(others, NOISE))
        reason = f"{failed}; {against}; eager is too far from float64 for it to decide"
        return Comparison(False, "undecided" if is_noise else "float64", difference, reason)
    of_others = (_errors(other, truth) for other in others)
    is_near = _float64_test(mine, eager, atol * scale, tol * scale, factor, of_others)
    return Comparison(is_near, "float64", difference, "" if is_near else f"{failed}; {against}")


def _limit_test(
    result: torch.Tensor, reference: torch.Tensor, limit: float, size: float, difference: float
) -> Comparison:
    count = reference.numel()
    pairs = (map(_finite, parts) for parts in _parts(result, reference))
    apart = [_rms_and_largest(res.sub_(ref), count)[0] for res, ref in pairs]
    size, away = max(size_of(reference), size), math.hypot(*apart)
    if limit == math.inf or away <= limit * size:
        return Comparison(True, "limit", difference)
    reason = (
        f"relative error {away / size:.2%}, limit {limit:.2%}" if size else f"RMSE {away:.3g} where eager has zeros"
    )
    return Comparison(False, "limit", difference, reason)


def _float64_test(
    mine: tuple[float, float],
    eager: tuple[float, float],
    atol: float,
    tol: float,
    factor: float,
    neighbours: Iterable[tuple[float, float]],
) -> bool:
    """Whether the error of the result is of the size of eager's.

    Args:
        mine, eager: the RMSE and the largest error of each against float64.
        factor: how many times the RMSE of eager.
        neighbours: the same of eager's value for other inputs: one draw of an error that varies from draw to draw is
            not its size. Drawn one by one until the result is good enough.
    """
    (rmse, worst), (eager_rmse, eager_worst) = mine, eager
    largest = AMPLIFIED * eager_rmse
    for other_rmse, other_worst in itertools.chain((eager,), neighbours):
        if other_rmse <= largest:  # otherwise a decision was a different one there
            eager_rmse, eager_worst = max(eager_rmse, other_rmse), max(eager_worst, other_worst)
        if rmse <= factor * eager_rmse + tol / 10 and worst <= 10 * eager_worst + atol:
            return True
    return False


def _is_as_far(other: torch.Tensor, res: torch.Tensor, ref: torch.Tensor, factor: float) -> bool:
    """Whether a neighbour of eager's value is about as far from it as the result is."""
    (rmse, worst), (other_rmse, other_worst) = _errors(res, ref), _errors(other, ref)
    return rmse <= factor * other_rmse and worst <= 10 * other_worst


def _may_be_rounding(res: torch.Tensor, ref: torch.Tensor, scale: float) -> bool:
    """Whether any neighbour could be as far from the reference as a result is: each one is a call of the model."""
    rmse, worst = _errors(res, ref)
    return rmse <= 2.0 * SHAKEN * scale and worst <= 10 * SHAKEN * _largest(ref)


def _is_rounding(other: torch.Tensor, res: torch.Tensor, ref: torch.Tensor, scale: float) -> bool:
    """Whether a result is as far from the reference as a neighbour of it, in which all decisions are the same."""
    if other.shape != ref.shape:
        return False
    rmse, worst = _errors(other, ref)
    is_same = rmse <= SHAKEN * scale and worst <= SHAKEN * _largest(ref)
    return is_same and _is_as_far(other, res, ref, 2.0)


def _errors(value: torch.Tensor, truth: torch.Tensor) -> tuple[float, float]:
    """The RMSE and the largest error. What is not finite counts as zero."""
    pairs = (map(_finite, parts) for parts in _parts(value, truth))
    found = [_rms_and_largest(one.sub_(other), value.numel()) for one, other in pairs]
    return math.hypot(*(rms for rms, _ in found)), max(largest for _, largest in found)


def size_of(value: torch.Tensor, below: float = math.inf) -> float:
    """The root mean square of the numbers that are finite and below a limit; others count as zeros."""
    found = []
    for (part,) in _parts(value):
        part = _finite(part)
        rms, largest = _rms_and_largest(part, value.numel())
        if largest >= below:
            rms, _ = _rms_and_largest(part.masked_fill_(part.abs() >= below, 0.0), value.numel())
        found.append(rms)
    return math.hypot(*found)


def _largest(value: torch.Tensor) -> float:
    """The largest magnitude of a finite number."""
    return max(float(_finite(part).abs_().max()) for (part,) in _parts(value))


def _rms_and_largest(value: torch.Tensor, count: int) -> tuple[float, float]:
    """The root of the sum of squares over a count, and the largest magnitude.

    The squares are not those of the numbers themselves, which may be infinite.
    """
    largest = max(map(abs, map(float, value.aminmax())))
    return largest * math.sqrt(float((value / largest).square_().sum()) / count) if largest else 0.0, largest


def _kind(result: torch.Tensor, reference: torch.Tensor) -> str:
    if not isinstance(result, torch.Tensor):
        return f"a {type(result).__name__} where eager returns a tensor"
    if result.dtype != reference.dtype:
        return f"dtype {result.dtype}, eager has {reference.dtype}"
    if result.shape != reference.shape:
        return f"shape {list(result.shape)}, eager has {list(reference.shape)}"
    if result.device != reference.device:
        return f"device {result.device}, eager has {reference.device}"
    return ""


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The values themselves, where the tensor says that they are to be read conjugated or negated."""
    return tensor.resolve_conj().resolve_neg()


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """The real and imaginary parts of complex numbers; others as they are."""
    return torch.view_as_real(_plain(tensor)) if tensor.is_complex() else tensor


def are_equal(values: Sequence[Any], references: Sequence[Any]) -> bool:
    """Whether these are as many tensors, and none differs from its reference by more than rounding."""
    return len(values) == len(references) and all(
        isinstance(value, torch.Tensor) and compare(value, reference).ok
        for value, reference in zip(values, references, strict=True)
    )


def bit_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.numel() == 0:
        return True
    a, b = _plain(a), _plain(b)
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not a.is_floating_point():
        return torch.equal(a, b)
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = views[a.element_size()]
    same = a.contiguous().view(kind) == b.contiguous().view(kind)
    return bool(same.all()) or bool((same | (a.isnan() & b.isnan())).all())


def _parts(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same stretch of elements of each tensor, one after another; all have the same shape.

    A copy in float64 of the logits of a language model is large, and candidates are alive beside this process.
    """
    flat = [tensor.reshape(-1) for tensor in tensors]
    for start in range(0, flat[0].numel(), PART):
        yield tuple(tensor[start : start + PART] for tensor in flat)


def _beyond(result: torch.Tensor, reference: torch.Tensor, rtol: float, atol: float) -> int:
    """How many values are further from the reference than the tolerances allow."""
    ref = _finite(reference)
    away = _finite(result).sub_(ref).abs_()
    return int((away > ref.abs_().mul_(rtol).add_(atol)).sum())


def _max_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    wide = torch.complex128 if a.is_complex() else torch.float64
    found = 0.0
    for one, other in _parts(a, b):
        difference = one.to(wide).sub(other.to(wide)).abs()
        largest = float(difference.max())
        if not math.isfinite(largest):
            largest = float(difference.masked_fill_(~difference.isfinite(), 0.0).max())
        found = max(found, largest)
    return found


def _special_places(a: torch.Tensor, b: torch.Tensor) -> str:
    if _is_finite(a) and _is_finite(b):
        return ""
    if not torch.equal(a.isnan(), b.isnan()):
        return "NaN at different positions than in eager"
    infinite = a.isinf() | b.isinf()
    if bool(infinite.any()) and not torch.equal(a[infinite], b[infinite]):
        return "infinities at different positions than in eager"
    return ""


def _finite(value: torch.Tensor) -> torch.Tensor:
    """A copy in float64: differences of float16 values and squares of large float32 values overflow."""
    wide = value.to(torch.float64, copy=True)
    return wide if _is_finite(wide) else wide.masked_fill_(~wide.isfinite(), 0.0)


def _is_finite(value: torch.Tensor) -> bool:
    """Whether all numbers are finite, read once: their extremes are NaN where one of them is."""
    return all(map(math.isfinite, map(float, value.aminmax())))
