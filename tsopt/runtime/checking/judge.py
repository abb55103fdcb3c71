"""The verdict on a candidate at the sizes of the example, at other sizes, and on real data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tsopt.compiler.calls.example import Example
from tsopt.compiler.precision_names import FP32
from tsopt.runtime.checking.accuracy import FIRST, LIMITS, MADE_UP, ONE_CALL, Oracle
from tsopt.runtime.checking.criterion import Criterion
from tsopt.runtime.checking.inputs import OF_THE_SAME_SIZE
from tsopt.runtime.checking.verdict import Verdict

TIMED = 3  # input sets that timing rotates through


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Eager's answers at sizes that the program was not traced with."""

    sizes: Mapping[str, int]
    oracle: Oracle

    def __str__(self) -> str:
        return said(self.sizes)


@dataclass(frozen=True, slots=True)
class Judge:
    """The verdict on candidates at the sizes of the example, and at all others that were tried.

    Attributes:
        criterion: decides how much accuracy a candidate in a lower precision may lose, in place of fixed limits.
        is_last: whether a criterion that is not cheap is asked, too.
    """

    oracle: Oracle
    held_out: Sequence[HeldOut] = ()
    criterion: Criterion | None = None
    is_last: bool = False

    @property
    def inputs(self) -> list[Example]:
        """Calls that the model takes, to start and to time candidates with."""
        ordinary = [
            item for item in self.oracle.expected if item.inputs.kind.startswith(("example", *OF_THE_SAME_SIZE))
        ]
        return [expected.call() for expected in ordinary[:TIMED]]

    @property
    def takes_long(self) -> bool:
        """See `EagerAnswers`."""
        return self.oracle.eager.takes_long

    def judge(
        self, candidate: Callable[..., Any], *, exact: bool = False, precision: str = FP32, part: str = ""
    ) -> Verdict:
        """See `Oracle.judge`. FIRST and ONE_CALL leave out the other sizes, FIRST and MADE_UP the criterion.

        Raises:
            Exception: whatever the candidate raises.
        """
        criterion = self.criterion if precision in LIMITS else None
        options: dict[str, Any] = {"exact": exact, "precision": precision}
        if criterion is not None:
            options["tolerance"] = math.inf
        verdict = self.oracle.judge(candidate, part=part, **options)
        for item in () if part in (FIRST, ONE_CALL) else self.held_out:
            if not verdict.ok:
                break
            found = item.oracle.judge(candidate, **options)
            if not found.ok:
                verdict = replace(found, reason=f"at {item}: {found.reason}")
        if criterion is None or part in (FIRST, MADE_UP) or not (criterion.is_cheap or self.is_last) or not verdict.ok:
            return verdict
        judgement = criterion.judge(candidate)
        if judgement.ok:
            return replace(verdict, notes=(*verdict.notes, judgement.text))
        return replace(verdict, ok=False, test="limit", reason=judgement.text)


def said(sizes: Mapping[str, int]) -> str:
    """`batch 4, tokens 16`."""
    return ", ".join(f"{name} {size}" for name, size in sizes.items())
