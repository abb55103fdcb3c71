"""Passes over a Program: by level, by name, with records, under the debugger. Owns no pass."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

from tsopt.compiler.graph.program import Numerics, Program
from tsopt.compiler.rewriting.pipeline import Limits, Pass, PassRecord, Repeat, run
from tsopt.compiler.rewriting.rewrite import Rule
from tsopt.compiler.sizes.generalize import through
from tsopt.errors import UsageError
from tsopt.passes import STANDARD
from tsopt.runtime.checking.debug import Debugged
from tsopt.runtime.checking.debug import debug as run_debug

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
    """Runs passes over a copy of a program, every invariant checked after each.

    Args:
        level: 0 none, 1 EXACT, 2 EXACT and ROUNDING, 3 LOSSY as well, where `passes` holds such.
        without: names of rules and passes to leave out.
        fuel: how many rewrites to make; bisect it to find the one that breaks a model.
        debug: an example input; every rewrite is compared on it, which takes many times as long.

    A program for many sizes is changed to one for the same sizes.

    Raises:
        PassError: what the passes make of a program for many sizes depends on the sizes.
        AccuracyError: under `debug`, naming the first rewrite that changes values, and its place.
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
    """`transform`, with the record of each pass; under `keep_going` without the passes that fail."""
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

    return through(program, change), records


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
    """`transform` with every rewrite compared on the example; what was found wrong is a value, not an error."""
    if program.signature.dims:
        raise UsageError("passes are looked at for one size", fix="capture the model with one example")
    passes, limits = _run_of(passes, level, without, fuel)
    named = _naming_passes(progress)
    return run_debug(program, example_input, passes, limits, keep_text=keep_text, seed=seed, progress=named)


def _run_of(
    passes: Iterable[Pass | Repeat], level: int, without: Iterable[str], fuel: int | None
) -> tuple[tuple[Pass | Repeat, ...], Limits]:
    """The passes of a level and what they may do; options checked."""
    if level not in LEVELS:
        raise UsageError(f"unknown optimization level {level}", fix=f"one of {', '.join(f'-O{n}' for n in LEVELS)}")
    passes, left_out = tuple(passes), frozenset(without)
    for name in sorted(left_out):
        check_name(name, names_of(passes))
    numerics = LEVELS[level]
    return ((), Limits()) if numerics is None else (passes, Limits(numerics, fuel, left_out))


def _naming_passes(progress: Callable[[str], None] | None) -> Callable[[str], None] | None:
    return None if progress is None else lambda name: progress(f"pass {name}")


def names_of(passes: Iterable[Pass | Repeat]) -> list[str]:
    """Names of all passes and rules of a pipeline."""
    return [part.name for item in passes_in(passes) for part in (item, *item.rules)]


def rules_of(passes: Iterable[Pass | Repeat]) -> dict[str, tuple[str, Rule]]:
    """The rules of a pipeline by name, each with the name of its pass."""
    return {rule.name: (item.name, cast(Rule, rule)) for item in passes_in(passes) for rule in item.rules}


def passes_in(passes: Iterable[Pass | Repeat]) -> list[Pass]:
    """The passes of a pipeline, those inside a Repeat included."""
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
    """Raises UsageError for a name that no rule or pass has, with those that are near it."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or known
        raise UsageError(f"no rule or pass is called {name!r}", fix=f"one of: {', '.join(near)}")
