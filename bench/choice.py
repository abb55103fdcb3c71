"""How good is the choice of a race? Oracles that time the engines for longer say which one is the best.

Usage: python -m bench.choice [MODEL ...] [--races N] [--more] [--busy]; writes bench/results/choice.{json,md}, or
choice_busy.{json,md} with `--busy`, beside a process that keeps a core busy half of the time. With `--more`, races are
added to those on record until each model has N.

The regret of a race is how many times as long the chosen candidate takes as the best one, less one, by its oracles: the
engines in a process of their own, interleaved, compared with each other round by round. 0 % is the best choice; a
choice that is slower than eager would be a broken promise. One oracle runs before a few races and one after them,
beside the same load, because a shared machine changes its speed for minutes at a time, and one thread, which loses to
two now, wins then. If the two disagree about engines that are close to the best, or threads have taken longer to meet
before or after any of the races, the races and both oracles are repeated, whatever was chosen: the machine has changed
in the meantime, and its oracles cannot judge the races.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tsopt
from bench.models import MODELS
from bench.process import in_own_process
from tsopt.compiler.protect import protected
from tsopt.regression.machine_state import Meeting
from tsopt.runtime.backends.candidate import candidates_for
from tsopt.runtime.checking.inputs import input_sets
from tsopt.runtime.racing.environment import environment
from tsopt.runtime.racing.row import EAGER
from tsopt.runtime.racing.speedup import Timing, fastest_first, ratio
from tsopt.runtime.racing.tournament import measure

RESULTS = Path(__file__).parent / "results"
SESSIONS = 2  # of each engine in an oracle: no two are equally fast
SECONDS = 8.0  # of an oracle
SMALL = 0.03  # regret that no user would notice
CHANGED = 1.25  # times as long beside the others, or for threads to meet: another state of the machine
IN_QUESTION = 1.5  # times as long as the best: what a change does to slower ones does not matter
TOGETHER = 3  # races between two oracles
REPEATS = 3  # of races and their oracles, at most
NAMES = (
    *("mlp", "lstm", "ensemble_16", "heads_8", "resnet18", "mobilenet_v2", "efficientnet_b0", "bert_base", "gpt2"),
    "vit_b16",
)
BUSY = """
import time
while True:
    end = time.perf_counter() + 0.05
    while time.perf_counter() < end:
        pass
    time.sleep(0.05)
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", help="all when none is named; the numbers of the others stay")
    parser.add_argument("--races", type=int, default=10)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--more", action="store_true")
    asked = parser.parse_args()
    place = RESULTS / f"choice{'_busy' if asked.busy else ''}.json"
    kept = place.exists() and (asked.models or asked.more)
    known = json.loads(place.read_text()) if kept else {}
    here = json.loads(json.dumps(environment().to_json()))
    if asked.more and known and known["environment"] | {"platform": here["platform"]} != here:  # a kernel may be newer
        raise SystemExit("the races on record are of another machine, or of other versions")
    rows: dict[str, Any] = known.get("models", {})
    for name in asked.models or NAMES:
        races = rows[name]["races"] if asked.more and name in rows else []
        rows[name] = {"races": races}
        while len(races) < asked.races:
            with busy() if asked.busy else contextlib.nullcontext():
                races += judged(name, min(TOGETHER, asked.races - len(races)))
            out = {"environment": here, "busy": asked.busy, "models": rows}
            place.write_text(json.dumps(out, indent=1) + "\n")
            place.with_suffix(".md").write_text("\n".join(page(rows, asked.busy)) + "\n")
        print(line(name, rows[name]), flush=True)


