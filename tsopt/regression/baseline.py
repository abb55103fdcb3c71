"""A baseline: what was measured of an optimized model at one time, and the file that keeps it."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tsopt.errors import UsageError
from tsopt.runtime.bundles.staging import staged
from tsopt.runtime.racing.environment import Environment
from tsopt.runtime.untrusted_text import printable

FORMAT = 2  # in 1, speed-ups were those of medians
MOST_BYTES = 1 << 24  # of a file
MOST_SESSIONS = 1000
LONGEST = 400  # characters of a text
LARGEST = 1e9  # a speed-up, milliseconds, or a score; the smallest speed-up or time is its inverse
MOST = 10**18  # multiply-accumulates, ops or functions of a call
IN_REPORTS = frozenset({"model", "winner", "winner_key", "rows", "passes", "environment"})  # keys in the JSON of each
CREATE = "create one: `tsopt check MODEL --baseline FILE --update`, or tsopt.check(model, x, FILE, update=True)"


@dataclass(frozen=True, slots=True)
class Baseline:
    """What was measured of an optimized model.

    Attributes:
        winner: the title of the candidate that ran, such as `ONNX Runtime`.
        speedups: how many times as fast as eager it was, in each session.
        inputs: the types of the inputs; empty if unknown.
        eager_ms: milliseconds of a call in eager mode, the median over sessions; None if unknown.
        meeting_us: microseconds that threads took to meet, the median over sessions; None if unknown.
        macs: multiply-accumulates of a call in eager mode; None if unknown.
        ops, functions: of torch that this call runs, and that Python calls in it; None if unknown.
        metric: what `score` is: `agreement`, another built-in metric, or the name of the user's function; empty if
            unknown.
        machine: CPU, cores and threads; empty if unknown.
        versions: of the packages.
        over_layers: how many times as fast as layers that are the same for all models it was, in each session; empty if
            unknown.
        are_short: these are the small layers, with which short calls are compared.
    """

    model: str
    winner: str
    speedups: tuple[float, ...]
    inputs: str = ""
    eager_ms: float | None = None
    meeting_us: float | None = None
    macs: int | None = None
    ops: int | None = None
    functions: int | None = None
    metric: str = ""
    score: float | None = None
    machine: str = ""
    versions: str = ""
    over_layers: tuple[float, ...] = ()
    are_short: bool = False

    def save(self, path: str | Path) -> Path:
        """Writes the baseline as JSON; the file, or what a link there leads to, is complete or not written at all.

        Raises:
            BundleError: the place cannot be written.
        """
        target = Path(os.path.realpath(path))
        with staged(target, unpack=True) as directory:
            (directory / target.name).write_text(json.dumps({"tsopt_baseline": FORMAT} | asdict(self), indent=1) + "\n")
        return Path(path)


def read_baseline(path: str | Path) -> Baseline:
    """Reads what `Baseline.save` wrote, or the JSON of a report, whose winner counts as one session.

    Raises:
        UsageError: the file cannot be read, or is neither of these.
    """
    place = Path(path)
    try:
        data = _data_in(place)
        return _of_report(data) if "rows" in data else _of_baseline(data)
    except (ValueError, OverflowError, RecursionError) as error:
        why = str(error)[:300] or "it is nested too deeply"
        raise UsageError("the file is not a baseline", where=str(place), why=why, fix=CREATE) from error


def check_replaceable(path: str | Path) -> None:
    """Raises UsageError if the file is there and is neither a baseline nor a report: it was probably named by mistake.

    Those of any version may be replaced, also if they cannot be read.
    """
    place = Path(path)
    if place.is_dir():
        raise UsageError("the baseline cannot be written: it is a directory", where=str(place), fix="name a file")
    if place.exists() and not place.is_file():  # a device or a pipe would be replaced by a file
        raise UsageError("the baseline cannot be written: it is not a file", where=str(place), fix="name a file")
    if not place.exists() or not place.stat().st_size:
        return
    try:
        data = _data_in(place)
        why = "" if "tsopt_baseline" in data or data.keys() >= IN_REPORTS else "it is JSON of something else"
    except (ValueError, RecursionError) as error:
        why = str(error)[:300] or "it is nested too deeply"
    if why:
        raise UsageError(
            "the file is not a baseline, and would be overwritten",
            where=printable(str(place)),
            why=why,
            fix="remove the file, or choose another name for the baseline",
        )


def _data_in(place: Path) -> dict[str, Any]:
    """Raises UsageError if the file cannot be read, ValueError or RecursionError if it is not a JSON object."""
    try:
        with place.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError("the baseline cannot be read", where=printable(str(place)), why=why, fix=CREATE) from error
    if len(text) > MOST_BYTES:
        raise ValueError(f"the file has more than {MOST_BYTES >> 20} MB")
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError("it is not a JSON object")
    return data


def machine_of(found: Environment) -> str:
    """CPU, cores and threads, in one line."""
    return line(", ".join(filter(None, (found.gpu, found.cpu, f"cores: {found.cores}", f"threads: {found.threads}"))))


def versions_of(found: Environment) -> str:
    """`torch 2.13.0, numpy 2.4.6`, for example."""
    return line(", ".join(f"{name} {version}" for name, version in found.versions.items()))


def line(text: str) -> str:
    """A text as a file keeps it: one line, of a length that a table can hold; a longer one ends with its digest."""
    found = " ".join(printable(text).split())
    if len(found) <= LONGEST:
        return found
    return f"{found[: LONGEST - 20]}... {hashlib.sha256(found.encode()).hexdigest()[:16]}"


def _of_baseline(data: Mapping[str, Any]) -> Baseline:
    if data.get("tsopt_baseline") != FORMAT:
        raise ValueError(f"'tsopt_baseline' is not {FORMAT}")
    speedups, over_layers = data.get("speedups"), data.get("over_layers", [])
    if not isinstance(speedups, list) or not 1 <= len(speedups) <= MOST_SESSIONS:
        raise ValueError(f"'speedups' is not a list of 1 to {MOST_SESSIONS} numbers")
    if not isinstance(over_layers, list) or len(over_layers) not in (0, len(speedups)):
        raise ValueError("'over_layers' is not a list of as many numbers as there are speed-ups")
    are_short = data.get("are_short", False)
    if not isinstance(are_short, bool):
        raise ValueError("'are_short' is neither true nor false")
    return Baseline(
        speedups=tuple(_positive(value, "speedups") for value in speedups),
        are_short=are_short,
        over_layers=tuple(_positive(value, "over_layers") for value in over_layers),
        eager_ms=None if data.get("eager_ms") is None else _positive(data["eager_ms"], "eager_ms"),
        meeting_us=None if data.get("meeting_us") is None else _positive(data["meeting_us"], "meeting_us"),
        macs=_count(data, "macs", "multiply-accumulates"),
        ops=_count(data, "ops", "ops"),
        functions=_count(data, "functions", "functions"),
        score=None if data.get("score") is None else _number(data["score"], "score"),
        **{key: _text(data, key) for key in ("model", "winner", "inputs", "metric", "machine", "versions")},
    )


def _of_report(data: Mapping[str, Any]) -> Baseline:
    rows, found = data["rows"], data.get("environment")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("'rows' is not a list of objects")
    named = {row.get("name"): row for row in rows if isinstance(row.get("name"), str)}
    winner, eager = _text(data, "winner"), named.get("eager", {})
    if winner not in named:
        raise ValueError("it has no row for its winner")
    took, takes = _quickest(eager), _quickest(named[winner])
    if winner != "eager" and (took is None or takes is None):
        raise ValueError("'p5_ms' is missing, as in reports of earlier versions")
    try:
        where = Environment(**found) if isinstance(found, dict) else None
        machine, versions = ("", "") if where is None else (machine_of(where), versions_of(where))
    except (TypeError, AttributeError) as error:
        raise ValueError("'environment' is not that of a report") from error
    return Baseline(
        model=_text(data, "model"),
        winner=winner,
        speedups=(took / takes if took and takes else 1.0,),
        eager_ms=took,
        machine=machine,
        versions=versions,
    )


def _quickest(row: Mapping[str, Any]) -> float | None:
    """Milliseconds that the quickest calls took; None if they were not timed."""
    return None if row.get("p5_ms") is None else _positive(row["p5_ms"], "p5_ms")


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key, "")
    if not isinstance(value, str):
        raise ValueError(f"{key!r} is not a text")
    return line(value)


def _count(data: Mapping[str, Any], key: str, of: str) -> int | None:
    """A number of things; None if it is not given."""
    value = data.get(key)
    if value is not None and (type(value) is not int or not 0 <= value <= MOST):
        raise ValueError(f"{key!r} is not a number of {of}")
    return value


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST:
        raise ValueError(f"{key!r} is not a number, or not a plausible one")
    return float(value)


def _positive(value: Any, key: str) -> float:
    if (number := _number(value, key)) < 1 / LARGEST or not math.isfinite(number):
        raise ValueError(f"{key!r} is not positive")
    return number
