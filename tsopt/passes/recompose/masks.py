"""Attention masks: what they hide, whether they may hide a whole row, and how several are combined into one.

`scaled_dot_product_attention` returns 0 for a row of scores that are all -inf, where softmax returns NaN. So
a mask is accepted only if it cannot hide a whole row: by its values, or because it is finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from tsopt.compiler.graph.ops import aten
from tsopt.compiler.rewriting.rewrite import Site, Skip
from tsopt.passes.recompose.bounds import bounds
from tsopt.passes.recompose.layouts import reshaped

COMPUTED_MASK = "the mask is computed, and a row may be all -inf: softmax returns NaN there, but the fused op returns 0"
EMPTY_ROW = "the mask hides a whole row: softmax returns NaN or uniform weights there, but the fused op returns 0"
WEAK_FILL = "the fill value of the mask is not low enough to hide a score"
HALF_MASK = "float16 has no value low enough to hide a score"
MIXED_MASKS = "a computed mask cannot be combined with the other masks"

HIDDEN = -1e9  # no score of use is as low: what is hidden by this is hidden by -inf


@dataclass(frozen=True, slots=True)
class Mask:
    """One mask on scores.

    value: what is added, or a boolean.
    shape: the shape of the scores where it is applied.
    factor: what an added mask is multiplied by.
    fill: what hidden scores are replaced by; None for an added mask.
    keeps: whether True is what stays.
    """

    value: fx.Node
    shape: tuple[int, ...]
    factor: float = 1.0
    fill: float | None = None
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class Grid:
    """Batch and heads of attention as factors that every reshape between the masks keeps whole."""

    sizes: tuple[int, ...]
    rows: int
    columns: int

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, ...]]) -> Grid | None:
        """The coarsest factors that the leading axes of all shapes are made of; None when they do not nest."""
        cuts = {math.prod(shape[:i]) for shape in shapes for i in range(len(shape) - 1)} | {1}
        sizes, last = [], 1
        for cut in sorted(cuts - {1}):
            if cut % last:
                return None
            sizes.append(cut // last)
            last = cut
        return cls(tuple(sizes), *shapes[0][-2:])

    def fit(self, own: Sequence[int], outer: tuple[int, ...]) -> list[int]:
        """The shape, over these factors, of a value that broadcasts to a shape of scores."""
        padded = [1] * (len(outer) - len(own)) + list(own)
        left, found = list(self.sizes), []
        for mine, whole in zip(padded[:-2], outer[:-2], strict=True):
            taken = 1
            while taken < whole:
                size = left.pop(0)
                taken *= size
                found.append(1 if mine == 1 else size)
        return [*found, *padded[-2:]]

    def split(self, fitted: Sequence[int], preferred: int) -> tuple[list[int], list[int]] | None:
        """([batch, heads] of the scores, of a value) where the value is 1 or whole over each; None where it is not.

        `preferred` is the batch where that is possible.
        """
        for i in sorted(range(len(self.sizes) + 1), key=lambda i: math.prod(self.sizes[:i]) != preferred):
            wholes, mine = (self.sizes[:i], self.sizes[i:]), (fitted[:i], fitted[i:-2])
            if all(set(own) <= {1} or tuple(own) == whole for own, whole in zip(mine, wholes, strict=True)):
                return [math.prod(whole) for whole in wholes], [math.prod(own) for own in mine]
        return None


def is_far(value: float, dtype: torch.dtype) -> bool:
    """Whether a number hides a score that it is added to, or that it replaces."""
    return value <= max(HIDDEN, torch.finfo(dtype).min)


# ---- what constant masks say ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Known:
    """Constant masks together, on the CPU: where they hide, and what they add elsewhere."""

    hidden: torch.Tensor
    added: torch.Tensor

    def has_empty_row(self, dtype: torch.dtype) -> bool:
        """Whether a row is hidden as a whole; where scores are replaced, also by numbers that are added."""
        low = max(HIDDEN, torch.finfo(dtype).min) if bool(self.hidden.any()) else -math.inf
        return bool((self.hidden | (self.added <= low)).all(-1).any())

    def is_nothing(self) -> bool:
        return not bool(self.hidden.any()) and bool((self.added == 0).all())

    def is_causal(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Whether row i sees the columns up to i, all of them alike, and nothing else is said."""
        if rows != columns:
            return False
        hidden = self.hidden | (self.added <= max(HIDDEN, torch.finfo(dtype).min))
        causal = torch.ones(rows, columns, dtype=torch.bool, device="cpu").triu(1)
        return (
            hidden.shape[-2:] == causal.shape
            and bool((hidden == causal).all())
            and bool(((self.added == 0) | hidden).all())
        )


