"""The cache of race results: which candidate won for a program on a machine, and how the others did.

An entry is JSON and contains no code. Nothing in it is trusted: its winner must be one of the caller's candidates, and
is compiled, or opened from its files, verified and timed against eager again before it is returned. A win of eager is
reused only a few times before the best of the others is timed again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from tsopt._version import __version__
from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.structure import flatten
from tsopt.compiler.graph.program import Program
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.checking.verdict import INACCURATE, ORDER, Verdict
from tsopt.runtime.racing import cache_files
from tsopt.runtime.racing.cache_directory import directory, objection
from tsopt.runtime.racing.cache_files import FILES, LARGEST, clear, entries, forget
from tsopt.runtime.racing.environment import environment
from tsopt.runtime.racing.outcomes import MISSING, NOT_CHECKED, NOT_TIMED, REFUSED, SLOWER
from tsopt.runtime.racing.row import LOOPS, MODEL, Loop, Row
from tsopt.runtime.racing.speedup import Speedup, Timing
from tsopt.runtime.racing.timing import ColdStart

__all__ = [
    "Entry",
    "clear",
    "directory",
    "entries",
    "files_of_winner",
    "find",
    "forget",
    "keep",
    "key_of",
    "kind_of",
    "may_know",
    "objection",
]

log = logging.getLogger("tsopt")
FORMAT = 5
MOST = 1000  # entries; the oldest go
GREATEST = 1e10  # of any number in an entry: milliseconds, times, and seconds since 1970
AHEAD = 3600.0  # seconds that the clock may have been set back by since a race
# Statuses of rows: another day is as this one was.
KEPT = ("ok", "wrong", INACCURATE, "failed", SLOWER, NOT_CHECKED, NOT_TIMED, MISSING, *REFUSED)


@dataclass(frozen=True, slots=True)
class Entry:
    """What a race found.

    Attributes:
        winner: key of the winner's row.
        seconds: how long the race was to time.
        when: it was, in seconds since 1970.
        recalls: how often it was taken over since somebody was timed against eager again.
        checked: when that was; 0 when it was not.
        values: digest of the weights if a candidate was rejected for its results; with other weights it might not be.
            Otherwise empty.
    """

    rows: tuple[Row, ...]
    winner: str
    why: str
    seconds: float
    when: float
    recalls: int = 0
    checked: float = 0.0
    values: str = ""

    @property
    def date(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(self.when))


def key_of(
    captured: Program, optimized: Program, candidates: Iterable[Candidate], threads: int | None, *more: str
) -> str | None:
    """The name of the entry for a race: what decides its outcome, but for the values of the weights (`Entry.values`).

    None for a race with a backend of the user's own: its code may be another tomorrow.

    Args:
        more: what else was asked for.
    """
    racing = tuple(candidates)
    if any(candidate.info.is_own for candidate in racing):
        return None
    what = {
        "format": FORMAT,
        "tsopt": __version__,
        "programs": [captured.fingerprint(), optimized.fingerprint()],
        "environment": environment().to_json(),
        "candidates": [candidate.key for candidate in racing],
        "asked": more,
        "threads": threads,
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def kind_of(model: Callable[..., Any], example: Example) -> str:
    """What the key of a race begins with, which can be told before the model is captured: sizes and types.

    Empty for tensors without a size, such as nested ones.
    """
    held = [*model.named_parameters(), *model.named_buffers()] if isinstance(model, nn.Module) else []
    leaves, _ = flatten((example.args, example.kwargs))
    tensors = [*held, *((str(number), leaf) for number, leaf in enumerate(leaves))]
    sized = [(name, value) for name, value in tensors if not is_lazy(value)]
    try:
        what = [type(model).__qualname__, *(f"{name} {list(value.shape)} {value.dtype}" for name, value in sized)]
    except RuntimeError:
        return ""
    return hashlib.sha256("\n".join(what).encode()).hexdigest()[:16]


def may_know(kind: str) -> bool:
    """Whether there is an entry for a model and an example of this kind."""
    return cache_files.is_any(f"{kind}-")


def find(key: str, candidates: Sequence[Candidate], seconds: float, now: float | None = None) -> Entry | None:
    """The entry of a race that timed for as long, or None. One that is damaged is removed.

    Args:
        candidates: who may win.
        now: seconds since 1970; the system's clock when it is None.
    """
    try:
        raw = cache_files.read(key)
        if raw is None:
            return None
        entry = _entry(json.loads(raw), key, time.time() if now is None else now)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        log.info("removing a damaged cache entry: %s (%s)", key, error)
        forget(key)
        return None
    if entry.winner not in (MODEL, *(candidate.key for candidate in candidates)) or entry.seconds < seconds:
        return None
    return entry


def keep(key: str, entry: Entry, files: bytes | None = None) -> None:
    """Writes an entry atomically. A cache that cannot be written to is not an error.

    Args:
        files: those of the winner (`kept_files.packed`); None removes those of an earlier one.
    """
    raw = json.dumps(_json(entry, key)).encode()
    if len(raw) > LARGEST:
        return
    try:
        cache_files.write(key, raw)
        cache_files.forget_files(key)
        if files is not None:
            cache_files.write(key, files, FILES)
        cache_files.drop_oldest(MOST)
    except (OSError, ValueError) as error:
        log.info("cannot write the cache entry: %s", error)


def files_of_winner(key: str) -> bytes | None:
    """What was kept with an entry; None if there is nothing that can be read."""
    try:
        return cache_files.read(key, FILES)
    except (OSError, ValueError) as error:
        log.info("cannot read what a winner was compiled to: %s", error)
        return None


def _json(entry: Entry, key: str) -> dict[str, Any]:
    return {"format": FORMAT, "key": key, **asdict(entry)}


def _entry(data: Any, key: str, now: float) -> Entry:
    """An entry from JSON. Raises an error that `find` catches for anything that `keep` has not written."""
    if data.pop("format") != FORMAT or data.pop("key") != key:
        raise ValueError("wrong format or key")
    rows = tuple(_row(row) for row in _items(data.pop("rows")))
    seconds, when, checked = (_number(data.pop(name)) for name in ("seconds", "when", "checked"))
    recalls = _count(data.pop("recalls"))
    entry = Entry(rows, seconds=seconds, when=when, recalls=recalls, checked=checked, **_texts(Entry, data))
    if max(entry.when, entry.checked) > now + AHEAD:
        raise ValueError("date in the future")
    _check_winner(entry)
    return entry


def _check_winner(entry: Entry) -> None:
    """Raises ValueError if the rows do not support the winner."""
    keys = [row.key for row in entry.rows]
    if len(set(keys)) != len(keys) or entry.winner not in keys:
        raise ValueError("rows do not form a race")
    first, *others = entry.rows
    if first.status != "ok" or first.timing is None or first.speedup is not None:
        raise ValueError("first row is not a baseline")
    if any(row.status == "ok" and (row.timing is None or row.speedup is None) for row in others):
        raise ValueError("a correct candidate was not timed")
    faster = [row.key for row in others if row.is_faster]
    if entry.winner not in (faster or keys[:1]):
        raise ValueError("the winner does not match the rows")


def _row(data: dict[str, Any]) -> Row:
    timing, gain, loops, accuracy, cold = (data.pop(key) for key in ("timing", "speedup", "loops", "accuracy", "cold"))
    return Row(
        status=_one_of(KEPT, data.pop("status")),
        timing=None if timing is None else _timing(timing),
        speedup=None if gain is None else _speedup(gain),
        loops=tuple(map(_loop, _items(loops))),
        accuracy=None if accuracy is None else _verdict(accuracy),
        compile_seconds=_number(data.pop("compile_seconds")),
        cold=None if cold is None else ColdStart(_number(cold["first"]), _count(cold["slow_calls"])),
        **_texts(Row, data),
    )


def _loop(data: dict[str, Any]) -> Loop:
    return Loop(_one_of(LOOPS, data["when"]), _timing(data["timing"]), _speedup(data["speedup"]))


def _timing(data: dict[str, Any]) -> Timing:
    found = Timing(tuple(map(_number, _items(data["samples"]))), _count(data["calls_per_sample"]))
    if not found.is_sound:
        raise ValueError("invalid call times")
    return found


def _speedup(data: dict[str, Any]) -> Speedup:
    ratio, low, high = (_number(data[name]) for name in ("ratio", "low", "high"))
    return Speedup(ratio, low, high, _count(data["rounds"]))


def _verdict(data: dict[str, Any]) -> Verdict:
    ok, difference = data.pop("ok"), data.pop("max_difference")
    by_input: dict[str, Any] = {name: tuple(_items(data.pop(name))) for name in ("differences", "sizes")}
    numbers = (difference, *by_input["differences"], *by_input["sizes"])
    if type(ok) is not bool or any(type(value) not in (int, float) for value in numbers):  # if wrong, of any size
        raise TypeError("invalid verdict")
    test = _one_of((*ORDER, "type"), data.pop("test"))
    return Verdict(ok=ok, test=test, max_difference=float(difference), **by_input, **_texts(Verdict, data))


def _texts(cls: type[Row | Verdict | Entry], data: dict[str, Any]) -> dict[str, Any]:
    """Fields of a class that are texts or tuples of texts. Raises ValueError for a name that it does not have."""
    types = {field.name: str(field.type) for field in fields(cls)}
    if not set(data) <= set(types):
        raise ValueError(f"unknown fields of a {cls.__name__}: {sorted(data)}")
    return {
        name: tuple(map(_text, _items(value))) if types[name].startswith("tuple") else _text(value)
        for name, value in data.items()
    }


def _number(value: Any) -> float:
    """A number of seconds, milliseconds or times."""
    if type(value) not in (int, float) or not 0 <= value <= GREATEST:
        raise ValueError(f"number out of range: {str(value)[:40]}")
    return float(value)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= GREATEST:
        raise ValueError(f"invalid count: {str(value)[:40]}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a string")
    return value


def _items(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("not a list")
    return value


def _one_of(known: Sequence[str], value: Any) -> str:
    if value not in known:
        raise ValueError(f"not one of {', '.join(known)}")
    return str(value)
