"""What bfloat16 is worth: the fastest candidate in fp32 against the fastest in bf16, in one race for each model.

Usage: python -m bench.precision [MODEL ...]; writes bench/results/precision.{json,md}. A process for each model.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

import tsopt
from bench.models import MODELS
from bench.process import Rows, measure_each
from tsopt.compiler.calls.structure import flatten
from tsopt.runtime.racing.environment import Environment
from tsopt.runtime.racing.row import EAGER

RESULTS = Path(__file__).parent / "results"
SECONDS = 15.0
NAMES = ("resnet50", "mobilenet_v2", "bert_base", "gpt2", "vit_b16", "llama_160m", "whisper_tiny")


def main() -> None:
    measure_each("bench.precision:one", NAMES, RESULTS / "precision.json", line, page)


def one(name: str) -> dict[str, Any]:
    model, example = MODELS[name].load()
    fast = tsopt.optimize(model, example, precision="bf16", seconds=SECONDS, cache=False, time_all=True)
    with torch.no_grad():
        mine, theirs = (flatten(f(*example.args, **example.kwargs))[0] for f in (fast, model))
    away = max(float((a - b).norm() / b.norm()) for a, b in zip(mine, theirs, strict=True) if b.is_floating_point())
    records = {row.name: row.record() for row in fast.report.rows}
    return {"winner": fast.report.winner, "candidates": records, "away": away}


def page(env: Environment, rows: Rows) -> list[str]:
    header = ("model", "eager ms", "best in fp32", "ms", "best in bf16", "ms", "bf16 over fp32", "winner is away")
    gains = [fastest(row, low=False)["p50_ms"] / fastest(row, low=True)["p50_ms"] for row in rows.values()]
    mean = math.exp(sum(map(math.log, gains)) / len(gains))
    return [
        f"| {' | '.join(header)} |",
        "|" + "---|" * len(header),
        *(line(name, row) for name, row in rows.items()),
        "",
        f"- the fastest in bf16 over the fastest in fp32: geometric mean {mean:.2f}x over {len(gains)} models, "
        f"lowest {min(gains):.2f}x",
        "- away: the relative difference of the winner's outputs to eager's on the example, root of the sum of squares",
    ]


def line(name: str, row: dict[str, Any]) -> str:
    full, low = fastest(row, low=False), fastest(row, low=True)
    cells = (
        name,
        f"{row['candidates'][EAGER]['p50_ms']:.3g}",
        full["candidate"],
        f"{full['p50_ms']:.3g}",
        low["candidate"].partition(", ")[0],
        f"{low['p50_ms']:.3g}",
        f"{full['p50_ms'] / low['p50_ms']:.2f}x",
        f"{row['away']:.2%}",
    )
    return f"| {' | '.join(cells)} |"


def fastest(row: dict[str, Any], *, low: bool) -> dict[str, Any]:
    """The fastest right candidate in fp32, or in the lower precision; eager where none is."""
    records = row["candidates"].values()
    found = [r for r in records if r["speedup"] is not None and ("precision" in r["candidate"]) == low]
    right = [r for r in found if r["verdict"] in ("faster", "same", "slower", "undecided")]
    eager: dict[str, Any] = row["candidates"][EAGER]
    return min(right, key=lambda r: r["p50_ms"], default=eager)


if __name__ == "__main__":
    main()
