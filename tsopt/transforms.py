"""Runs passes over a Program: by level, by name, with records, under the debugger. Defines no pass."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

from tsopt.compiler.graph.program import Numerics, Program
from tsopt.compiler.rewriting.pass_base import Limits, Pass, Repeat, passes_of
from tsopt.compiler.rewriting.pipeline import PassRecord, run
from tsopt.compiler.rewriting.rewrite import Rule
from tsopt.compiler.sizes.generalize import through
from tsopt.compiler.tensor_life import let_go
from tsopt.errors import UsageError
from tsopt.passes import STANDARD
from tsopt.runtime.checking.rewrite_checks import Debugged
from tsopt.runtime.checking.rewrite_checks import debug as run_debug

LEVELS = {0: None, 1: Numerics.EXACT, 2: Numerics.ROUNDING, 3: Numerics.LOSSY}


def transform(
    program: Program,
    passes: Iterable[Pass | Repeat] = STANDARD,
    *,
    level: int = 2,
    without: Iterable[str] = (),
    fuel: int | None = None,
    debug: Any = None,
) -> Program:
    """Runs passes over a copy of a program and checks every invariant after each pass.

    A program with dynamic sizes keeps them.

    Args:
        passes: the pass pipeline.
        level: 0: no passes; 1: EXACT ones; 2: also ROUNDING ones; 3: also LOSSY ones, if `passes` contains any and the
            model is not quantized already.
        without: names of rules and passes to skip.
        fuel: maximum number of rewrites; bisect it to find the rewrite that breaks a model.
        debug: an example input on which every rewrite is compared, which takes many times as long.

    Raises:
        PassError: the passes produce different graphs at different sizes of a program with dynamic sizes.
        AccuracyError: with `debug`, names the first rewrite that changes values, and its location.
    """
    if debug is None:
        return transform_with_records(program, passes, level=level, without=without, fuel=fuel)[0]
    found = debug_passes(program, debug, passes, level=level, without=without, fuel=fuel)
    if found.findings:
        raise found.error()
    return found.program


def transform_with_records(
    program: Program,
    passes: Iterable[Pass | Repeat] = STANDARD,
    *,
    level: int = 2,
    without: Iterable[str] = (),
    fuel: int | None = None,
    keep_text: bool = False,
    progress: Callable[[str], None] | None = None,
    keep_going: bool = False,
) -> tuple[Program, list[PassRecord]]:
    """`transform` with a record of each pass; with `keep_going`, passes that fail are skipped."""
    passes, limits = _run_of(passes, level, without, fuel)
    if not passes:
        return program, []
    records: list[PassRecord] = []

    def change(program: Program) -> Program:
        changed, records[:] = run(
            program,
            passes,
            replace(limits),
            keep_text=keep_text,
            progress=_naming_passes(progress),
            keep_going=keep_going,
        )
        return changed

    made = through(program, change)
    let_go(made.fake_mode)
    return made, records


def debug_passes(
    program: Program,
    example_input: Any,
    passes: Iterable[Pass | Repeat] = STANDARD,
    *,
    level: int = 2,
    without: Iterable[str] = (),
    fuel: int | None = None,
    keep_text: bool = False,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Debugged:
    """`transform` with every rewrite compared on the example; differences are returned, not raised."""
    if program.signature.dims:
        raise UsageError("passes can only be debugged for fixed sizes", fix="capture the model without dynamic sizes")
    passes, limits = _run_of(passes, level, without, fuel)
    named = _naming_passes(progress)
    return run_debug(program, example_input, passes, limits, keep_text=keep_text, seed=seed, progress=named)


def _run_of(
    passes: Iterable[Pass | Repeat], level: int, without: Iterable[str], fuel: int | None
) -> tuple[tuple[Pass | Repeat, ...], Limits]:
    """The passes of a level and their limits. Checks the options."""
    passes, left_out = passes_of(passes), frozenset(names_in(without))
    check_passes(passes, level, left_out)
    if fuel is not None and (not isinstance(fuel, int) or fuel < 0):
        raise UsageError(f"fuel must be a number of rewrites, got {fuel!r}", fix="pass 0 or more, or None for no limit")
    numerics = LEVELS[level]
    return ((), Limits()) if numerics is None else (passes, Limits(numerics, fuel, left_out))


def check_passes(passes: Iterable[Pass | Repeat], level: int, without: Iterable[str]) -> None:
    """Raises UsageError for an unknown level, and for names to leave out that no rule or pass has."""
    check_level(level)
    known = names_of(passes_of(passes))
    for name in sorted(names_in(without)):
        check_name(name, known)


def check_level(level: int) -> None:
    """Raises UsageError for a level that does not exist."""
    if not isinstance(level, int) or level not in LEVELS:
        raise UsageError(
            f"unknown optimization level {level!r}", fix=f"use one of: {', '.join(f'-O{n}' for n in LEVELS)}"
        )


def names_in(without: Iterable[str]) -> tuple[str, ...]:
    """The names to leave out. Raises UsageError for a single one, which would be read letter by letter."""
    if isinstance(without, str):
        raise UsageError("without must be a tuple of names, got a string", fix=f"pass a tuple: without=({without!r},)")
    return tuple(without)


def _naming_passes(progress: Callable[[str], None] | None) -> Callable[[str], None] | None:
    return None if progress is None else lambda name: progress(f"pass {name}")


def names_of(passes: Iterable[Pass | Repeat]) -> list[str]:
    """Names of all passes and rules of a pipeline."""
    return [part.name for item in passes_in(passes) for part in (item, *item.rules)]


def rules_of(passes: Iterable[Pass | Repeat]) -> dict[str, tuple[str, Rule]]:
    """The rules of a pipeline by name, each with the name of its pass."""
    return {rule.name: (item.name, cast(Rule, rule)) for item in passes_in(passes) for rule in item.rules}


def passes_in(passes: Iterable[Pass | Repeat]) -> list[Pass]:
    """The passes of a pipeline, including those inside a Repeat."""
    found: list[Pass] = []
    todo = list(passes)[::-1]
    while todo:
        item = todo.pop()
        if isinstance(item, Repeat):
            todo += item.passes[::-1]
        else:
            found.append(item)
    return found


def check_name(name: str, known: Sequence[str]) -> None:
    """Raises UsageError for a name that no rule or pass has, and suggests similar ones."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or known
        raise UsageError(f"unknown rule or pass {name!r}", fix=f"use one of: {', '.join(near)}")