def judged(name: str, count: int) -> list[dict[str, Any]]:
    """So many races with their regrets, by oracles before and after; all repeated while the machine changes between."""
    changed, repeats, meeting = True, -1, Meeting()
    while changed and repeats < REPEATS:
        repeats += 1
        steps = ["oracle", *["raced"] * count, "oracle"]
        meetings, results = [meeting.microseconds() or 0.0], []
        for step in steps:
            results.append(in_own_process(f"bench.choice:{step}", name))
            meetings.append(meeting.microseconds() or 0.0)
        before, *races, after = results
        changed = max(meetings) > CHANGED * min(meetings) or any(
            max(times, after[title]) > CHANGED * min(times, after[title])
            for title, times in before.items()
            if min(times, after[title]) < IN_QUESTION
        )
    both = {title: math.sqrt(times * after[title]) for title, times in before.items()}
    best = min(both.values())
    judgement = {"oracle": both, "repeats": repeats, "changed": changed, "meetings_us": meetings}
    return [race | judgement | {"regret": both[race["winner"]] / best - 1} for race in races]


def oracle(name: str) -> dict[str, float]:
    """How many times as long as the fastest engine each of them takes, by title: in all rounds of all its sessions."""
    model, example = MODELS[name].load()
    program = tsopt.transform(tsopt.capture(model, example))
    calls: dict[str, Callable[..., Any]] = {EAGER: model}
    sessions: dict[str, list[str]] = {EAGER: [EAGER] * SESSIONS}
    for number in range(SESSIONS):
        for candidate in candidates_for(None):
            with contextlib.suppress(tsopt.TsoptError):
                session = f"{candidate.title} #{number}"
                calls[session] = tsopt.compile(program, candidate.key)
                sessions.setdefault(candidate.title, []).append(session)
    inputs = [item.clone() for item in input_sets(example, 7)[:3]]
    with protected(model), torch.inference_mode():
        timings = measure(calls, inputs, seconds=SECONDS)
    rounds = len(timings[EAGER].samples)
    merged = {
        title: Timing(tuple(time for session in own for time in padded(timings[session].samples, rounds)))
        for title, own in sessions.items()
    }
    best = merged[fastest_first(merged)[0]]
    return {title: ratio(best, timing) for title, timing in merged.items()}


def padded(samples: tuple[float, ...], rounds: int) -> tuple[float, ...]:
    """A sample for each round; NaN after the engine has left."""
    return (*samples, *[math.nan] * (rounds - len(samples)))


def raced(name: str) -> dict[str, Any]:
    """The winner of one race with default settings, and the seconds that `optimize` took."""
    model, example = MODELS[name].load()
    start = time.perf_counter()
    report = tsopt.optimize(model, example, cache=False).report
    return {"winner": report.winner, "seconds": time.perf_counter() - start, "stages": dict(report.stages)}


@contextlib.contextmanager
def busy() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def page(rows: dict[str, Any], is_busy: bool) -> list[str]:
    races = [race for row in rows.values() for race in row["races"]]
    good = sum(race["regret"] <= SMALL for race in races)
    mean = np.mean([race["regret"] for race in races])
    slower = sum(race["oracle"][race["winner"]] > race["oracle"][EAGER] for race in races)
    changed = [race.get("changed", False) for race in races]
    repeated = sum(race.get("repeats", 0) for race in races)
    beside = "beside a process that keeps a core busy half of the time" if is_busy else "on an idle machine"
    return [
        f"On {environment()}; {beside}.",
        "",
        f"Regret at most {SMALL:.0%} in {good} of {len(races)} races, {mean:.1%} on average; slower than eager in"
        f" {slower}. Repeated because the machine changed between the oracles: {repeated} times; in the last repeat as"
        f" well: {sum(changed)}.",
        "",
        "| model | best, times | chosen, times | median regret | largest regret | median seconds of `optimize` |",
        "|---|---|---|---|---|---|",
        *(line(name, row) for name, row in rows.items()),
    ]


def line(name: str, row: dict[str, Any]) -> str:
    races = row["races"]
    best = Counter(min(race["oracle"], key=race["oracle"].__getitem__) for race in races)
    regret = [race["regret"] for race in races]
    cells = (
        name,
        counted(best),
        counted(Counter(race["winner"] for race in races)),
        f"{np.median(regret):.1%}",
        f"{max(regret):.1%}",
        f"{np.median([race['seconds'] for race in races]):.1f}",
    )
    return f"| {' | '.join(cells)} |"


def counted(titles: Counter[str]) -> str:
    return ", ".join(f"{title} {times}" for title, times in titles.most_common())


if __name__ == "__main__":
    main()
