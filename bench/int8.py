"""What int8 is worth: the fastest candidate in fp32 against layers on 8-bit integers, in one race for each model.

Usage: python -m bench.int8 [MODEL ...]; writes bench/results/int8.{json,md}. A process for each model.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

import tsopt
from bench.models import MODELS
from bench.precision import fastest
from bench.process import Rows, measure_each
from tsopt.compiler.calls.structure import flatten
from tsopt.errors import NoGain
from tsopt.runtime.racing.environment import Environment
from tsopt.runtime.report import EAGER

RESULTS = Path(__file__).parent / "results"
SECONDS = 15.0
KEY = "onednn?precision=int8"
VISION = ("resnet18", "resnet50", "mobilenet_v2", "efficientnet_b0", "vit_b16")
NAMES = ("mlp", *VISION, "bert_base", "gpt2", "llama_160m", "whisper_tiny")


def main() -> None:
    measure_each("bench.int8:one", NAMES, RESULTS / "int8.json", line, page)


def one(name: str) -> dict[str, Any]:
    model, example = MODELS[name].load()
    fast = tsopt.optimize(model, example, precision="int8", seconds=SECONDS, cache=False, time_all=True)
    row = next(row for row in fast.report.rows if row.key == KEY)
    return {
        "winner": fast.report.winner,
        "candidates": {item.name: item.record() for item in fast.report.rows},
        "int8": row.record() | {"notes": list(row.notes), "status": row.status, "reason": row.reason},
        "difference": _difference(model, example),
    }


def _difference(model: torch.nn.Module, example: tsopt.Example) -> float | None:
    """The largest relative difference of the outputs in int8 on the example; None where no layer runs so."""
    try:
        quantized = tsopt.compile(tsopt.transform(tsopt.capture(model, example)), KEY)
    except NoGain:
        return None
    with torch.no_grad():
        mine, theirs = (flatten(f(*example.args, **example.kwargs))[0] for f in (quantized, model))
    return max(float((a - b).norm() / b.norm()) for a, b in zip(mine, theirs, strict=True) if b.is_floating_point())


def page(env: Environment, rows: Rows) -> list[str]:
    header = (
        "model",
        "eager ms",
        "best in fp32",
        "ms",
        "int8 ms",
        "int8 over fp32",
        "max rel diff",
        "int8 says",
        "chosen",
    )
    gains = [_gain(row) for row in rows.values() if fastest(row, low=True)["candidate"] == row["winner"]]
    mean = math.exp(sum(map(math.log, gains)) / len(gains)) if gains else math.nan
    return [
        f"| {' | '.join(header)} |",
        "|" + "---|" * len(header),
        *(line(name, row) for name, row in rows.items()),
        "",
        f"- int8 over the fastest in fp32, where int8 is chosen: geometric mean {mean:.2f}x over {len(gains)} models",
        "- max rel diff: the largest relative difference of an output in int8 to eager's on the example, in L2 norms",
        "- weights are random, so it says how errors add up, not what a trained model loses",
    ]


def line(name: str, row: dict[str, Any]) -> str:
    full, low = fastest(row, low=False), row["int8"]
    cells = (
        name,
        f"{row['candidates'][EAGER]['p50_ms']:.3g}",
        full["candidate"],
        f"{full['p50_ms']:.3g}",
        "-" if low["p50_ms"] is None else f"{low['p50_ms']:.3g}",
        "-" if low["p50_ms"] is None else f"{_gain(row):.2f}x",
        "-" if row["difference"] is None else f"{row['difference']:.2%}",
        low["reason"] or low["notes"][0] if low["reason"] or low["notes"] else low["verdict"],
        "int8" if low["candidate"] == row["winner"] else "fp32",
    )
    return f"| {' | '.join(cells)} |"


def _gain(row: dict[str, Any]) -> float:
    return float(fastest(row, low=False)["p50_ms"] / row["int8"]["p50_ms"])


if __name__ == "__main__":
    main()
