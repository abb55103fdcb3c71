"""Measures of how closely the outputs of several calls agree with eager's, pooled into one number."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tsopt.compiler.calls.narrow_floats import widened
from tsopt.runtime.checking.compare import FLIPPED

Outputs = list[torch.Tensor]  # of one call


def unlike(found: Sequence[Outputs], wanted: Sequence[Outputs]) -> str:
    """What no measure of distance tells: other shapes, or NaN and infinities in other places; empty if neither."""
    for pairs in _pairs(found, wanted):
        if any(a.shape != b.shape for a, b in pairs):
            return "the shape of an output differs from eager"
        if not all(map(_same_specials, *zip(*pairs, strict=True))):
            return "NaN or infinities are not where eager has them"
    return ""


def relative_error(found: Sequence[Outputs], wanted: Sequence[Outputs]) -> float:
    """The largest of the relative errors of the outputs."""
    return max(relative_errors(found, wanted), default=0.0)


def relative_errors(found: Sequence[Outputs], wanted: Sequence[Outputs]) -> list[float]:
    """|found - wanted| / |wanted| of each output, over all inputs; infinite where it is undefined.

    At most 1 % of integer and boolean values may differ.
    """
    if unlike(found, wanted):
        return [math.inf] * max(len(wanted[0]), 1)
    errors = []
    for pairs in _pairs(found, wanted):
        if not pairs[0][1].is_floating_point():
            errors.append(math.inf if 1 - _share_equal(pairs) > FLIPPED else 0.0)
            continue
        finite = [_where_finite(a, b) for a, b in pairs]
        away = math.sqrt(sum(float((a - b).square().sum()) for a, b in finite))
        size = math.sqrt(sum(float(b.square().sum()) for _, b in finite))
        error = away / size if size else math.inf if away else 0.0
        errors.append(error if error == error else math.inf)  # NaN: squares of values in float64 may be infinite
    return errors


def cosine(found: Sequence[Outputs], wanted: Sequence[Outputs]) -> float:
    """The cosine similarity to eager of finite values, averaged over inputs; the lowest over the outputs.

    Of integer and boolean outputs, the share of values that are equal.
    """
    means = []
    for pairs in _pairs(found, wanted):
        if pairs[0][1].is_floating_point():
            means.append(sum(_cosine_of(a, b) for a, b in pairs) / len(pairs))
        else:
            means.append(_share_equal(pairs))
    return min(means, default=1.0)


def agreement(found: Sequence[Outputs], wanted: Sequence[Outputs]) -> float:
    """The cosine, or less where outputs are larger or smaller than eager's; 1 where all are the same.

    The cosine cannot tell three times the outputs; a relative error can, but says little of integers.
    """
    alike, error = cosine(found, wanted), relative_error(found, wanted)
    # What the cosine is where the error has no preferred direction.
    return alike if math.isinf(error) else min(alike, max(1 - error**2 / 2, -1.0))


def _cosine_of(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape or not _same_specials(a, b):
        return -1.0
    a, b = _where_finite(a, b)
    size = float(a.norm() * b.norm())
    if not size:
        return 1.0 if torch.equal(a, b) else 0.0
    value = float(a @ b) / size
    return value if value == value else -1.0


def top1(found: Sequence[Outputs], wanted: Sequence[Outputs]) -> float:
    """The share of rows, along the last axis, of the scores whose largest value is where eager has it.

    Without scores, the share of values that are equal, because classes may already have been chosen.
    """
    if all(scores_in(theirs) is None for theirs in wanted):
        return min(map(_share_equal, _pairs(found, wanted)), default=1.0)
    same = count = 0
    for mine, theirs in zip(found, wanted, strict=True):
        position = scores_in(theirs)
        if position is not None and mine[position].shape == theirs[position].shape:
            a, b = widened(mine[position]), widened(theirs[position])
            alike = a.argmax(-1) == b.argmax(-1)
            same += int((alike & (a.isnan() == b.isnan()).all(-1)).sum())  # the largest of NaN is the first NaN
            count += alike.numel()
    return same / count if count else 0.0


def scores_in(outputs: Outputs) -> int | None:
    """Which output of a call holds scores: the first floating-point tensor that has axes."""
    return next((i for i, leaf in enumerate(outputs) if leaf.is_floating_point() and leaf.dim()), None)


def _same_specials(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether NaN, inf and -inf are in the same places."""
    if not b.is_floating_point():
        return True
    a, b = widened(a), widened(b)
    other = ~(a.isfinite() & b.isfinite())
    return bool(((a == b) | (a.isnan() & b.isnan()) | ~other).all())


def _where_finite(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values where eager has finite ones, in float64."""
    a, b = widened(a), widened(b)
    finite = b.isfinite()
    return a[finite].double(), b[finite].double()


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
