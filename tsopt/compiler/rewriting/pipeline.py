"""Runs passes on a private copy of a program, checks it after each, and records what was rewritten and declined."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import fx

from tsopt.compiler.analysis.liveness import peak_bytes
from tsopt.compiler.graph.labels import Labels
from tsopt.compiler.graph.origin import record_rewrite, rule_of
from tsopt.compiler.graph.program import Numerics, Program
from tsopt.compiler.graph.quantized import users_rounding
from tsopt.compiler.graph.verify import AliasGroups, output_aliases, verify_program
from tsopt.compiler.rewriting.pass_base import Changes, Declined, Done, Limits, Pass, Repeat
from tsopt.errors import InvalidProgram, PassError, RuleError, TsoptError


class Observer(Protocol):
    """Observes each pass before and after it runs, and each rewrite before it is applied."""

    def start(self, item: Pass, program: Program) -> Pass:
        """The pass to run instead of `item`; `program` is the copy that it will edit."""

    def on_rewrite(self) -> None:
        """Called when the old value and its replacement are both in the graph."""

    def finish(self, item: Pass, before: Program, after: Program, changes: Changes, limits: Limits) -> None:
        """Called when `after` has passed the checks."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a program: calls, bytes of weights, and peak bytes of live activations."""

    nodes: int
    weight_bytes: int
    peak_bytes: int

    @classmethod
    def of(cls, program: Program) -> Size:
        return cls(program.node_count, weight_bytes(program), peak_bytes(program))


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One pass as it was run. `text` is the program afterwards, when asked for; `seconds` includes the checks.

    failed: why the pass was left out, where it broke the program or raised.
    rule: the one that was left out, where it was only a rule of the pass that failed.
    """

    name: str
    changed: bool
    before: Size
    after: Size
    seconds: float
    done: tuple[Done, ...] = ()
    declined: tuple[Declined, ...] = ()
    numerics: Numerics = Numerics.EXACT
    text: str = field(default="", repr=False)
    failed: str = ""
    rule: str = ""

    @property
    def left_out(self) -> str:
        """Why this pass, or a rule of it, was left out, as a sentence."""
        what = f"the rule {self.rule} of the pass {self.name}" if self.rule else f"the pass {self.name}"
        why = self.failed.replace(f"the pass {self.name} ", "it ", 1)
        return f"{what} was left out: {why}" if self.failed else ""


class _Failed(Exception):
    """A pass has failed, or a rule of it. Never leaves this file."""

    def __init__(self, name: str, error: TsoptError) -> None:
        super().__init__(name)
        self.name, self.error = name, error
        self.rule = error.rule if isinstance(error, RuleError) else ""

    @property
    def reason(self) -> str:
        return "; ".join(filter(None, (self.error.what, self.error.where, self.error.why)))


def run(
    program: Program,
    passes: Iterable[Pass | Repeat],
    limits: Limits | None = None,
    *,
    keep_text: bool = False,
    progress: Callable[[str], None] | None = None,
    observer: Observer | None = None,
    keep_going: bool = False,
) -> tuple[Program, list[PassRecord]]:
    """Runs a pipeline over a copy of a program, with every invariant checked after every pass.

    Args:
        keep_text: keep the text after each pass, in which values have names that last (`Labels`).
        keep_going: a pass that fails, or a rule that raises, is left out, and all others run; a record says why.

    Raises:
        PassError: a pass raised an error, broke an invariant or misreported a change, or a Repeat did not converge.
        TsoptError: whatever else of ours a pass raises; RuleError where a rule of it failed.
    """
    verify_program(program, touched=())  # the types are the capture's; all are re-derived at the end
    limits, passes, failed = limits or Limits(), tuple(passes), dict[str, PassRecord]()
    while True:
        try:
            left_out = replace(limits, without=limits.without | failed.keys())
            edited, records = _run(program, passes, left_out, keep_text, progress, observer)
            return edited, [*records, *failed.values()]
        except _Failed as failure:
            lost = failure.rule or failure.name
            if not keep_going or lost in failed:
                raise failure.error from failure.error.__cause__
            # NOTE: it has edited the only copy, so the others begin again; passes hardly ever fail.
            size = Size.of(program)
            failed[lost] = PassRecord(failure.name, False, size, size, 0.0, failed=failure.reason, rule=failure.rule)


def _run(
    program: Program,
    passes: tuple[Pass | Repeat, ...],
    limits: Limits,
    keep_text: bool,
    progress: Callable[[str], None] | None,
    observer: Observer | None,
) -> tuple[Program, list[PassRecord]]:
    aliases = output_aliases(program)
    if observer is not None:
        limits = replace(limits, on_rewrite=observer.on_rewrite)
    labels = None
    if keep_text:
        labels = Labels()
        labels.of(program)  # what is not changed keeps these names
    state = _Run(limits, labels, progress or (lambda name: None), observer, aliases, _Measured.of(program))
    edited = program.copy()
    for item in passes:
        edited = _run_item(edited, item, state)
    try:
        verify_program(edited, aliases=aliases)
    except InvalidProgram as error:  # what the checks of single passes have not seen
        verify_program(program)
        raise _Failed([record.name for record in state.records if record.changed][-1], error) from error
    changed = any(record.changed for record in state.records)
    return edited if changed else program, state.records


@dataclass(frozen=True, slots=True)
class _Measured:
    """Fingerprint and size of a program, computed once: what comes out of a pass goes into the next."""

    fingerprint: str
    size: Size

    @classmethod
    def of(cls, program: Program, fingerprint: str = "") -> _Measured:
        return cls(fingerprint or program.fingerprint(), Size.of(program))


class _Snapshot:
    """A graph as it was. Nodes replace their arguments and never change them, so to compare by identity is enough."""

    def __init__(self, program: Program) -> None:
        self._nodes = {node: self._parts(node) for node in program.graph.nodes}

    @staticmethod
    def _parts(node: fx.Node) -> tuple[object, ...]:
        return node.target, node.args, node.kwargs, node.meta.get("val")

    def is_same(self, node: fx.Node) -> bool:
        before = self._nodes.get(node)
        return before is not None and all(a is b for a, b in zip(before, self._parts(node), strict=True))

    def new(self, program: Program) -> Iterator[fx.Node]:
        """Calls and weights that were not there before."""
        return (node for node in program.graph.nodes if node not in self._nodes)

    def touched(self, program: Program) -> list[fx.Node]:
        """Calls that are new, or whose target, arguments or recorded type are others than before."""
        return [node for node in program.calls() if not self.is_same(node)]

    def is_current(self, program: Program) -> bool:
        """Whether the graph is what it was, in the same order. A graph that is not may still have the same text."""
        return list(self._nodes) == list(program.graph.nodes) and all(map(self.is_same, self._nodes))


@dataclass
class _Run:
    limits: Limits
    labels: Labels | None
    progress: Callable[[str], None]
    observer: Observer | None
    aliases: AliasGroups
    measured: _Measured
    records: list[PassRecord] = field(default_factory=list)
    at_rest: dict[int, str] = field(default_factory=dict)  # by pass, the fingerprint that it found nothing to do on


def _run_item(program: Program, item: Pass | Repeat, state: _Run) -> Program:
    records = state.records
    if not isinstance(item, Repeat):
        if item.name in state.limits.without or item.numerics > state.limits.numerics:
            return program
        if item.numerics == Numerics.LOSSY and users_rounding(program) is not None:  # see there
            return program
        if state.at_rest.get(id(item)) == state.measured.fingerprint:
            return program
        state.progress(item.name)
        program, record = _run_pass(program, item, state)
        records.append(record)
        return program
    for _ in range(item.limit):
        before = len(records)
        for inner in item.passes:
            program = _run_item(program, inner, state)
        if not any(record.changed for record in records[before:]):
            return program
    rules = sorted({done.rule for record in records[before:] for done in record.done})
    error = PassError(
        f"a Repeat did not converge in {item.limit} rounds",
        why=f"rules still being applied: {', '.join(rules)}",
        fix="leave out one of the rules that undo each other: --without RULE",
    )
    raise _Failed([record.name for record in records[before:] if record.changed][-1], error)


def _run_pass(program: Program, item: Pass, state: _Run) -> tuple[Program, PassRecord]:
    start = time.perf_counter()
    edited = program if state.observer is None else program.copy()  # who observes wants to see both
    chosen = item if state.observer is None else state.observer.start(item, edited)
    snapshot = _Snapshot(edited)
    changes = _changes(chosen, edited, state.limits)
    _prune_weights(edited)
    before = state.measured
    fingerprint = before.fingerprint if snapshot.is_current(edited) else edited.fingerprint()
    changed = before.fingerprint != fingerprint
    if changed != bool(changes.done):
        said = "a change but made none" if changes.done else "no change but made one"
        error = PassError(f"the pass {item.name} reported {said}", fix=f"leave it out: --without {item.name}")
        raise _Failed(item.name, error)
    if changed:
        record_rewrite((node for node in snapshot.new(edited) if not rule_of(node)), item.name, ())
        _check(edited, item, snapshot.touched(edited), state.aliases)
        edited.numerics = max(program.numerics, changes.numerics)
        state.measured = _Measured.of(edited, fingerprint)
    else:
        edited = program
        state.at_rest[id(item)] = fingerprint
    if state.observer is not None:
        state.observer.finish(item, program, edited, changes, state.limits)
    return edited, PassRecord(
        item.name,
        changed,
        before.size,
        state.measured.size,
        time.perf_counter() - start,
        changes.done,
        changes.declined,
        changes.numerics,
        state.labels.text(edited) if state.labels is not None else "",
    )


def _changes(item: Pass, program: Program, limits: Limits) -> Changes:
    try:
        return item.run(program, limits)
    except TsoptError as error:
        raise _Failed(item.name, error) from error
    except Exception as error:  # a mistake in the pass: which one is what helps
        failure = PassError(
            f"the pass {item.name} raises {type(error).__name__}",
            why=str(error) or None,
            fix=f"correct the pass, or leave it out: --without {item.name}",
        )
        failure.__cause__ = error
        raise _Failed(item.name, failure) from error


def _check(edited: Program, item: Pass, touched: Iterable[fx.Node], aliases: AliasGroups) -> None:
    try:
        verify_program(edited, touched=touched, aliases=aliases)
    except InvalidProgram as error:
        failure = PassError(
            f"the pass {item.name} broke the program",
            why=str(error),
            fix=f"leave it out (--without {item.name}), and report the bug",
        )
        failure.__cause__ = error
        raise _Failed(item.name, failure) from error


def _prune_weights(program: Program) -> None:
    used = set(program.used_weights())
    for name in [name for name in program.weights if name not in used]:
        del program.weights[name]


def weight_bytes(program: Program) -> int:
    """Bytes of memory behind the weights, shared memory counted once."""
    storages = {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in program.weights.values()}
    return sum(storages.values())