def known(at: Site, masks: Sequence[Mask], grid: Grid, dtype: torch.dtype) -> Known | None:
    """The constant ones of some masks; None when one is NaN or +inf somewhere."""
    wide = torch.promote_types(dtype, torch.float32)
    hidden, added = (torch.zeros(1, 1, dtype=kind, device="cpu") for kind in (torch.bool, wide))
    for mask in masks:
        value = at.value(mask.value)
        if value is None:
            continue
        value = value.cpu().reshape(grid.fit(value.shape, mask.shape))
        if mask.fill is not None:
            hidden = hidden | (value != mask.keeps)
        else:
            added = added + (value * mask.factor).to(dtype).to(wide)
    if bool(added.isnan().any()) or bool((added == math.inf).any()):
        return None
    return Known(*torch.broadcast_tensors(hidden, added))


# ---- the mask of the op -----------------------------------------------------------------------------------

Chosen = tuple[fx.Node | None, bool]


def choose(
    at: Site, masks: Sequence[Mask], grid: Grid, dtype: torch.dtype, zeroed: fx.Node | None
) -> Chosen | Skip | None:
    """(mask over the factors of the grid, is_causal) of the op that says what all masks say.

    Args:
        masks: outermost first.
        zeroed: the boolean where the weights are set to 0 after softmax: its rows may be empty, as in the op.
    """
    constants = known(at, masks, grid, dtype)
    if constants is None:
        return None
    hides = [mask for mask in masks if mask.fill is not None]
    adds = [mask for mask in masks if mask.fill is None]
    limit = _limit(hides, dtype)
    if any(not is_far(mask.fill or 0.0, dtype) for mask in hides):
        return at.skip(WEAK_FILL)
    if zeroed is None and constants.has_empty_row(dtype):
        return at.skip(EMPTY_ROW)
    if zeroed is not None or any(at.value(mask.value) is None for mask in hides):
        if hides != list(masks[: len(hides)]) or any(not _is_within(at, mask, limit) for mask in adds):
            return at.skip(MIXED_MASKS)
        return _computed(at, masks, grid, dtype) if zeroed is None else _zeroed(at, masks, grid, dtype, zeroed)
    if any(at.value(mask.value) is None and not _is_within(at, mask, limit) for mask in adds):
        return at.skip(COMPUTED_MASK)
    if any(at.value(mask.value) is None for mask in adds):
        lowest = constants.added.double() - sum(_largest(at, mask) for mask in adds if at.value(mask.value) is None)
        if bool((lowest < torch.finfo(dtype).min).all(-1).any()):
            return at.skip(EMPTY_ROW)
        return _sum(at, masks, grid, dtype), False
    if constants.is_nothing():
        return None, False
    if constants.is_causal(grid.rows, grid.columns, dtype):
        return None, True
    if not adds:
        return at.constant(~constants.hidden, f"{hides[0].value.target}.keep"), False
    return _sum(at, masks, grid, dtype), False


