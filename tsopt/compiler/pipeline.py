"""Runs passes: a private copy each, checks after each, and a ledger of what was done and what was declined."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import fx

from tsopt.compiler.liveness import peak_bytes
from tsopt.compiler.program import Numerics, Program
from tsopt.compiler.verify import AliasGroups, output_aliases, verify_program
from tsopt.errors import InvalidProgram, PassError


@dataclass(frozen=True, slots=True)
class Done:
    """A rewrite that was made: the rule (or the pass), and where in the user's model."""

    rule: str
    where: str


@dataclass(frozen=True, slots=True)
class Declined:
    """A rewrite that nearly happened, and the condition that failed."""

    rule: str
    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class Changes:
    """What a pass says it did."""

    done: tuple[Done, ...] = ()
    declined: tuple[Declined, ...] = ()
    numerics: Numerics = Numerics.EXACT


@dataclass
class Limits:
    """What a run allows.

    numerics: the weakest class of rewrite that may be applied.
    fuel: how many rewrites may still be made; None for no limit. To find a guilty one by bisection.
    without: names of rules and passes that are left out.
    on_rewrite: called right before each rewrite.
    """

    numerics: Numerics = Numerics.ROUNDING
    fuel: int | None = None
    without: frozenset[str] = frozenset()
    on_rewrite: Callable[[], None] | None = None

    def take(self) -> bool:
        """Takes a unit of fuel, right before a rewrite is made; False when there is none left."""
        if self.fuel is not None:
            self.fuel -= 1
            if self.fuel < 0:
                return False
        if self.on_rewrite is not None:
            self.on_rewrite()
        return True


class Pass(Protocol):
    """Edits the copy that it is given."""

    @property
    def name(self) -> str: ...

    def run(self, program: Program, limits: Limits) -> Changes: ...


@dataclass(frozen=True, slots=True)
class Repeat:
    """Runs its passes in turn until none of them changes anything; at most `limit` rounds."""

    passes: tuple[Pass | Repeat, ...]
    limit: int = 10


class Observer(Protocol):
    """Looks at each pass before and after it is run, and at each rewrite before it is made."""

    def start(self, item: Pass, program: Program) -> Pass:
        """The pass to run in the place of `item`; `program` is the copy that it will edit."""

    def on_rewrite(self) -> None:
        """Called when what is replaced and what replaces it are both in the graph."""

    def finish(self, item: Pass, before: Program, after: Program, changes: Changes, limits: Limits) -> None:
        """Called when `after` has passed the checks."""


@dataclass(frozen=True, slots=True)
class Size:
    """What a program costs: calls, bytes of weights, and the most bytes of activations that live at once."""

    nodes: int
    weight_bytes: int
    peak_bytes: int

    @classmethod
    def of(cls, program: Program) -> Size:
        return cls(program.node_count, weight_bytes(program), peak_bytes(program))


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One pass as it was run. `text` is the program afterwards, when asked for; `seconds` includes the checks."""

    name: str
    changed: bool
    before: Size
    after: Size
    seconds: float
    done: tuple[Done, ...] = ()
    declined: tuple[Declined, ...] = ()
    numerics: Numerics = Numerics.EXACT
    text: str = field(default="", repr=False)


def run(
    program: Program,
    passes: Iterable[Pass | Repeat],
    limits: Limits | None = None,
    *,
    keep_text: bool = False,
    progress: Callable[[str], None] | None = None,
    observer: Observer | None = None,
) -> tuple[Program, list[PassRecord]]:
    """Runs a pipeline over a copy of a program, with every invariant checked after every pass.

    Raises:
        PassError: a pass broke an invariant, misreported a change, or a Repeat did not come to rest.
    """
    verify_program(program, touched=())  # the types are the capture's; all are re-derived at the end
    aliases, limits = output_aliases(program), limits or Limits()
    if observer is not None:
        limits = replace(limits, on_rewrite=observer.on_rewrite)
    state = _Run(limits, keep_text, progress or (lambda name: None), observer, aliases, _Measured(program))
    for item in passes:
        program = _run_item(program, item, state)
    verify_program(program, aliases=aliases)
    return program, state.records


class _Measured:
    """Fingerprint and size of a program, computed once: what comes out of a pass goes into the next."""

    def __init__(self, program: Program, fingerprint: str = "") -> None:
        self.program, self.size = program, Size.of(program)
        self.fingerprint = fingerprint or program.fingerprint()


@dataclass
class _Run:
    limits: Limits
    keep_text: bool
    progress: Callable[[str], None]
    observer: Observer | None
    aliases: AliasGroups
    measured: _Measured
    records: list[PassRecord] = field(default_factory=list)


def _run_item(program: Program, item: Pass | Repeat, state: _Run) -> Program:
    records = state.records
    if not isinstance(item, Repeat):
        if item.name in state.limits.without:
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
    raise PassError(
        f"a Repeat did not come to rest in {item.limit} rounds",
        why=f"still being applied: {', '.join(rules)}",
        fix="two rules undo each other: leave one out (--without RULE)",
    )


def _run_pass(program: Program, item: Pass, state: _Run) -> tuple[Program, PassRecord]:
    start = time.perf_counter()
    edited = program.copy()
    originals = dict(zip(edited.graph.nodes, program.graph.nodes, strict=True))
    chosen = item if state.observer is None else state.observer.start(item, edited)
    changes = chosen.run(edited, state.limits)
    _prune_weights(edited)
    before, fingerprint = state.measured, edited.fingerprint()
    changed = before.fingerprint != fingerprint
    if changed != bool(changes.done):
        said = "a change and made none" if changes.done else "no change and made one"
        raise PassError(f"the pass {item.name} reported {said}", fix=f"leave it out: --without {item.name}")
    if not changed:
        edited = program
    else:
        _check(edited, item, _touched(edited, originals), state.aliases)
        edited.numerics = max(program.numerics, changes.numerics)
        state.measured = _Measured(edited, fingerprint)
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
        edited.text if state.keep_text else "",
    )


def _check(edited: Program, item: Pass, touched: Iterable[fx.Node], aliases: AliasGroups) -> None:
    try:
        verify_program(edited, touched=list(touched), aliases=aliases)
    except InvalidProgram as error:
        raise PassError(
            f"the pass {item.name} broke the program",
            why=str(error),
            fix=f"leave it out (--without {item.name}) and report this",
        ) from error


def _touched(edited: Program, originals: dict[fx.Node, fx.Node]) -> Iterator[fx.Node]:
    """Calls that are new, or whose target, arguments or recorded type are others than before."""
    for node in edited.calls():
        if not _is_unchanged(node, originals.get(node), originals):
            yield node


def _is_unchanged(node: fx.Node, before: fx.Node | None, originals: dict[fx.Node, fx.Node]) -> bool:
    if before is None or node.target != before.target or node.meta.get("val") is not before.meta.get("val"):
        return False
    return _arguments(node, originals) == _arguments(before, {})


def _arguments(node: fx.Node, originals: dict[fx.Node, fx.Node]) -> str:
    return repr(fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: originals.get(n, n)))


def _prune_weights(program: Program) -> None:
    used = set(program.used_weights())
    for name in [name for name in program.weights if name not in used]:
        del program.weights[name]


def weight_bytes(program: Program) -> int:
    """Bytes of memory behind the weights, shared memory counted once."""
    storages = {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in program.weights.values()}
    return sum(storages.values())
