"""What races found, kept from run to run: who won for a program on a machine, and how the others did.

An entry is JSON and holds no code. Nothing in it is believed: the backend that it names is one of those that the caller
lets race, and it is compiled, verified and timed against eager again before it is handed back.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tsopt._version import __version__
from tsopt.compiler.program import Program
from tsopt.runtime import known
from tsopt.runtime.accuracy import Verdict
from tsopt.runtime.cache_directory import directory as directory
from tsopt.runtime.cache_directory import objection as objection
from tsopt.runtime.environment import environment
from tsopt.runtime.report import Row
from tsopt.runtime.timing import ColdStart, Speedup, Timing

log = logging.getLogger("tsopt")
FORMAT = 1
MOST = 1000  # entries; the oldest go
LARGEST = 1 << 20  # bytes of an entry
UNFINISHED = ".new"  # ends the name of an entry that is being written


@dataclass(frozen=True, slots=True)
class Entry:
    """What a race found.

    Attributes:
        backend: the winner's, as it was asked for; `eager` with the winner's name `eager` when nothing was faster.
        winner: name of the winner's row.
        seconds: how long the race was to time.
        when: seconds since 1970.
    """

    rows: tuple[Row, ...]
    winner: str
    why: str
    backend: str
    seconds: float
    when: float

    @property
    def date(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(self.when))


def key_of(captured: Program, optimized: Program, backends: Iterable[str], threads: int | None) -> str | None:
    """The name of the entry for a race: what decides its outcome, but for the values of the weights.

    None for a race with backends from elsewhere: their code may be another tomorrow.
    """
    racing = tuple(backends)
    if any(":" in backend for backend in racing):
        return None
    what = {
        "format": FORMAT,
        "tsopt": __version__,
        "programs": [captured.fingerprint(), optimized.fingerprint()],
        "environment": environment().to_json(),
        "backends": racing,
        "threads": threads,
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def find(key: str, backends: Sequence[str], seconds: float) -> Entry | None:
    """The entry of a race that timed for as long, or None. One that is damaged is removed.

    Args:
        backends: who may win.
    """
    if objection() or not directory().is_dir():
        return None
    place = _file(key)
    try:
        # NOTE: never through a link, which could lead to anybody's file.
        with os.fdopen(os.open(place, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as file:
            raw = file.read(LARGEST + 1)
        entry = _entry(json.loads(raw), key)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        log.info("a damaged entry of the cache is removed: %s (%s)", place, error)
        forget(key)
        return None
    if entry.backend not in (*backends, "eager") or entry.seconds < seconds:
        return None
    return entry


def keep(key: str, entry: Entry) -> None:
    """Writes an entry, whole or not at all; a cache that cannot be written is no error."""
    raw = json.dumps(_json(entry, key)).encode()
    if len(raw) > LARGEST:
        return
    try:
        directory().mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = objection()
        if reason:
            log.info("nothing is kept: %s", reason)
            return
        file, name = tempfile.mkstemp(dir=directory(), suffix=UNFINISHED)
        try:
            with os.fdopen(file, "wb") as out:
                out.write(raw)
            os.replace(name, _file(key))
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        _drop_oldest()
    except OSError as error:
        log.info("nothing is kept: %s", error)


def forget(key: str) -> None:
    """Removes an entry, if it is there."""
    with contextlib.suppress(OSError):
        _file(key).unlink()


def entries() -> list[Path]:
    """The files of the entries, the oldest first."""
    if objection() or not directory().is_dir():
        return []
    found = [path for path in directory().glob("*.json") if not path.is_symlink()]
    return sorted(found, key=lambda path: path.lstat().st_mtime)


def clear() -> int:
    """Removes all entries, and what is known of bundles; how many entries there were.

    Raises:
        OSError: one cannot be removed.
    """
    found = entries()
    for path in (*found, *(directory().glob(f"*{UNFINISHED}") if not objection() else ())):
        path.unlink(missing_ok=True)
    known.forget_all()
    return len(found)


def _file(key: str) -> Path:
    return directory() / f"{key}.json"


def _drop_oldest() -> None:
    for path in entries()[:-MOST]:
        path.unlink(missing_ok=True)


def _json(entry: Entry, key: str) -> dict[str, Any]:
    return {"format": FORMAT, "key": key, **asdict(entry)}


def _entry(data: Any, key: str) -> Entry:
    """An entry from JSON. Raises ValueError, TypeError, KeyError or AttributeError for what is none."""
    if data.pop("format") != FORMAT or data.pop("key") != key:
        raise ValueError("the entry of something else")
    rows = tuple(_row(row) for row in data.pop("rows"))
    entry = Entry(rows, **data)
    texts = (entry.winner, entry.why, entry.backend, *(row.name for row in rows))
    if not all(isinstance(text, str) for text in texts) or entry.winner not in {row.name for row in rows}:
        raise ValueError("not who won")
    return replace(entry, seconds=float(entry.seconds), when=float(entry.when))


def _row(data: dict[str, Any]) -> Row:
    timing, gain, accuracy, cold = (data.pop(key) for key in ("timing", "speedup", "accuracy", "cold"))
    row = Row(**data | {"notes": tuple(map(str, data["notes"]))})
    return replace(
        row,
        reason=str(row.reason),
        status=str(row.status),
        compile_seconds=float(row.compile_seconds),
        timing=None if timing is None else Timing(_numbers(timing["samples"]), int(timing["calls_per_sample"])),
        speedup=None if gain is None else Speedup(*_numbers([gain["ratio"], gain["low"], gain["high"]])),
        cold=None if cold is None else ColdStart(float(cold["first"]), int(cold["slow_calls"])),
        accuracy=None if accuracy is None else _verdict(accuracy),
    )


def _verdict(data: dict[str, Any]) -> Verdict:
    inputs, skipped = (tuple(map(str, data.pop(key))) for key in ("inputs", "skipped"))
    found = Verdict(**data, inputs=inputs, skipped=skipped)
    return replace(found, max_difference=float(found.max_difference), ok=found.ok is True)


def _numbers(values: Sequence[Any]) -> tuple[float, ...]:
    found = tuple(map(float, values))
    if not found or not all(math.isfinite(value) and value >= 0 for value in found):
        raise ValueError("not the numbers of a race")
    return found
