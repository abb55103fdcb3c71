"""What an engine must know of a model's int8 weights: whether to round their inputs, and how large they are.

Without instructions for 8-bit integers, engines add two products in 16 bits, which saturate silently: a bundle that was
written where there are such instructions would be wrong elsewhere. Imports no torch, for bundles do without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tsopt.errors import BackendError
from tsopt.runtime.racing import environment

if TYPE_CHECKING:
    from tsopt.compiler.graph.program import Program

OPTION = "int8_weights"  # of an executable: the largest magnitude of its integer weights; 15 if all have 4 bits
GROUP = "int8_group"  # of an executable: how many neighbours share a scale where the engine rounds inputs itself
EXACT = ("avx_vnni", "avx512_vnni", "amx_int8", "asimddp")
NARROW = 64  # 2 * 255 * 64 is below 2^15


def to_options(program: Program) -> dict[str, int]:
    """The bundle options that record the int8 weights; empty if there are none."""
    from tsopt.compiler.graph import quantized

    largest = quantized.largest_magnitude(program)
    group = quantized.group_of(program)
    return {OPTION: largest, **({} if group is None else {GROUP: group})} if largest else {}


def check(options: Mapping[str, Any]) -> None:
    """Raises BackendError if sums with the stored weights could saturate on this processor."""
    largest = options.get(OPTION, 0)
    if largest <= NARROW or not set(environment.environment().flags).isdisjoint(EXACT):
        return
    raise BackendError(
        "the int8 weights of this bundle are not safe on this processor",
        why=f"they go up to {largest}, and without VNNI instructions sums of products above {NARROW} saturate",
        fix="export it again on a machine of this kind, where tsopt uses 7-bit weights; weights that the model "
        "quantized itself must fit in 7 bits",
    )
