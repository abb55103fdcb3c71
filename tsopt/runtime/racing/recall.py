"""A race, or what an earlier one found, checked again: the second `optimize` of a model is the shorter one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from tsopt.compiler.calls.example import Example
from tsopt.compiler.graph.program import Program
from tsopt.compiler.precisions import FP32
from tsopt.errors import TsoptError
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.checking.held_out import HeldOut
from tsopt.runtime.racing import cache
from tsopt.runtime.racing.endings import LOST
from tsopt.runtime.racing.isolation import Workshop
from tsopt.runtime.racing.race import EAGER, Progress, Race, Variants, is_on_one_thread, race
from tsopt.runtime.racing.timing import UNDECIDED
from tsopt.runtime.report import MODEL

AGAIN = 1.0  # seconds: the winner against eager, before it is believed
STEADY = 1.5  # times: how wide the interval of the best speed-up may be in a race that is kept
DAY = 86400.0
OLDEST = 30 * DAY  # the age at which a race is run again: machines change, and files may be made up
# That eager won is taken over so many times, and for so long; then the best of the others is timed against it again.
RECALLS, UNCHECKED = 10, 7 * DAY


def race_or_recall(
    model: Callable[..., Any],
    captured: Program,
    programs: Variants,
    example: Example,
    *,
    candidates: Sequence[Candidate],
    threads: int | None,
    seconds: float,
    seed: int,
    budget: float | None,
    progress: Progress,
    elsewhere: Sequence[HeldOut] = (),
    check_indices: bool = False,
    strict_specials: bool = False,
    share_weights: bool = False,
    **options: Any,
) -> Race:
    """`race`, unless one of the same program on this machine is in the cache, whose winner is still right and faster.

    Args:
        options: of `race`, for a race that is run.
    """
    asked: dict[str, Any] = {"threads": threads, "seed": seed, "budget": budget, "progress": progress}
    stricter = {"check_indices": check_indices, "strict_specials": strict_specials}
    asked |= {"elsewhere": elsewhere, "share_weights": share_weights, **stricter}
    key = cache.key_of(
        captured, cast(Program, programs[FP32]), candidates, threads, *(name for name, on in stricter.items() if on)
    )
    entry = None if key is None else cache.find(key, candidates, seconds, time.time())
    if key is not None and entry is not None:

        def again(candidate: Candidate, **more: Any) -> Race:
            short: dict[str, Any] = {"candidates": (candidate,), "seconds": min(AGAIN, entry.seconds), "warn": False}
            return race(model, captured, programs, example, **short, **asked, **more)

        found = _recalled(key, entry, candidates, again, options.get("workshop"))
        if found is not None:
            return found
        cache.forget(key)
    found = race(model, captured, programs, example, candidates=candidates, seconds=seconds, **asked, **options)
    if key is not None and _is_settled(found):
        cache.keep(key, cache.Entry(found.rows, found.winner, found.why, seconds, time.time()))
    return found


def _is_settled(found: Race) -> bool:
    """Whether the race would most likely end like this again: nobody was out of luck, the machine was not busy."""
    gains = [row.speedup for row in found.rows if row.speedup is not None]
    best = max(gains, key=lambda gain: gain.ratio, default=None)
    lucky = all(row.status not in LOST and row.verdict != UNDECIDED for row in found.rows)
    return lucky and best is not None and best.high <= STEADY * best.low


def _recalled(
    key: str,
    entry: cache.Entry,
    candidates: Sequence[Candidate],
    again: Callable[..., Race],
    workshop: Workshop | None,
) -> Race | None:
    """The outcome that an entry tells of; None when its winner does not win any more, or nothing says that it does.

    Args:
        again: races one candidate against eager for a moment.
        workshop: for a candidate that has not won: it may do what it likes there.
    """
    if not _is_race_of(entry, candidates) or time.time() - entry.when > OLDEST:
        return None
    try:
        if entry.winner == MODEL:
            return _eager_again(key, entry, candidates, lambda candidate: again(candidate, workshop=workshop))
        winner = next(candidate for candidate in candidates if candidate.key == entry.winner)
        return _winner_again(entry, again(winner))
    except TsoptError:  # what is wrong with the model is for the whole race to say
        return None


def _is_race_of(entry: cache.Entry, candidates: Sequence[Candidate]) -> bool:
    """Whether an entry has the rows of a race of these candidates; one on one thread is not always tried."""
    known = {candidate.key: candidate for candidate in candidates}
    first, *others = entry.rows
    absent = set(known) - {row.key for row in others}
    named = all(row.key in known and row.name == known[row.key].title for row in others)
    return (first.key, first.name) == (MODEL, EAGER) and named and all(is_on_one_thread(known[key]) for key in absent)


def _eager_again(
    key: str, entry: cache.Entry, candidates: Sequence[Candidate], again: Callable[[Candidate], Race]
) -> Race | None:
    """Eager as the winner; now and then only after the best of the others has lost once more."""
    now, said = time.time(), f"raced {entry.date}"
    found = Race(entry.rows, MODEL, entry.why, None, cached=said)
    if entry.recalls + 1 < RECALLS and now - max(entry.checked, entry.when) < UNCHECKED:
        cache.keep(key, replace(entry, recalls=entry.recalls + 1))
        return found
    right = [row for row in entry.rows if row.key != MODEL and row.status == "ok" and row.timing is not None]
    if not right:
        return None
    best = min(right, key=lambda row: row.timing.p50 if row.timing is not None else 0.0)
    row = again(next(candidate for candidate in candidates if candidate.key == best.key)).rows[-1]
    if row.verdict == UNDECIDED:  # the machine is busy: the next time then
        return found
    if row.verdict not in ("same", "slower"):
        return None
    cache.keep(key, replace(entry, recalls=0, checked=now))
    return replace(found, cached=f"{said}; {best.name} timed against eager again now: {row.speedup}")


def _winner_again(entry: cache.Entry, now: Race) -> Race | None:
    """The winner of the entry, when it is right and wins again.

    Args:
        now: that it has just won or lost.
    """
    if now.executable is None:
        return None
    checked = now.row
    rows = tuple(replace(row, accuracy=checked.accuracy) if row.key == now.winner else row for row in entry.rows)
    said = f"raced {entry.date}; {checked.name} verified and timed again now: {checked.speedup}"
    return replace(now, rows=rows, why=entry.why, cached=said)
