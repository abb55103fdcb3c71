"""Compares every rewrite of a run on real inputs, with the tests of the final verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tsopt.compiler.calls.example import as_example
from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.values import laid_out, with_seeds, without_seeds
from tsopt.compiler.protect import protected
from tsopt.compiler.rewriting.faulty_rewrite import Case, Debugger, Finding, Trial
from tsopt.compiler.rewriting.pass_base import Limits, Pass, Repeat
from tsopt.compiler.rewriting.pipeline import PassRecord, run
from tsopt.errors import AccuracyError
from tsopt.runtime.checking.compare import TOLERANCES, compare
from tsopt.runtime.checking.decisions import decided_within_rounding
from tsopt.runtime.checking.inputs import SPECIAL
from tsopt.runtime.checking.made_up import made_up


@dataclass(frozen=True, slots=True)
class Debugged:
    """The result of comparing every rewrite.

    Attributes:
        findings: the rewrites that change values.
        rewrites, passes: how many were compared.
        trials: the inputs they were compared on.
        not_compared: how many values could not be compared, by reason.
    """

    program: Program
    records: list[PassRecord]
    findings: tuple[Finding, ...]
    rewrites: int
    passes: int
    trials: tuple[str, ...]
    not_compared: Mapping[str, int]

    def error(self) -> AccuracyError:
        """The first finding as an error."""
        first, more = self.findings[0], len(self.findings) - 1
        return AccuracyError(
            f"{title(first)} changes values" + (f" (and {more} more findings)" if more else ""),
            where=first.where or None,
            why=f"{first.difference}, on the {first.trial} input; declared numerics: {first.numerics.name}",
            fix=f"leave it out: --without {first.leave_out}",
        )


def title(finding: Finding) -> str:
    """The rule and pass of a finding."""
    return f"{finding.rule} in the pass {finding.in_pass}" if finding.rule else f"the pass {finding.in_pass}"


def debug(
    program: Program,
    example_input: Any,
    passes: Iterable[Pass | Repeat],
    limits: Limits,
    *,
    keep_text: bool = False,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Debugged:
    """Runs a pipeline and compares: every rewrite on the example, EXACT ones on NaN, inf and zeros of both signs too.

    All values of the program are held in memory at once.

    Raises:
        SignatureError: the example does not match the captured signature.
    """
    trials = []
    for item in made_up(program, as_example(example_input), seed):
        if item.kind in ("example", SPECIAL):
            leaves = program.signature.bind(item.example.args, item.example.kwargs)
            trials.append(Trial(item.kind, laid_out(program, leaves), exact_only=item.kind == SPECIAL))
    debugger = Debugger(trials, judge)
    with protected(None):
        after, records = run(
            with_seeds(program), passes, limits, keep_text=keep_text, progress=progress, observer=debugger
        )
    return Debugged(
        without_seeds(after),
        records,
        tuple(debugger.findings),
        debugger.rewrites,
        debugger.passes,
        tuple(trial.name for trial in trials),
        debugger.not_compared,
    )


def judge(case: Case) -> str:
    """What is wrong with a value that replaces another; empty if nothing is."""
    found = compare(case.new, case.old, exact=case.exact, reference64=case.truth)
    if not found.ok and found.test == "element" and case.old.dtype not in TOLERANCES and _is_a_tie(case):
        return ""
    return found.reason


def _is_a_tie(case: Case) -> bool:
    """Whether integers or booleans differ only where rounding decides."""
    return decided_within_rounding(case.node, case.wide(), case.values, case.new, case.old)
