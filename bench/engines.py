"""Every engine on every model: who wins, by how much, what each costs before its first answer.

Usage: python -m bench.engines [MODEL ...]; writes bench/results/engines.{json,md}. Each model has a process of its own.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import tsopt
from bench.models import MODELS
from bench.process import in_own_process
from tsopt.runtime.environment import environment
from tsopt.runtime.race import ALL_BACKENDS, EAGER, title_of

RESULTS = Path(__file__).parent / "results"
SECONDS = 20.0
NAMES = (
    *("mlp", "lstm", "resnet18", "resnet50", "mobilenet_v2", "bert_base", "gpt2", "vit_b16", "llama_160m"),
    *("efficientnet_b0", "convnext_tiny", "swin_tiny", "whisper_tiny", "segformer_b0"),
)
ENGINES = tuple(title_of(name) for name in ALL_BACKENDS)


def main() -> None:
    names = sys.argv[1:] or list(NAMES)
    place = RESULTS / "engines.json"
    rows = {} if not sys.argv[1:] or not place.exists() else json.loads(place.read_text())["models"]
    for name in names:
        rows[name] = in_own_process("bench.engines:one", name)
        print(line(name, rows[name]), flush=True)
        write({name: rows[name] for name in NAMES if name in rows}, place)


def one(name: str) -> dict[str, Any]:
    model, example = MODELS[name].load()
    fast = tsopt.optimize(model, example, backends="all", seconds=SECONDS)
    # Once more as the user calls it: in this process, without the engines that lost.
    again = tsopt.benchmark(model, {"tsopt": fast}, example, seconds=SECONDS / 2).row("tsopt")
    records = {row.name: row.record() for row in fast.report.rows}
    return {"winner": fast.report.winner, "candidates": records, "called": again.record()}


def write(rows: dict[str, Any], place: Path) -> None:
    """The numbers and the table, after each model: a run takes long."""
    env = environment()
    place.write_text(json.dumps({"environment": env.to_json(), "models": rows}, indent=1) + "\n")
    header = ("model", "eager ms", *ENGINES, "tsopt takes", "against the best engine", "called: speed-up")
    table = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    table += [line(name, row) for name, row in rows.items()]
    (RESULTS / "engines.md").write_text("\n".join([f"On {env}.", "", *table, "", *summary(rows), ""]))


def line(name: str, row: dict[str, Any]) -> str:
    found, called = row["candidates"], row["called"]
    cells = (
        name,
        f"{found[EAGER]['p50_ms']:.3g}",
        *(_cell(found.get(engine)) for engine in ENGINES),
        row["winner"],
        f"{against_best(row):.2f}x",
        f"{called['speedup']:.2f}x [{called['speedup_low']:.2f}, {called['speedup_high']:.2f}]",
    )
    return f"| {' | '.join(cells)} |"


def _cell(record: dict[str, Any] | None) -> str:
    if record is None:
        return "-"
    return record["verdict"] if record["speedup"] is None else f"{record['speedup']:.2f}x"


def against_best(row: dict[str, Any]) -> float:
    """The fastest right engine's median over that of the one that was taken."""
    times = [record["p50_ms"] for record in row["candidates"].values() if record["p50_ms"] and record["speedup"] != 0]
    return float(min(times) / row["candidates"][row["winner"]]["p50_ms"])


def summary(rows: dict[str, dict[str, Any]]) -> list[str]:
    called = [row["called"]["speedup"] for row in rows.values()]
    mean = math.exp(sum(map(math.log, called)) / len(called))
    wins = {engine: sum(row["winner"] == engine for row in rows.values()) for engine in (EAGER, *ENGINES)}
    return [
        f"- tsopt over eager, as it is called: geometric mean {mean:.2f}x over {len(called)} models, "
        f"lowest {min(called):.2f}x",
        f"- tsopt against the best engine: lowest {min(map(against_best, rows.values())):.2f}x",
        f"- wins: {', '.join(f'{engine} {count}' for engine, count in wins.items() if count)}",
    ]


if __name__ == "__main__":
    main()
