"""A race, or a cached one checked again: the second `optimize` of a model is shorter."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from tsopt.compiler.calls.example import Example
from tsopt.compiler.graph.program import Program
from tsopt.compiler.precision_names import FP32
from tsopt.errors import TsoptError
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.checking.verdict import INACCURATE
from tsopt.runtime.racing import cache
from tsopt.runtime.racing.choice import Race
from tsopt.runtime.racing.contenders import Progress, RaceSettings, Variants
from tsopt.runtime.racing.outcomes import LOST
from tsopt.runtime.racing.race import race
from tsopt.runtime.racing.row import EAGER, MODEL, Row
from tsopt.runtime.racing.speedup import UNDECIDED
from tsopt.runtime.sandbox.sandbox import Sandbox

RECHECK_SECONDS = 1.0  # seconds: the winner against eager, before it is believed
WIDEST_INTERVAL = 1.5  # times: how wide the interval of the best speed-up may be in a race that is kept
DAY = 86400.0
OLDEST = 30 * DAY  # the age at which a race is run again: machines change, and files may be made up
# That eager won is taken over so many times, and for so long; then the best of the others is timed against it again.
REUSES, UNCHECKED = 10, 7 * DAY


def cached_race(
    model: Callable[..., Any],
    captured: Program,
    programs: Variants,
    example: Example,
    settings: RaceSettings,
    *,
    kind: str = "",
    data: str = "",
    sandbox: Sandbox | None = None,
    progress: Progress | None = None,
) -> Race:
    """`race`, or a cached one of the same program on this machine, where its winner is still right and faster.

    Args:
        kind: see `cache.kind_of`.
        data: digest of the user's data that layers were quantized by, and candidates are judged by.
    """
    switches = ("check_indices", "strict_specials", "time_all")
    key = cache.key_of(
        *(captured, cast(Program, programs[FP32]), settings.candidates, settings.threads),
        *(name for name in switches if getattr(settings, name)),
        *_of_accuracy(programs, settings, data),
    )
    if settings.criterion is not None and not settings.criterion.key:
        key = None  # the user's metric may change between runs
    if key is not None and kind:
        key = f"{kind}-{key}"
    entry = None if key is None else cache.find(key, settings.candidates, settings.seconds, time.time())
    if key is not None and entry is not None and entry.values != _values(entry.rows, captured):
        cache.forget(key)  # who was rejected with other weights may be right with these
        entry = None
    if key is not None and entry is not None:
        short = replace(settings, seconds=min(RECHECK_SECONDS, entry.seconds), warn=False)

        def again(candidate: Candidate, sandbox: Sandbox | None = None) -> Race:
            only = replace(short, candidates=(candidate,))
            if candidate.key == entry.winner:
                only = replace(only, again=True, files=cache.files_of_winner(key))
            return race(model, captured, programs, example, only, sandbox=sandbox, progress=progress)

        if sandbox is not None and entry.winner != MODEL:
            sandbox.close()  # the winner runs here, and the libraries that the sandbox imports would take a core
        found = _reused(key, entry, settings, again, sandbox)
        if found is not None:
            return found
        cache.forget(key)
    if sandbox is not None:
        sandbox.start()
    settings = replace(settings, keep_files=key is not None)
    found = race(model, captured, programs, example, settings, sandbox=sandbox, progress=progress)
    if key is not None and _is_repeatable(found):
        raced = cache.Entry(found.rows, found.winner, found.why, settings.seconds, time.time())
        cache.keep(key, replace(raced, values=_values(found.rows, captured)), found.files)
    return found


def _of_accuracy(programs: Variants, settings: RaceSettings, data: str) -> list[str]:
    """The parts of the cache key that decide how accurate candidates are: the criterion, its data, the variants."""
    variants = sorted((name, item) for name, item in programs.items() if name != FP32)
    made = [f"{name} {item.fingerprint() if isinstance(item, Program) else item.what}" for name, item in variants]
    return [*made, *([] if settings.criterion is None else [settings.criterion.key, data])]


def _values(rows: Sequence[Row], program: Program) -> str:
    """A digest of the weights, if candidates were rejected for their results, which may be right with other weights."""
    if not any(row.status in ("wrong", INACCURATE) for row in rows):
        return ""
    return replace(program, state={}).fingerprint(contents=True)  # each call writes its state


def _is_repeatable(found: Race) -> bool:
    """Whether the race would most likely end like this again: no candidate was lost, the machine was not busy."""
    if found.interrupted:
        return False
    gains = [row.speedup for row in found.rows if row.speedup is not None]
    best = max(gains, key=lambda gain: gain.ratio, default=None)
    if best is None or best.high > WIDEST_INTERVAL * best.low or any(row.status in LOST for row in found.rows):
        return False
    # What is not known of one that is certainly slower than the best does not matter.
    return all(gain.high < best.low for gain in gains if gain.verdict == UNDECIDED)


def _reused(
    key: str, entry: cache.Entry, settings: RaceSettings, again: Callable[..., Race], sandbox: Sandbox | None
) -> Race | None:
    """The outcome that an entry tells of; None when its winner does not win any more, or nothing says that it does.

    Args:
        again: races one candidate against eager for a moment.
        sandbox: for a candidate that has not won: it may do what it likes there.
    """
    if not _is_race_of(entry, settings.candidates) or time.time() - entry.when > OLDEST:
        return None
    try:
        if entry.winner == MODEL:
            return _eager_again(key, entry, settings, lambda candidate: again(candidate, sandbox))
        return _winner_again(entry, again(settings.candidate(entry.winner)))
    except TsoptError:  # what is wrong with the model is for the whole race to say
        return None


def _is_race_of(entry: cache.Entry, candidates: Sequence[Candidate]) -> bool:
    """Whether an entry has the rows of a race of these candidates; one on one thread is not always tried."""
    known = {candidate.key: candidate for candidate in candidates}
    first, *others = entry.rows
    absent = set(known) - {row.key for row in others}
    named = all(row.key in known and row.name == known[row.key].title for row in others)
    return (first.key, first.name) == (MODEL, EAGER) and named and all(known[key].is_on_one_thread for key in absent)


def _eager_again(
    key: str, entry: cache.Entry, settings: RaceSettings, again: Callable[[Candidate], Race]
) -> Race | None:
    """Eager as the winner; now and then only after the best of the others has lost once more."""
    now, said = time.time(), f"raced on {entry.date}"
    found = Race(entry.rows, MODEL, entry.why, None, cached=said)
    if entry.recalls + 1 < REUSES and now - max(entry.checked, entry.when) < UNCHECKED:
        cache.keep(key, replace(entry, recalls=entry.recalls + 1))
        return found
    right = [row for row in entry.rows if row.key != MODEL and row.status == "ok" and row.timing is not None]
    if not right:
        return None
    best = min(right, key=lambda row: row.timing.p50 if row.timing is not None else 0.0)
    row = again(settings.candidate(best.key)).rows[-1]
    if row.verdict == UNDECIDED:  # the machine is busy: the next time then
        return found
    if row.verdict not in ("same", "slower") or row.is_faster:
        return None
    cache.keep(key, replace(entry, recalls=0, checked=now))
    return replace(found, cached=f"{said}; {best.name} timed against eager again: {row.speedup}")


def _winner_again(entry: cache.Entry, now: Race) -> Race | None:
    """The winner of the entry, when it is right and wins again.

    Args:
        now: that it has just won or lost.
    """
    if now.executable is None:
        return None
    checked = now.row
    rows = tuple(replace(row, accuracy=checked.accuracy) if row.key == now.winner else row for row in entry.rows)
    said = f"raced on {entry.date}; {checked.name} verified and timed again: {checked.speedup}"
    return replace(now, rows=rows, why=entry.why, cached=said)
