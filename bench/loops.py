"""Is tsopt faster than eager in a loop of nothing but calls, and as well where torch computes between the calls?

Usage: python -m bench.loops [MODEL ...]; writes bench/results/loops.{json,md}. Each model has a process of its own, in
which eager, tsopt and ONNX Runtime by hand take turns in both loops. Between calls, torch normalizes a picture.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tsopt
from bench.models import MODELS as LARGER
from bench.process import Rows, measure_each
from bench.side_by_side import ort, ratio
from tsopt.runtime.racing.environment import Environment
from tsopt.runtime.racing.row import EAGER
from tsopt.runtime.racing.speedup import Timing
from tsopt.runtime.racing.timing import rest

RESULTS = Path(__file__).parent / "results"
ALONE, BETWEEN = "back-to-back calls", "torch ops between calls"
OURS, BY_HAND = "tsopt", "ONNX Runtime by hand"
ROUNDS, SECONDS = 24, 0.03  # of each sample


def layers(rows: int, *sizes: int) -> tuple[nn.Module, tsopt.Example]:
    pairs = itertools.pairwise(sizes)
    modules = [module for a, b in pairs for module in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*modules).eval(), tsopt.example(torch.randn(rows, sizes[0]))


def convolutions() -> tuple[nn.Module, tsopt.Example]:
    sizes = (3, 32, 64, 128)
    pairs = itertools.pairwise(sizes)
    modules = [module for a, b in pairs for module in (nn.Conv2d(a, b, 3, 2, 1), nn.ReLU())]
    return nn.Sequential(*modules).eval(), tsopt.example(torch.randn(1, 3, 128, 128))


def encoder_layer() -> tuple[nn.Module, tsopt.Example]:
    return nn.TransformerEncoderLayer(128, 4, 256, batch_first=True).eval(), tsopt.example(torch.randn(1, 32, 128))


MODELS: dict[str, Callable[[], tuple[nn.Module, tsopt.Example]]] = {
    "layers_64": lambda: layers(1, 64, 64, 64),
    "layers_256": lambda: layers(16, 256, 256, 256, 256),
    "layers_1024": lambda: layers(64, 1024, 1024, 1024, 1024),
    "convolutions": convolutions,
    "encoder_layer": encoder_layer,
    **{name: LARGER[name].load for name in ("resnet18", "mobilenet_v2", "distilbert")},
}


def main() -> None:
    measure_each("bench.loops:one", MODELS, RESULTS / "loops.json", line, page)


def one(name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model, example = MODELS[name]()
    fast = tsopt.optimize(model, example, cache=False)
    calls: dict[str, Callable[..., Any]] = {EAGER: model, OURS: fast, BY_HAND: ort(model, example)}
    found = {}
    for loop in (ALONE, BETWEEN):
        timings = timed(calls, example, between=loop == BETWEEN)
        found[loop] = {
            "ms": {key: timing.p50 for key, timing in timings.items()},
            "speedup": {key: ratio(timings[key], timings[EAGER]) for key in (OURS, BY_HAND)},
        }
    return {"winner": fast.report.winner, "loops": found}


def timed(calls: dict[str, Callable[..., Any]], example: tsopt.Example, *, between: bool) -> dict[str, Timing]:
    picture, spent = torch.rand(3, 224, 224), {name: [] for name in calls}

    def loop(call: Callable[..., Any], times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            call(*example.args, **example.kwargs)
            if between:
                picture.sub(0.5).div_(0.2)
        return (time.perf_counter() - start) / times

    with torch.no_grad():
        times = {name: max(3, round(SECONDS / min(loop(call, 3) for _ in range(3)))) for name, call in calls.items()}
        for number in range(ROUNDS):
            for name in calls if number % 2 else reversed(calls):
                loop(calls[name], max(1, times[name] // 4))
                spent[name].append(loop(calls[name], times[name]) * 1e3)
                rest()
    return {name: Timing(tuple(values)) for name, values in spent.items()}


def line(name: str, row: dict[str, Any]) -> str:
    cells = [name, row["winner"]]
    for loop in (ALONE, BETWEEN):
        found = row["loops"][loop]
        cells.append(f"{found['ms'][EAGER]:.3g}")
        for key in (OURS, BY_HAND):
            gain = found["speedup"][key]
            cells.append(f"{gain['ratio']:.2f}x [{gain['low']:.2f}, {gain['high']:.2f}]")
    return f"| {' | '.join(cells)} |"


def page(env: Environment, rows: Rows) -> list[str]:
    columns = [f"{loop}: {what}" for loop in (ALONE, BETWEEN) for what in (f"{EAGER} ms", OURS, BY_HAND)]
    lowest = {
        loop: min(row["loops"][loop]["speedup"][OURS]["ratio"] for row in rows.values()) for loop in (ALONE, BETWEEN)
    }
    return [
        f"| model | tsopt runs | {' | '.join(columns)} |",
        "|" + "---|" * (2 + len(columns)),
        *(line(name, row) for name, row in rows.items()),
        "",
        f"- times as fast as eager in the same loop; the lowest of tsopt: {lowest[ALONE]:.2f}x back to back, "
        f"{lowest[BETWEEN]:.2f}x with torch ops between calls",
        "- torch ops between calls: the normalization of a picture of 224 x 224, whose time counts",
        f"- {BY_HAND}: a session with default options, as many threads as torch",
    ]


if __name__ == "__main__":
    main()
