"""Chooses the sizes at which passes run, so that what holds at these holds at all sizes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from tsopt.compiler.calls.signature import Dim
from tsopt.compiler.graph.program import Program
from tsopt.compiler.sizes.specialize import Sizes, traced_sizes
from tsopt.compiler.sizes.survey import Survey, choices, fixed_sizes, spread, unseen

SAMPLES = 3  # at least
FEW_HELD_OUT = 2  # where the numbers of a program explain all of its sizes
WIDEST = 64  # a range without an end is tried up to here, or to twice what was traced
MOST, FEW = 4096, 64  # sizes that samples are taken from: over the whole range, near one
POWERS = 28  # of two: the sizes at which numbers have passed the limit of any clamp
MODULI = (2, 3, 4, 5, 7, 8)


def sample_sizes(program: Program, *, near: bool = False, survey: Survey | None = None) -> list[dict[str, int]]:
    """A few choices of sizes: different for each Dim, and none that the model has for other reasons.

    Args:
        near: those next to the sizes that were traced; otherwise the ends of the ranges and one between them. Followed
            by others, until the numbers that the model computes compare in every way in which they ever do.
    """
    survey = survey or Survey(program)
    traced = traced_sizes(program.signature)
    taken = set(fixed_sizes(program))
    chosen = _base(program, survey, traced, taken, near=near)
    ranges = _ranges(program, traced)
    if not near:
        ranges = {name: _within(sizes, taken) for name, sizes in ranges.items()}
    rows = choices(ranges)
    if near:
        rows.sort(key=lambda sizes: sum(_distance(size, traced[name]) for name, size in sizes.items()))
    rows.sort(key=lambda sizes: (len({*sizes.values()} - taken) < len(sizes), survey.coincidences(sizes)))
    bounds = survey.bounds()
    rows += _far(program, traced) if survey.limits() else []

    def runs(sizes: Sizes) -> bool:
        return survey.values(sizes) is not None

    chosen += unseen(survey.numbers, chosen, rows, bounds, runs=runs)
    if not survey.is_explained(chosen):
        chosen += unseen(survey.shapes, chosen, spread(ranges), bounds, runs=runs)
    return chosen


def held_out(program: Program, samples: Sequence[Sizes], survey: Survey) -> list[dict[str, int]]:
    """Sizes to check the result at, none of them a sample: the lowest, and some spread over the ranges."""
    ranges = _ranges(program, traced_sizes(program.signature))
    lowest = {dim.name: dim.low for dim in program.signature.dims}
    others = spread(ranges)
    few = others[:FEW_HELD_OUT] if survey.is_explained(samples) else others
    return [sizes for sizes in (lowest, *few) if sizes not in samples and survey.values(sizes) is not None]


def _base(
    program: Program, survey: Survey, traced: Mapping[str, int], taken: Collection[int], *, near: bool
) -> list[dict[str, int]]:
    """The first samples: the ends of each range and a size between them, or sizes near the traced ones."""
    taken = set(taken)
    found: dict[str, list[int]] = {}
    usual = dict(traced)
    for dim in program.signature.dims:
        known = list(_near(dim, traced[dim.name]) if near else _over(dim, traced[dim.name]))
        known = [size for size in known if program.signature.admits(dim, size)] or known
        free = [size for size in known if size not in taken]
        free = free if len(free) >= SAMPLES else known
        free = _ordinary(free, {size: survey.coincidences({**usual, dim.name: size}) for size in free})
        if near:
            free = sorted(free, key=partial(_distance, traced[dim.name]))[:SAMPLES]
        picked = [free[0], free[-1], free[len(free) // 2] if near else _between(free)]
        found[dim.name] = picked
        taken |= set(picked)
    # The low end of one size also meets the high end of another, if the model accepts that.
    turned = {name: picked[i % SAMPLES :] + picked[: i % SAMPLES] for i, (name, picked) in enumerate(found.items())}
    for way in (turned, found):
        chosen = [dict(zip(way, sizes, strict=True)) for sizes in zip(*way.values(), strict=True)]
        if all(survey.values(sizes) is not None for sizes in chosen):
            break
    return chosen


def _ordinary(sizes: Sequence[int], coincidences: Mapping[int, int]) -> list[int]:
    """The sizes with the fewest coincidences."""
    for most in sorted(set(coincidences.values())):
        found = [size for size in sizes if coincidences[size] <= most]
        if len(found) >= SAMPLES:
            return found
    return list(sizes)


def _between(sizes: Sequence[int]) -> int:
    """A size from the middle whose remainders differ from those of the ends."""
    middle = len(sizes) // 2
    near = sizes[max(middle - 8, 1) : middle + 9][:-1] or sizes[middle : middle + 1]
    ends = (sizes[0], sizes[-1])
    return min(
        near,
        key=lambda size: (
            sum(any(size % by == end % by for end in ends) for by in MODULI),
            abs(size - sizes[middle]),
        ),
    )


def _ranges(program: Program, traced: Mapping[str, int]) -> dict[str, range]:
    return {dim.name: _over(dim, traced[dim.name]) for dim in program.signature.dims}


def _far(program: Program, traced: Mapping[str, int]) -> list[dict[str, int]]:
    """Sizes further and further out, to the end of each range: the limit of a clamp may lie beyond those of samples."""
    found = []
    for dim in program.signature.dims:
        starts = [-(-(1 << power) // dim.step) * dim.step for power in range(POWERS)]
        tried = [range(start, start + FEW * dim.step, dim.step) for start in starts]
        tried += [] if dim.high is None else [range(dim.high - dim.high % dim.step, 0, -dim.step)[:FEW]]
        admitted = (next((size for size in sizes if program.signature.admits(dim, size)), None) for sizes in tried)
        found += [{**traced, dim.name: size} for size in admitted if size is not None]
    return found


def _within(sizes: range, taken: set[int]) -> range:
    """The sizes that cannot be mistaken for another number in the model."""
    free = [size for size in sizes if size not in taken] or sizes
    return range(free[0], free[-1] + 1, sizes.step)


def _over(dim: Dim, traced: int) -> range:
    """The sizes of a Dim from its low end on."""
    first = -(-max(dim.low, 2) // dim.step) * dim.step
    high = max(WIDEST, 2 * traced) if dim.high is None else dim.high
    return range(first, max(min(high, first + MOST * dim.step), first) + 1, dim.step)


def _near(dim: Dim, traced: int) -> range:
    """The sizes of a Dim around the traced one."""
    high = traced + FEW * dim.step if dim.high is None else max(min(dim.high, traced + FEW * dim.step), traced)
    return range(max(traced - FEW * dim.step, dim.step * -(-max(dim.low, 2) // dim.step)), high + 1, dim.step)


def _distance(a: int, b: int) -> int:
    return abs(a - b)
