"""How far the ranges of a program may grow after it was compiled, while what was found of its integers stays true."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tsopt.compiler.graph.program import Program

DOUBLINGS = 10  # of the ranges that a program is compiled for; calls beyond are captured anew


def reach(program: Program, verdict: Callable[[Program], Any]) -> dict[str, int]:
    """By Dim the highest size, for all of them together; none where a range has no end, and was examined without.

    Args:
        verdict: what an engine makes of a program, for the ranges of its signature.
    """
    dims = program.signature.dims
    if not dims or any(dim.high is None for dim in dims):
        return {}
    found = verdict(program)

    def highs(doublings: int) -> dict[str, int]:
        return {dim.name: (dim.high or 0) << doublings for dim in dims}

    def is_same(doublings: int) -> bool:
        grown = tuple(replace(dim, high=high) for dim, high in zip(dims, highs(doublings).values(), strict=True))
        return bool(verdict(replace(program, signature=replace(program.signature, dims=grown))) == found)

    low, high = 0, DOUBLINGS
    if is_same(high):
        return highs(high)
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if is_same(middle) else (low, middle)
    return highs(low)
