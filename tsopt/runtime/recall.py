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
from tsopt.runtime.backend import split_spec
from tsopt.runtime.endings import LOST
from tsopt.runtime.held_out import HeldOut
from tsopt.runtime.isolation import Workshop
from tsopt.runtime.race import EAGER, Progress, Race, race, title_of
from tsopt.runtime.timing import UNDECIDED

AGAIN = 1.0  # seconds: the winner against eager, before it is believed
STEADY = 1.5  # times: how wide the interval of the best speed-up may be in a race that is kept
DAY = 86400.0
OLDEST = 30 * DAY  # the age at which a race is run again: machines change, and files may be made up
# That eager won is taken over so many times, and for so long; then the best of the others is timed against it again.
RECALLS, UNCHECKED = 10, 7 * DAY


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
    key = cache.key_of(captured, optimized, (*backends, *(name for name, on in stricter.items() if on)), threads)
    entry = None if key is None else cache.find(key, backends, seconds, time.time())
    if key is not None and entry is not None:

        def again(backend: str, **more: Any) -> Race:
            short: dict[str, Any] = {"backends": (backend,), "seconds": min(AGAIN, entry.seconds), "warn": False}
            return race(model, captured, optimized, example, **short, **asked, **more)

        found = _recalled(key, entry, backends, again, options.get("workshop"))
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
    lucky = all(row.status not in LOST and row.verdict != UNDECIDED for row in found.rows)
    return lucky and best is not None and best.high <= STEADY * best.low


def _recalled(
    key: str, entry: cache.Entry, backends: Sequence[str], again: Callable[..., Race], workshop: Workshop | None
) -> Race | None:
    """The outcome that an entry tells of; None when its winner does not win any more, or nothing says that it does.

    Args:
        again: races one backend against eager for a moment.
        workshop: for a backend that has not won: it may do what it likes there.
    """
    if not _is_race_of(entry, backends) or time.time() - entry.when > OLDEST:
        return None
    try:
        if entry.winner == EAGER:
            return _eager_again(key, entry, backends, lambda backend: again(backend, workshop=workshop))
        return _winner_again(entry, again)
    except TsoptError:  # what is wrong with the model is for the whole race to say
        return None


def _is_race_of(entry: cache.Entry, backends: Sequence[str]) -> bool:
    """Whether an entry has the rows of a race of these backends; one with one thread is not always tried."""
    titles = {title_of(backend): split_spec(backend)[1] for backend in backends}
    first, *others = (row.name for row in entry.rows)
    absent = set(titles) - set(others)
    return first == EAGER and set(others) <= set(titles) and all(titles[name] == {"threads": 1} for name in absent)


def _eager_again(key: str, entry: cache.Entry, backends: Sequence[str], again: Callable[[str], Race]) -> Race | None:
    """Eager as the winner; now and then only after the best of the others has lost once more."""
    now, said = time.time(), f"raced {entry.date}"
    found = Race(entry.rows, EAGER, entry.why, None, cached=said)
    if entry.recalls + 1 < RECALLS and now - max(entry.checked, entry.when) < UNCHECKED:
        cache.keep(key, replace(entry, recalls=entry.recalls + 1))
        return found
    right = [row for row in entry.rows if row.name != EAGER and row.status == "ok" and row.timing is not None]
    if not right:
        return None
    best = min(right, key=lambda row: row.timing.p50 if row.timing is not None else 0.0)
    row = again(next(backend for backend in backends if title_of(backend) == best.name)).rows[-1]
    if row.verdict == UNDECIDED:  # the machine is busy: the next time then
        return found
    if row.verdict not in ("same", "slower"):
        return None
    cache.keep(key, replace(entry, recalls=0, checked=now))
    return replace(found, cached=f"{said}; {best.name} timed against eager again now: {row.speedup}")


def _winner_again(entry: cache.Entry, again: Callable[..., Race]) -> Race | None:
    """The winner of the entry, when it is right and wins again."""
    if title_of(entry.backend) != entry.winner:
        return None
    now = again(entry.backend)
    if now.executable is None:
        return None
    checked = next(row for row in now.rows if row.name == now.winner)
    rows = tuple(replace(row, accuracy=checked.accuracy) if row.name == now.winner else row for row in entry.rows)
    said = f"raced {entry.date}; {now.winner} verified and timed again now: {checked.speedup}"
    return replace(now, rows=rows, why=entry.why, cached=said)
