"""Is `precision="auto"` as fast as bfloat16 and as int8, each chosen by name? The three, timed side by side.

Usage: python -m bench.auto [MODEL ...]; writes bench/results/auto.{json,md}. A process for each model.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

import tsopt
from bench.int8 import UNSEEN, away, drawn_like
from bench.models import MODELS
from bench.process import Rows, measure_each
from bench.side_by_side import ratio, summary
from tsopt.runtime.racing.environment import Environment
from tsopt.runtime.racing.tournament import measure

RESULTS = Path(__file__).parent / "results"
SECONDS = 15.0
NAMES = ("resnet18", "mobilenet_v2", "efficientnet_b0", "vit_b16", "bert_base", "gpt2", "llama_160m_token", "mlp")
PRECISIONS = ("auto", "bf16", "int8")


def main() -> None:
    measure_each("bench.auto:one", NAMES, RESULTS / "auto.json", line, page)


def one(name: str) -> dict[str, Any]:
    model, example = MODELS[name].load()
    data, unseen = drawn_like(example)
    made = {
        precision: tsopt.optimize(model, example, precision=precision, calibration=data, cache=False)
        for precision in PRECISIONS
    }
    with torch.inference_mode():
        timings = measure({"eager": model, **made}, [example, *unseen[:2]], seconds=SECONDS)
    return {
        "winners": {precision: fast.report.winner for precision, fast in made.items()},
        "timings_ms": {key: summary(timing) for key, timing in timings.items()},
        "against": {other: ratio(timings["auto"], timings[other]) for other in PRECISIONS[1:]},
        "errors": {precision: away(fast, model, unseen)["relative_error"] for precision, fast in made.items()},
    }


def page(env: Environment, rows: Rows) -> list[str]:
    header = ("model", *(f"{name}: {what}" for name in PRECISIONS for what in ("runs", "ms", "error")), "auto")
    worst = [_worst(row)["ratio"] for row in rows.values()]
    mean = math.exp(sum(map(math.log, worst)) / len(worst))
    return [
        f"| {' | '.join(header)} |",
        "|" + "---|" * len(header),
        *(line(name, row) for name, row in rows.items()),
        "",
        f"- auto: over the faster of the other two, geometric mean {mean:.2f}x, lowest {min(worst):.2f}x",
        f"- error: of all outputs together, in L2 norms, on {UNSEEN} inputs that were not used; weights are random",
    ]


def _worst(row: dict[str, Any]) -> dict[str, float]:
    return min(row["against"].values(), key=lambda found: found["ratio"])  # type: ignore[no-any-return]


def line(name: str, row: dict[str, Any]) -> str:
    cells = [name]
    for precision in PRECISIONS:
        cells += [
            row["winners"][precision].replace(", precision", ","),
            f"{row['timings_ms'][precision]['p50']:.3g}",
            f"{row['errors'][precision]:.2%}",
        ]
    found = _worst(row)
    return f"| {' | '.join(cells)} | {found['ratio']:.2f}x [{found['low']:.2f}, {found['high']:.2f}] |"


if __name__ == "__main__":
    main()
