"""Finds the rewrite that changes values, by running the program on real inputs while passes rewrite it.

A rule is checked at its site, right before the rewrite, while the old and the new value are both in the graph. A pass
is checked by the program's outputs before and after it, and bisection over fuel then finds the rewrite. The comparison
of two values is supplied by the caller, so this file knows no tolerances.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.origin import origin_of
from tsopt.compiler.graph.program import Numerics, Program
from tsopt.compiler.graph.values import Unknown, Values
from tsopt.compiler.rewriting.pass_base import Changes, Done, Limits, Pass
from tsopt.compiler.rewriting.rewrite import Rule, RulePass, Site


@dataclass(frozen=True, slots=True)
class Trial:
    """Flat inputs to run on, state included. `exact_only`: fit for rewrites that keep every bit, not for others."""

    name: str
    inputs: tuple[torch.Tensor, ...]
    exact_only: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """A value, and what is to stand in its place.

    Attributes:
        node: whose value it is, in the program before the rewrite; `position` says which of its results.
        exact: whether every bit must be kept.
        values: those of the program before the rewrite.
        wide: gives them in float64.
    """

    node: fx.Node
    position: int
    old: torch.Tensor
    new: torch.Tensor
    exact: bool
    values: Values
    wide: Callable[[], Values]

    def truth(self) -> torch.Tensor | None:
        """The value in float64; None when it cannot be had."""
        found = self.wide()[self.node]
        return None if isinstance(found, Unknown) else ops.tensors_of(found)[self.position]


Judge = Callable[[Case], str]  # what is wrong; an empty text when nothing is


@dataclass(frozen=True, slots=True)
class Finding:
    """A rewrite that changes values more than its class of numerics allows.

    Attributes:
        rule: the rule, or what the pass calls its rewrite; empty when the pass did it in one piece.
        where: module path and source line.
        trial: the name of the inputs that show it.
        before, after: the calls, as programs are printed.
        leave_out: the name for `--without`.
    """

    in_pass: str
    rule: str
    where: str
    numerics: Numerics
    trial: str
    difference: str
    before: str
    after: str
    leave_out: str


@dataclass(frozen=True, slots=True)
class _Proposal:
    """What a rule wants to do; the driver may still decline it."""

    rule: Rule
    site: Site
    holes: tuple[Any, ...]
    result: fx.Node


class Debugger:
    """Observes a run of the pipeline and compares.

    Args:
        trials: what to run on.
        judge: says what is wrong with a value that takes the place of another.

    Attributes:
        findings: what went wrong.
        rewrites, passes: how many were compared.
        not_compared: how many values could not be, by reason.
    """

    def __init__(self, trials: Sequence[Trial], judge: Judge) -> None:
        self.trials, self.judge = tuple(trials), judge
        self.findings: list[Finding] = []
        self.rewrites = self.passes = 0
        self.not_compared: Counter[str] = Counter()
        self._in_pass = ""
        self._proposal: _Proposal | None = None
        self._values: list[Values] = []
        self._found_before = 0

    def start(self, item: Pass, program: Program) -> Pass:
        self._in_pass, self._proposal, self._found_before = item.name, None, len(self.findings)
        self._values = [Values.on(program, trial.inputs) for trial in self.trials]
        if not isinstance(item, RulePass):
            return item
        return replace(item, rules=tuple(self._watched(rule) for rule in item.rules))

    def _watched(self, rule: Rule) -> Rule:
        def body(at: Site, *holes: Any) -> Any:
            self._proposal = None
            result = rule.body(at, *holes)
            if isinstance(result, fx.Node):
                self._proposal = _Proposal(rule, at, holes, result)
            return result

        return replace(rule, body=body)

    def on_rewrite(self) -> None:
        """Judges the rewrite that is about to be made."""
        proposal, self._proposal = self._proposal, None
        if proposal is None:
            return  # a pass of another kind: judged by what the program returns
        root, exact = proposal.site.root, proposal.rule.numerics == Numerics.EXACT
        self.rewrites += 1
        for trial, values in zip(self.trials, self._values, strict=True):
            if trial.exact_only and not exact:
                continue
            wide = functools.cache(functools.partial(values.in_float64, _nodes_in(proposal.holes)))
            wrong = self._difference(root, values, values[proposal.result], exact, wide)
            if wrong:
                self.findings.append(self._at_site(proposal, trial, wrong))
                break
        for values in self._values:
            values.forget_users(root)  # from now on they are computed from the result, which may differ by rounding

    def _at_site(self, proposal: _Proposal, trial: Trial, wrong: str) -> Finding:
        site, name = proposal.site, proposal.rule.name
        lines = _lines(site.program)
        made = [lines[node] for node in site.created if ops.is_call(node)]
        after = "\n".join(made) or lines[proposal.result]
        numerics, where = proposal.rule.numerics, origin_of(site.root)
        return Finding(self._in_pass, name, where, numerics, trial.name, wrong, lines[site.root], after, name)

    def finish(self, item: Pass, before: Program, after: Program, changes: Changes, limits: Limits) -> None:
        """Judges what the program returns after a pass, unless a rewrite of it was found wrong already."""
        if after is before or len(self.findings) > self._found_before:
            return
        self.passes += 1
        for trial in self.trials:
            if trial.exact_only and changes.numerics != Numerics.EXACT:
                continue
            found = self._at_outputs(before, after, changes, trial)
            if found is None:
                continue
            position, wrong = found
            done = self._culprit(item, before, changes, trial, limits) or Done("", "")
            self.findings.append(
                Finding(
                    item.name,
                    done.rule,
                    done.where,
                    changes.numerics,
                    trial.name,
                    f"output {before.signature.outputs[position].name}: {wrong}",
                    _lines(before)[before.outputs[position]],
                    _lines(after)[after.outputs[position]],
                    item.name,
                )
            )
            return

    def _at_outputs(self, before: Program, after: Program, changes: Changes, trial: Trial) -> tuple[int, str] | None:
        """The position of the first output that is wrong, and what is wrong with it."""
        old, new = Values.on(before, trial.inputs), Values.on(after, trial.inputs)
        wide = functools.cache(functools.partial(old.in_float64, ()))
        exact = changes.numerics == Numerics.EXACT
        for position, (node, result) in enumerate(zip(before.outputs, after.outputs, strict=True)):
            wrong = self._difference(node, old, new[result], exact, wide)
            if wrong:
                return position, wrong
        return None

    def _culprit(self, item: Pass, before: Program, changes: Changes, trial: Trial, limits: Limits) -> Done | None:
        """The rewrite that makes an output wrong, by bisection; None for a pass that takes no fuel."""

        def is_wrong(fuel: int) -> bool:
            edited = before.copy()
            some = item.run(edited, Limits(limits.numerics, fuel, limits.without))
            return self._at_outputs(before, edited, some, trial) is not None

        right, wrong = 0, len(changes.done)
        if is_wrong(0):
            return None
        while right + 1 < wrong:
            middle = (right + wrong) // 2
            right, wrong = (right, middle) if is_wrong(middle) else (middle, wrong)
        return changes.done[wrong - 1]

    def _difference(self, node: fx.Node, values: Values, new: Any, exact: bool, wide: Callable[[], Values]) -> str:
        """What is wrong with the new value of a node."""
        old = values[node]
        unknown = next((value for value in (old, new) if isinstance(value, Unknown)), None)
        if unknown is new and unknown.fails:
            return f"the new value cannot be computed: {unknown.reason}"
        if unknown is not None:
            self.not_compared[unknown.reason] += 1
            return ""
        pairs = enumerate(zip(ops.tensors_of(old), ops.tensors_of(new), strict=True))
        cases = (Case(node, i, a, b, exact, values, wide) for i, (a, b) in pairs)
        return next((wrong for wrong in map(self.judge, cases) if wrong), "")


def _nodes_in(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(value, found.append)
    return found


def _lines(program: Program) -> dict[fx.Node, str]:
    return {node: line.strip() for node, line in zip(program.graph.nodes, program.lines(origins=False), strict=True)}
