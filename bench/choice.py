"""How good is the choice of a race? An oracle that times the engines right after it says which one is the best.

Usage: python -m bench.choice [MODEL ...] [--races N] [--busy]; writes bench/results/choice.{json,md}, or
choice_busy.{json,md} with `--busy`, beside a process that keeps a core busy half of the time.

The regret of a race is how much slower the chosen candidate is than the best one, by the medians of its oracle: the
engines in a process of their own, interleaved. 0 % is the best choice; a choice that is slower than eager would be a
broken promise. Each race has an oracle of its own, in the same minute and beside the same load, because a shared
machine changes its speed for minutes at a time, and one thread, which loses to two now, wins then. Where two threads
do not take the same time to meet after the oracle as before the race, both are repeated: the machine has changed in
between, and says nothing about the race. Together the oracles of a model have ten times the timing of a race.
"""

from __future__ import annotations

import argparse
import contextlib
import json
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
from tsopt.runtime.backends.candidate import candidates_for
from tsopt.runtime.checking.inputs import input_sets
from tsopt.runtime.racing.environment import environment
from tsopt.runtime.racing.speedup import ratio
from tsopt.runtime.racing.tournament import measure
from tsopt.runtime.report import EAGER

RESULTS = Path(__file__).parent / "results"
SESSIONS = 2  # of each engine in an oracle: no two are equally fast
SECONDS = 10.0  # of an oracle
SMALL = 0.03  # regret that no user would notice
CHANGED = 1.25  # times as long for threads to meet: another state of the machine
REPEATS = 3  # of a race and its oracle, at most
MEETINGS = 200
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
    asked = parser.parse_args()
    place = RESULTS / f"choice{'_busy' if asked.busy else ''}.json"
    rows: dict[str, Any] = json.loads(place.read_text())["models"] if asked.models and place.exists() else {}
    for name in asked.models or NAMES:
        races = []
        with busy() if asked.busy else contextlib.nullcontext():
            races += [judged(name) for _ in range(asked.races)]
        rows[name] = {"races": races}
        print(line(name, rows[name]), flush=True)
        out = {"environment": environment().to_json(), "busy": asked.busy, "models": rows}
        place.write_text(json.dumps(out, indent=1) + "\n")
        place.with_suffix(".md").write_text("\n".join(page(rows, asked.busy)) + "\n")


def judged(name: str) -> dict[str, Any]:
    """One race, its oracle, and its regret; both are repeated while the machine changes in between."""
    changed, repeats = True, -1
    while changed and repeats < REPEATS:
        repeats += 1
        meetings = [in_own_process("bench.choice:meeting", "")]
        race = in_own_process("bench.choice:raced", name)
        meetings.append(in_own_process("bench.choice:meeting", ""))
        medians = in_own_process("bench.choice:oracle", name)
        meetings.append(in_own_process("bench.choice:meeting", ""))
        changed = max(meetings) > CHANGED * min(meetings)
    regret = medians[race["winner"]] / min(medians.values()) - 1
    return race | {"oracle": medians, "regret": regret, "repeats": repeats, "changed": changed, "meetings": meetings}


def meeting(_: str) -> float:
    """Microseconds of layers so small that the two threads of ONNX Runtime mostly wait for each other.

    torch's threads do not show this state, or less of it: they meet once in a call, these once in a layer.
    """
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    x = torch.ones(1, 256)
    call = tsopt.compile(tsopt.capture(model, x), "onnxruntime")
    spent = []
    for _ in range(MEETINGS):
        start = time.perf_counter()
        for _ in range(100):
            call(x)
        spent.append((time.perf_counter() - start) * 1e4)
    return float(np.percentile(spent, 10))  # another process may have a core for half of the time


def oracle(name: str) -> dict[str, float]:
    """Milliseconds per call of each engine, by title: the median of its sessions."""
    model, example = MODELS[name].load()
    program = tsopt.transform(tsopt.capture(model, example))
    calls: dict[str, Callable[..., Any]] = {EAGER: model}
    sessions: dict[str, list[str]] = {EAGER: [EAGER]}
    for number in range(SESSIONS):
        for candidate in candidates_for(None):
            with contextlib.suppress(tsopt.TsoptError):
                session = f"{candidate.title} #{number}"
                calls[session] = tsopt.compile(program, candidate.key)
                sessions.setdefault(candidate.title, []).append(session)
    inputs = [item.clone() for item in input_sets(example, 7)[:3]]
    with protected(model), torch.inference_mode():
        timings = measure(calls, inputs, seconds=SECONDS)
    eager = timings[EAGER]
    return {
        title: float(np.median([eager.p50 / ratio(timings[session], eager) for session in own]))
        for title, own in sessions.items()
    }


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
    slower = sum(race["oracle"][race["winner"]] > race["oracle"][EAGER] for race in races)
    changed = [race.get("changed", False) for race in races]
    repeated = sum(race.get("repeats", 0) for race in races)
    beside = "beside a process that keeps a core busy half of the time" if is_busy else "on an idle machine"
    return [
        f"On {environment()}; {beside}.",
        "",
        f"Regret at most {SMALL:.0%} in {good} of {len(races)} races; slower than eager in {slower}. Repeated, because"
        f" two threads met faster or slower afterwards: {repeated}; in the last repeat as well: {sum(changed)}.",
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
