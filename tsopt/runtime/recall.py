"""A race, or what an earlier one found, checked again: the second `optimize` of a model is the shorter one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tsopt.compiler.example import Example
from tsopt.compiler.program import Program
from tsopt.errors import TsoptError
from tsopt.runtime import cache
from tsopt.runtime.held_out import HeldOut
from tsopt.runtime.race import EAGER, Progress, Race, race, title_of

AGAIN = 1.0  # seconds: the winner against eager, before it is believed
STEADY = 1.5  # times: how wide the interval of the best speed-up may be in a race that is kept
LUCK = ("timed out", "out of memory", "crashed")  # how a candidate may end that does better another day


def race_or_recall(
    model: Callable[..., Any],
    captured: Program,
    optimized: Program,
    example: Example,
    *,
    backends: Sequence[str],
    threads: int | None,
    seconds: float,
    seed: int,
    budget: float | None,
    progress: Progress,
    elsewhere: Sequence[HeldOut] = (),
    check_indices: bool = False,
    strict_specials: bool = False,
    **options: Any,
) -> Race:
    """`race`, unless one of the same program on this machine is in the cache, whose winner is still right and faster.

    Args:
        options: of `race`, for a race that is run.
    """
    asked: dict[str, Any] = {"threads": threads, "seed": seed, "budget": budget, "progress": progress}
    stricter = {"check_indices": check_indices, "strict_specials": strict_specials}
    asked |= {"elsewhere": elsewhere, **stricter}
    key = cache.key_of(captured, optimized, (*backends, *(name for name, on in stricter.items() if on)), threads)
    entry = None if key is None else cache.find(key, backends, seconds)
    if key is not None and entry is not None:
        found = _again(entry, model, captured, optimized, example, asked)
        if found is not None:
            return found
        cache.forget(key)
    found = race(model, captured, optimized, example, backends=backends, seconds=seconds, **asked, **options)
    if key is not None and _is_settled(found):
        cache.keep(key, cache.Entry(found.rows, found.winner, found.why, found.backend, seconds, time.time()))
    return found


def _is_settled(found: Race) -> bool:
    """Whether the race would most likely end like this again: nobody was out of luck, the machine was not busy."""
    gains = [row.speedup for row in found.rows if row.speedup is not None]
    best = max(gains, key=lambda gain: gain.ratio, default=None)
    return all(row.status not in LUCK for row in found.rows) and best is not None and best.high <= STEADY * best.low


def _again(
    entry: cache.Entry,
    model: Callable[..., Any],
    captured: Program,
    optimized: Program,
    example: Example,
    asked: dict[str, Any],
) -> Race | None:
    """The outcome that an entry tells of; None when its winner does not win any more."""
    said = f"raced {entry.date}"
    if entry.winner == EAGER:
        return Race(entry.rows, EAGER, entry.why, None, cached=said)
    if title_of(entry.backend) != entry.winner:
        return None
    try:
        now = race(
            model, captured, optimized, example, backends=(entry.backend,), seconds=min(AGAIN, entry.seconds), **asked
        )
    except TsoptError:  # what is wrong with the model is for the whole race to say
        return None
    if now.executable is None:
        return None
    checked = next(row for row in now.rows if row.name == now.winner)
    rows = tuple(replace(row, accuracy=checked.accuracy) if row.name == now.winner else row for row in entry.rows)
    said += f"; {now.winner} verified and timed again now: {checked.speedup}"
    return replace(now, rows=rows, why=entry.why, cached=said)
