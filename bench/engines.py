"""Every engine on every model: who wins, by how much, what each costs before its first answer.

Usage: python -m bench.engines [MODEL ...]; writes bench/results/engines.{json,md}. Each model has a process of its own.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import tsopt
from bench.models import MODELS
from bench.process import Rows, measure_each
from tsopt.runtime.backends.candidate import candidates_for
from tsopt.runtime.racing.environment import Environment
from tsopt.runtime.racing.row import EAGER

RESULTS = Path(__file__).parent / "results"
SECONDS = 20.0
NAMES = (
    *("mlp", "lstm", "resnet18", "resnet50", "mobilenet_v2", "bert_base", "gpt2", "vit_b16", "llama_160m"),
    *("efficientnet_b0", "convnext_tiny", "swin_tiny", "whisper_tiny", "segformer_b0"),
)
ENGINES = tuple(candidate.title for candidate in candidates_for("all"))


def main() -> None:
    measure_each("bench.engines:one", NAMES, RESULTS / "engines.json", line, page)


def one(name: str) -> dict[str, Any]:
    model, example = MODELS[name].load()
    fast = tsopt.optimize(model, example, backends="all", seconds=SECONDS, cache=False, time_all=True)
    # Once more as the user calls it: in this process, without the engines that lost.
    again = tsopt.benchmark(model, {"tsopt": fast}, example, seconds=SECONDS / 2).row("tsopt")
    records = {row.name: row.record() for row in fast.report.rows}
    return {"winner": fast.report.winner, "candidates": records, "called": again.record()}


def page(env: Environment, rows: Rows) -> list[str]:
    header = ("model", "eager ms", *ENGINES, "tsopt takes", "against the best engine", "called: speed-up")
    lines = (line(name, row) for name, row in rows.items())
    return [f"| {' | '.join(header)} |", "|" + "---|" * len(header), *lines, "", *summary(rows)]


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


def summary(rows: Rows) -> list[str]:
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
