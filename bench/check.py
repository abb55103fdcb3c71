"""Does `tsopt check` find a slowdown of 10 %, and is it quiet where nothing has changed?

Usage: python -m bench.check [MODEL ...] [--idle]; writes bench/results/check.{json,md}. Beside a process that keeps a
core busy half of the time, unless `--idle` is given. Each check is a fresh process, and compares with one baseline of
its model. A slowdown is seeded by a loop behind each call, of as many turns as make calls of this engine longer by a
tenth.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
import timeit
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tsopt
from bench.choice import busy
from bench.models import MODELS
from bench.process import in_own_process, measured_here
from tsopt.compiler.calls.example import Example, as_example
from tsopt.regression import sessions
from tsopt.runtime.racing.environment import environment
from tsopt.runtime.racing.tournament import measure

RESULTS = Path(__file__).parent / "results"
NAMES = ("mlp", "resnet18")
ENGINE = ("onnxruntime",)  # always the same: whether the race chooses another one is not the question here
SAME, SLOWER = 25, 10  # checks of each model
SEEDED = 0.1
ENGINES, CALIBRATION_SECONDS = 9, 5.0  # how often it is measured what makes a slowdown of that much
PLACE, TURNS = "TSOPT_BENCH_BASELINE", "TSOPT_BENCH_TURNS"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*")
    parser.add_argument("--idle", action="store_true")
    asked = parser.parse_args()
    names = asked.models or NAMES
    rows: dict[str, Any] = {
        name: row for name, row in measured_here(RESULTS / "check.json").items() if name not in names
    }
    with tempfile.TemporaryDirectory() as place, contextlib.nullcontext() if asked.idle else busy():
        for name in names:
            os.environ[PLACE] = str(Path(place) / f"{name}.json")
            in_own_process("bench.check:measured", name)
            os.environ[TURNS] = str(in_own_process("bench.check:turns", name))
            rows[name] = {"same": [], "slower": []}
            for number in range(SAME):  # both kinds in turn: a run may be ended early
                kinds = ("same", "slower") if number < SLOWER else ("same",)
                for kind in kinds:
                    rows[name][kind].append(in_own_process(f"bench.check:{kind}", name))
                out = {"environment": environment().to_json(), "busy": not asked.idle, "models": rows}
                (RESULTS / "check.json").write_text(json.dumps(out, indent=1) + "\n")
                (RESULTS / "check.md").write_text("\n".join(page(rows, not asked.idle)) + "\n")
            print(*line(name, rows[name]), sep="\n", flush=True)


def measured(name: str) -> None:
    model, example = MODELS[name].load()
    tsopt.check(model, example, os.environ[PLACE], update=True, backends=ENGINE)


def same(name: str) -> dict[str, Any]:
    model, example = MODELS[name].load()
    start = time.perf_counter()
    found = tsopt.check(model, example, os.environ[PLACE], backends=ENGINE)
    assert found.slowdown is not None
    return {
        "verdict": found.verdict,
        "slowdown": found.slowdown.estimate,
        "sessions": len(found.now.speedups),
        "seconds": time.perf_counter() - start,
        "eager_ms": found.now.eager_ms,
        "meeting_us": found.now.meeting_us,
        "remarks": list(found.remarks),
    }


def slower(name: str) -> dict[str, Any]:
    opened, turns = sessions._recompiled, int(os.environ[TURNS])
    sessions._recompiled = lambda fast: slowed(opened(fast), turns)
    return same(name)


def turns(name: str) -> int:
    """How many turns of the loop make a call slower by SEEDED: the median of several engines, each opened once."""
    model, example = MODELS[name].load()
    fast = tsopt.optimize(model, example, backends=ENGINE)
    return round(np.median([turns_for(sessions._recompiled(fast), as_example(example)) for _ in range(ENGINES)]))


def slowed(call: Callable[..., Any], turns: int) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        for _ in range(turns):
            pass
        return result

    return run


def turns_for(call: Callable[..., Any], example: Example) -> float:
    """How many turns of an empty loop make a call slower by SEEDED, including the overhead of the wrapper.

    That overhead is 3 to 6 % of a 12 us call, so the number is interpolated between two measurements.
    """

    def undisturbed(calls: dict[str, Callable[..., Any]], seconds: float) -> list[float]:
        timings = measure(calls, [example] * sessions.COPIES, seconds=seconds)
        return [timing.percentile(sessions.QUICKEST) for timing in timings.values()]

    with torch.inference_mode():
        (alone,) = undisturbed({"call": call}, 1.0)
        turn = min(timeit.repeat(slowed(int, 100_000), number=1, repeat=20)) * 1e3 / 100_000  # milliseconds
        few, many = (round(share * SEEDED * alone / turn) for share in (0.2, 1.8))  # one too low, one too high
        alone, with_few, with_many = undisturbed(
            {"call": call, "few": slowed(call, few), "many": slowed(call, many)}, CALIBRATION_SECONDS
        )
    wanted = alone * (1 + SEEDED)
    return few + (wanted - with_few) / (with_many - with_few) * (many - few)


def page(rows: dict[str, Any], is_busy: bool) -> list[str]:
    beside = "beside a process that keeps a core busy half of the time" if is_busy else "on an idle machine"
    return [
        f"On {environment()}; {beside}.",
        "",
        "| model | checks | ok | undecided | slower | median slowdown | its deviation | median sessions | median s |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
        *(text for name, row in rows.items() for text in line(name, row)),
        "",
        f"- slower by {SEEDED:.0%}: a loop follows each call, of as many turns as make calls so much longer; that was "
        "measured before the checks",
        "- only ONNX Runtime races against eager; the limit is 5 %; all checks of a model use the same baseline",
        *(f"- {name}: the run was ended early" for name, row in rows.items() if len(row["same"]) < SAME),
    ]


def line(name: str, row: dict[str, Any]) -> list[str]:
    lines = []
    for kind, title in (("same", name), ("slower", f"{name}, slower by {SEEDED:.0%}")):
        checks = row[kind]
        verdicts = Counter(item["verdict"] for item in checks)
        slowdowns = [item["slowdown"] for item in checks]
        cells = (
            title,
            *map(str, (len(checks), verdicts["ok"], verdicts["undecided"], verdicts["slower"])),
            f"{np.median(slowdowns):+.1%}",
            f"{np.std(slowdowns):.1%}",
            f"{np.median([item['sessions'] for item in checks]):.0f}",
            f"{np.median([item['seconds'] for item in checks]):.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
