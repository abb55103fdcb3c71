"""What an engine computes otherwise than PyTorch: the terms in which that is declared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from tsopt.compiler.analysis.intervals import Range

AS_BOOL = "bool"  # a cast to bool has an entry of its own among the ops


@dataclass(frozen=True, slots=True)
class Engine:
    """What an engine computes otherwise than PyTorch.

    Attributes:
        dtypes: the numbers that it holds of a dtype, where those are not all.
        by_op: the numbers that an op may take and make.
        compared: the numbers beyond which it cannot tell two operands of a comparison apart.
        absent: dtypes that it does not have, and what happens to them.
        rounds: float ops that it makes of a quotient, which is rounded before it is cut.
        beyond: what it does with an index that is out of range.
    """

    name: str
    dtypes: Mapping[torch.dtype, Range] = field(default_factory=dict)
    by_op: Mapping[str, Range] = field(default_factory=dict)
    compared: Mapping[str, Range] = field(default_factory=dict)
    absent: Mapping[torch.dtype, str] = field(default_factory=dict)
    rounds: frozenset[str] = frozenset()
    beyond: str = "accepts negative and out-of-range indices"


def signed(bits: int) -> Range:
    """The numbers of so many bits and a sign, without the lowest."""
    return Range(-(2**bits) + 1, 2**bits - 1)
