"""Is `precision="auto"` as fast as bfloat16 and as int8, each chosen by name? The three, timed side by side.

Usage: python -m bench.auto [MODEL ...]; writes bench/results/auto.{json,md}. A process for each model. In each session
all three are loaded again from their bundles, in a different order, because the time of a call depends on where an
engine's weights end up in memory.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

import tsopt
from bench.int8 import NAMES, UNSEEN, away, drawn_like
from bench.models import MODELS
from bench.process import Rows, measure_each
from tsopt.runtime.racing.environment import Environment
from tsopt.runtime.racing.tournament import measure

RESULTS = Path(__file__).parent / "results"
SESSIONS, SECONDS = 5, 6.0  # of timing, in each
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
    found = {
        "winners": {precision: fast.report.winner for precision, fast in made.items()},
        "errors": {precision: away(fast, model, unseen)["relative_error"] for precision, fast in made.items()},
    }
    with tempfile.TemporaryDirectory() as place:
        bundles = {precision: fast.save(Path(place) / f"{precision}.tsopt") for precision, fast in made.items()}
        del made
        sessions = [session(model, bundles, [example, *unseen[:2]], turn) for turn in range(SESSIONS)]
    medians = {name: statistics.median(item[name] for item in sessions) for name in sessions[0]}
    ratios = {other: [item[other] / item["auto"] for item in sessions] for other in PRECISIONS[1:]}
    return found | {
        "timings_ms": {name: {"p50": ms} for name, ms in medians.items()},
        "sessions": SESSIONS,
        "against": {
            other: {"ratio": statistics.median(row), "low": min(row), "high": max(row)} for other, row in ratios.items()
        },
    }


def session(model: Any, bundles: dict[str, Path], inputs: list[Any], turn: int) -> dict[str, float]:
    """Median milliseconds of a call of each."""
    order = PRECISIONS[turn % 3 :] + PRECISIONS[: turn % 3]
    opened = {precision: tsopt.load(bundles[precision], trust=True) for precision in order}
    with torch.inference_mode():
        timings = measure({"eager": model, **opened}, inputs, seconds=SECONDS)
    return {name: timing.p50 for name, timing in timings.items()}


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
        *(
            f"- {name}: median of {row['sessions']} sessions, [lowest, highest]"
            for name, row in rows.items()
            if "sessions" in row
        ),
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
