"""A captured program made ready for a race: its ranges of sizes validated, the passes run, their result checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tsopt.compiler.calls.example import Example
from tsopt.compiler.graph.drawing import Drawn, drawing_of
from tsopt.compiler.graph.program import Program
from tsopt.compiler.rewriting.pass_base import Pass, Repeat
from tsopt.compiler.rewriting.pipeline import PassRecord
from tsopt.compiler.sizes.generalize import NotGeneral
from tsopt.compiler.sizes.specialize import sizes_in, specialize
from tsopt.runtime.checking.held_out_sizes import ValidatedRanges, validate_ranges
from tsopt.runtime.racing.outcomes import warn
from tsopt.transforms import passes_in, transform_with_records


@dataclass(frozen=True, slots=True)
class Prepared:
    """A captured program with its ranges of sizes validated, before and after the passes.

    Attributes:
        reference: the program as captured, for all its sizes.
        captured: the same at the sizes of the example.
        optimized: for all sizes, correct at every size that was tried.
        drawing: of the reference.
    """

    reference: Program
    captured: Program
    optimized: Program
    records: tuple[PassRecord, ...]
    ranges: ValidatedRanges
    pass_seconds: float
    drawing: tuple[Drawn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """Which passes run, and at which sizes programs are tried.

    Attributes:
        without: names of rules and passes to skip.
        dynamic: the dynamic dimensions that were asked for, by argument and axis.
        progress: called with the name of each step.
    """

    passes: tuple[Pass | Repeat, ...]
    level: int
    without: tuple[str, ...]
    dynamic: Mapping[str, Mapping[int, str]] | None
    seed: int
    progress: Callable[[str], None]

    def __call__(self, model: Callable[..., Any], captured: Program, examples: Sequence[Example]) -> Prepared:
        """A captured program, ready for a race on the first example.

        Args:
            model: what the program was captured from, called at other sizes.
            examples: calls that differ in their dynamic sizes only.
        """
        ranges = ValidatedRanges(captured)
        if captured.signature.dims:
            self.progress("check other sizes")
            ranges = validate_ranges(model, captured, *examples, seed=self.seed, wanted=self.dynamic or {})
            captured = specialize(captured, sizes_in(captured.signature, examples[0]))
        before = drawing_of(ranges.program)  # which names its values; the passes keep these names
        start = time.perf_counter()
        optimized, records, checked = self._transformed(ranges)
        spent = time.perf_counter() - start
        return Prepared(ranges.program, captured, optimized, tuple(records), checked, spent, before)

    def _transformed(self, validated: ValidatedRanges) -> tuple[Program, list[PassRecord], ValidatedRanges]:
        """The program after the passes; a program for many sizes is correct at all sizes that were tried."""
        change = partial(
            transform_with_records, passes=self.passes, level=self.level, progress=self.progress, keep_going=True
        )
        reasons = []
        by_size = [item.name for item in passes_in(self.passes) if item.size_dependent]
        for left_out in (self.without, (*self.without, *by_size)) if validated.held_out else (self.without,):
            try:
                optimized, records = change(validated.program, without=left_out)
                for record in filter(lambda record: record.failed, records):
                    warn(f"tsopt: {validated.program.name}: {record.left_out}", UserWarning)
                return optimized, records, validated.checked_with(optimized)
            except NotGeneral as error:
                reasons.append("; ".join(filter(None, (error.what, error.where, error.why))))
        return (
            validated.program,
            [],
            replace(validated, notes=(*validated.notes, f"the passes were not applied: {reasons[-1]}")),
        )
