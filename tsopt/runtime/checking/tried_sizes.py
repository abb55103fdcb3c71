"""The sizes in a program's ranges at which it is tried: their ends, some between them, and those next to one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tsopt.compiler.calls.conditions import ALWAYS
from tsopt.compiler.calls.signature import Dim, Signature

BETWEEN = 7  # a size that few models have for other reasons
NEAR = 64  # sizes next to one that are looked at for another that the program is for


def beside(signature: Signature, dim: Dim, size: int) -> int:
    """Another size of a Dim, next to one of its own."""
    return next(other for other in _around(signature, dim, size) if other != size)


def _around(signature: Signature, dim: Dim, size: int) -> Iterator[int]:
    """Sizes of a Dim that the conditions on it admit, the nearest first; then the next ones, whatever they are."""
    row = [size + sign * i * dim.step for i in range(NEAR) for sign in (1, -1)]
    yield from (other for other in row if signature.admits(dim, other))
    yield from (size, size - dim.step)


def corners(signature: Signature) -> list[dict[str, int]]:
    """All at their lowest, all at their highest, and between them in two ways.

    Sizes of 0 and 1, which torch.export takes for another program, also beside the largest of the others.
    """
    dims = signature.dims
    picked = {dim.name: [next(_around(signature, dim, size)) for size in _picked(dim)] for dim in dims}
    highest = {name: sizes[-1] for name, sizes in picked.items()}
    found = [
        {dim.name: picked[dim.name][order[i % 2]] for i, dim in enumerate(dims)}
        for order in ((0, 0), (1, 2), (2, 1), (3, 3))
    ]
    found += with_ones(dims, highest)
    return [sizes for i, sizes in enumerate(found) if sizes not in found[:i]]


def with_ones(dims: Sequence[Dim], highest: Mapping[str, int]) -> list[dict[str, int]]:
    """Each size of 0 and 1 beside the largest of the others."""
    return [{**highest, dim.name: size} for dim in dims for size in range(dim.low, ALWAYS) if dim.admits(size)]


def _picked(dim: Dim) -> tuple[int, int, int, int]:
    assert dim.high is not None
    step = dim.step
    second = min(dim.low + step, dim.high)
    between = -(-BETWEEN // step) * step
    if not second < between < dim.high:
        between = (second + dim.high) // 2 // step * step
        odd = between + (BETWEEN - between) % 8  # like 7, one short of what is rounded up to
        between = odd if step == 1 and odd < dim.high else between
    return dim.low, second, max(between, second), dim.high
