"""Entries of the cache that are stale, made up, or not entries at all.

How fast everybody is, is what the case says: it is about what is believed, not about the machine.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import random
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tsopt
from bench.hazards import ANY, RIGHT, Case, Outcome
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.racing import cache
from tsopt.runtime.racing import race as race_module
from tsopt.runtime.racing.row import MODEL
from tsopt.runtime.racing.speedup import Timing
from tsopt.runtime.rendering import row_cells

X = torch.linspace(-1, 1, 8).reshape(2, 4)
PACES = {"eager": 4.0, "eager + passes": 1.0, "TorchScript": 2.0}
DAY = 86400.0
TIMES = 40  # calls of `optimize`, in which anything that is believed must have come to light
Change = Callable[[dict[str, Any]], Any]


@contextlib.contextmanager
def own_cache() -> Iterator[Path]:
    """A cache of its own with one race in it."""

    def measured(calls: Any, inputs: Any, **_: Any) -> dict[str, Timing]:
        return {name: Timing((PACES[name],) * 9) for name in calls}

    with tempfile.TemporaryDirectory() as place:
        os.environ["TSOPT_CACHE_DIR"] = str(Path(place) / "cache")
        race_module.measure = measured  # type: ignore[assignment]
        optimize()
        (entry,) = (Path(place) / "cache").glob("*.json")
        yield entry


def optimize() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    return tsopt.optimize(model, X, backends=("eager", "torchscript"), seconds=0.1, isolate=False)


def change(entry: Path, by: Change) -> None:
    data = json.loads(entry.read_text())
    by(data)
    entry.write_text(json.dumps(data))


def eager_wins(data: dict[str, Any]) -> None:
    data.update(winner=MODEL, why="nothing is faster")


def eager_was_faster(data: dict[str, Any]) -> None:
    """As it was on another day, or as somebody wants it to be."""
    eager_wins(data)
    for row in data["rows"][1:]:
        row["speedup"].update(ratio=0.5, low=0.45, high=0.55)
        row["timing"]["samples"] = [8.0] * 9


def all_were_wrong(data: dict[str, Any]) -> None:
    eager_wins(data)
    for row in data["rows"][1:]:
        row.update(status="wrong", reason="it was", timing=None, speedup=None)


def believed_for_ever(by: Change) -> Callable[[str], Outcome]:
    """Whether an entry by which eager wins keeps the model slow."""

    def check(_: str) -> Outcome:
        with own_cache() as entry:
            change(entry, by)
            for count in range(1, TIMES + 1):
                if optimize().report.winner != "eager":
                    return Outcome("right", f"found out by call {count}")
        return Outcome("wrong", f"eager ran in {TIMES} of {TIMES} calls, four times slower than the best")

    return check


def raced_again(by: Change) -> Callable[[str], Outcome]:
    """Whether the very next call does not go by what the entry says."""

    def check(_: str) -> Outcome:
        with own_cache() as entry:
            change(entry, by)
            said = optimize().report.cached
        return RIGHT if not said else Outcome("wrong", f"believed: {said}")

    return check


def survived(by: Callable[[Path], Any]) -> Callable[[str], Outcome]:
    """Whether `optimize`, the report, `tsopt cache show` and `clear` do their work beside what is in the cache."""

    def check(_: str) -> Outcome:
        with own_cache() as entry:
            by(entry)
            found = optimize()
            json.dumps(found.report.to_json(), allow_nan=False)
            if found.report.winner != "eager + passes" or not str(found.report):
                return Outcome("wrong", f"{found.report.winner} wins, {found.report.why}")
            return commands()

    return check


def commands() -> Outcome:
    from tsopt.cli.main import main

    for command in (["cache", "show"], ["cache", "show", "--json"], ["cache", "clear"]):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = main(command)
        if code:
            return Outcome("wrong", f"{' '.join(command)} exits with {code}: {out.getvalue()[:100]}")
    return RIGHT


def edited(by: Change) -> Callable[[Path], None]:
    return lambda entry: change(entry, by)


def in_place(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def do(entry: Path) -> None:
        entry.unlink()
        make(entry)

    return do


def _socket(entry: Path) -> None:
    os.chdir(entry.parent)
    socket.socket(socket.AF_UNIX).bind(entry.name)


def _sparse(entry: Path) -> None:
    with entry.open("wb") as file:
        file.truncate(1 << 40)


def _folder(entry: Path) -> None:
    entry.mkdir()
    (entry / "mine").write_text("mine")


def values(data: Any) -> Iterator[tuple[Any, Any]]:
    """Each container in an entry with each of its keys."""
    for key, item in list(data.items() if isinstance(data, dict) else enumerate(data)):
        yield data, key
        if isinstance(item, (dict, list)):
            yield from values(item)


STRANGE = (None, True, -1, 0, 1e300, float("nan"), float("inf"), "7", "\x1b[31m", [], {}, [[]], 10**400, -0.0, "eager")


def _any_value(_: str) -> Outcome:
    """Each value of an entry in turn replaced by each strange one; what is found must be fit to be shown."""
    with own_cache() as entry:
        whole = json.loads(entry.read_text())
        for number in range(sum(1 for _ in values(whole))):
            data = copy.deepcopy(whole)
            container, key = list(values(data))[number]
            container[key] = random.Random(number).choice(STRANGE)
            entry.write_text(json.dumps(data))
            found = cache.find(entry.stem, (Candidate("eager"), Candidate("torchscript")), 0.1)
            if found is not None:
                assert found.date
                assert all(row_cells(row) and row.record() is not None for row in found.rows)
                assert all(str(row.accuracy) for row in found.rows if row.accuracy is not None)
    return RIGHT


def _numbers(value: Any) -> dict[str, Callable[[Path], None]]:
    return {
        "a sample": edited(lambda d: d["rows"][1]["timing"].update(samples=[value])),
        "when": edited(lambda d: d.update(when=value)),
        "seconds": edited(lambda d: d.update(seconds=value)),
        "a first call": edited(lambda d: d["rows"][1]["cold"].update(first=value)),
    }


CASES = (
    Case("eager wins, although others were faster", believed_for_ever(eager_wins), ANY),
    Case("eager wins, and others were slower", believed_for_ever(eager_was_faster), ANY),
    Case("eager wins, and others were wrong", believed_for_ever(all_were_wrong), ANY),
    Case("a race of two months ago", raced_again(lambda d: d.update(when=time.time() - 60 * DAY)), ANY),
    Case("a race in the future", raced_again(lambda d: d.update(when=time.time() + 60 * DAY)), ANY),
    Case("a row too many", raced_again(lambda d: d["rows"].append(d["rows"][2] | {"name": "OpenVINO"})), ANY),
    Case("a row too few", raced_again(lambda d: d["rows"].pop(2)), ANY),
    Case("seconds are NaN", raced_again(lambda d: d.update(seconds=float("nan"))), ANY),
    Case("seconds are a text", raced_again(lambda d: d.update(seconds="1e9")), ANY),
    Case("seconds are true", raced_again(lambda d: d.update(seconds=True)), ANY),
    *(
        Case(f"{name} is {value!r:.6}", survived(by), ANY)
        for value in (1e300, float("nan"), -1.0, 10**400)
        for name, by in _numbers(value).items()
    ),
    Case("deep nesting", survived(lambda entry: entry.write_text("[" * 100_000)), ANY),
    Case("a FIFO in its place", survived(in_place(os.mkfifo)), ANY),
    Case("a directory in its place", survived(in_place(_folder)), ANY),
    Case("a link to a device in its place", survived(in_place(lambda entry: entry.symlink_to("/dev/zero"))), ANY),
    Case("a socket in its place", survived(in_place(_socket)), ANY),
    Case("a terabyte in its place", survived(in_place(_sparse)), ANY),
    Case("any value is another", _any_value, ANY),
)