def _limit(hides: Sequence[Mask], dtype: torch.dtype) -> float:
    """How large an added number may be, so that what is hidden stays below what is not."""
    fills = [-mask.fill / 2 for mask in hides if mask.fill is not None and mask.fill != -math.inf]
    # NOTE: next to half of the lowest number it must be rounded away, see `_computed`.
    rounded_away = torch.finfo(dtype).max * torch.finfo(dtype).eps / 64
    return min([torch.finfo(dtype).max, *fills, *([rounded_away] if fills else [])])


def _sum(at: Site, masks: Sequence[Mask], grid: Grid, dtype: torch.dtype) -> fx.Node:
    """Added masks in one, and -inf where others hide."""
    total: fx.Node | None = None
    adds = [mask for mask in masks if mask.fill is None]
    for mask in sorted(adds, key=lambda mask: at.value(mask.value) is not None):  # constants to the right
        value = reshaped(at, mask.value, grid.fit(at.type(mask.value).shape, mask.shape))
        if mask.factor != 1:
            value = at.call(aten.mul.Tensor, value, mask.factor)
        if value.meta["val"].dtype != dtype:
            value = at.call(aten.to.dtype, value, dtype)
        total = value if total is None else at.call(aten.add.Tensor, total, value)
    assert total is not None, "there are no masks to add"
    for mask in (mask for mask in masks if mask.fill is not None):
        total = at.call(aten.masked_fill.Scalar, total, _hides(at, mask, grid), -math.inf)
    return total


def _hides(at: Site, mask: Mask, grid: Grid) -> fx.Node:
    """A boolean mask over the factors of the grid, True where it hides."""
    value = reshaped(at, mask.value, grid.fit(at.type(mask.value).shape, mask.shape))
    return at.call(aten.logical_not.default, value) if mask.keeps else value


def _zeroed(at: Site, masks: Sequence[Mask], grid: Grid, dtype: torch.dtype, zeroed: fx.Node) -> Chosen | Skip | None:
    """The mask where hidden weights are set to 0 afterwards: an empty row is 0, as in the op."""
    hides = [mask for mask in masks if mask.fill is not None]
    if [(mask.value, mask.keeps) for mask in hides] != [(zeroed, False)]:
        return at.skip(MIXED_MASKS)
    if len(masks) > 1:
        return _sum(at, masks, grid, dtype), False
    return at.call(aten.logical_not.default, _hides(at, hides[0], grid)), False


def _computed(at: Site, masks: Sequence[Mask], grid: Grid, dtype: torch.dtype) -> Chosen | Skip | None:
    """A finite number added where a computed mask hides.

    It is half of the lowest, so that a score added to it is rounded away: a row that is hidden as a whole is uniform,
    as it is where its scores have all been replaced by one number.
    """
    hides = [mask for mask in masks if mask.fill is not None]
    if any(mask.fill == -math.inf for mask in hides):
        return at.skip(COMPUTED_MASK)
    if len({mask.fill for mask in hides}) > 1:
        return at.skip(MIXED_MASKS)
    if dtype == torch.float16:
        return at.skip(HALF_MASK)
    hidden = _hides(at, hides[0], grid)
    for mask in hides[1:]:
        hidden = at.call(aten.logical_or.default, hidden, _hides(at, mask, grid))
    low = at.call(aten.mul.Tensor, at.call(aten.to.dtype, hidden, dtype), torch.finfo(dtype).min / 2)
    adds = masks[len(hides) :]
    return (at.call(aten.add.Tensor, low, _sum(at, adds, grid, dtype)) if adds else low), False


def _is_within(at: Site, mask: Mask, limit: float) -> bool:
    """Whether an added mask is finite whatever the input, and no larger than a number."""
    return _largest(at, mask) <= limit


def _largest(at: Site, mask: Mask) -> float:
    """The largest absolute value of an added mask, whatever the input."""
    found = bounds(at, mask.value)
    return math.inf if found is None else max(abs(end * mask.factor) for end in found)
