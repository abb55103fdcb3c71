"""Models on a GPU: eager, tsopt, and torch.compile as its documentation uses it, timed in one run.

Usage: python -m bench.gpu [MODEL ...]; writes bench/results/gpu.{json,md}. Needs a GPU. Each model has a process of its
own. In float32, without TensorFloat-32 for products of matrices, as torch is set; `tsopt, auto` may use it, and half
precision.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import tsopt
from bench.models import MODELS
from bench.process import Rows, measure_each
from bench.side_by_side import ratio, summary
from tsopt.compiler.protect import protected
from tsopt.runtime.checking.inputs import input_sets
from tsopt.runtime.racing.environment import Environment
from tsopt.runtime.racing.tournament import measure

RESULTS = Path(__file__).parent / "results"
SECONDS = 3.0
PEERS = {"torch.compile": {}, "reduce-overhead": {"mode": "reduce-overhead"}}
NAMES = (
    *("resnet18", "resnet50", "bert_base", "gpt2", "vit_b16", "mlp", "lstm", "mobilenet_v2", "llama_160m"),
    *("convnext_tiny", "swin_tiny", "segformer_b0", "whisper_tiny", "ensemble_16"),
)
OWN = {"tsopt": {}, "tsopt, auto": {"precision": "auto"}}


def main() -> None:
    measure_each("bench.gpu:one", NAMES, RESULTS / "gpu.json", line, page)


def on_gpu(name: str) -> tuple[nn.Module, tsopt.Example]:
    """A model and its example, moved."""
    model, example = MODELS[name].load()
    args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.cuda, (example.args, example.kwargs))
    return model.cuda(), tsopt.example(*args, **kwargs)


def one(name: str) -> dict[str, Any]:
    model, example = on_gpu(name)
    calls: dict[str, Callable[..., Any]] = {"eager": model}
    made, spent, failures = {}, {}, {}
    for own, options in OWN.items():
        start = time.perf_counter()
        calls[own] = made[own] = tsopt.optimize(model, example, cache=False, **options)
        spent[own] = time.perf_counter() - start
    for peer, options in PEERS.items():
        torch._dynamo.reset()
        start = time.perf_counter()
        try:
            calls[peer] = by_hand(model, example, options)
        except Exception as error:
            failures[peer] = f"{type(error).__name__}: {str(error)[:120]}"
        spent[peer] = time.perf_counter() - start
    inputs = [item.clone() for item in input_sets(example, 7)[:3]]
    with protected(model), torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        timings = measure(calls, inputs, seconds=SECONDS, wait=torch.cuda.synchronize)
    return {
        "gpu": torch.cuda.get_device_name(),
        "winner": {own: fast.report.winner for own, fast in made.items()},
        "verified": {own: str(fast.report.winning.accuracy or "eager itself") for own, fast in made.items()},
        "race": {
            own: {
                row.name: [row.status, row.reason, None if row.timing is None else row.timing.p50]
                for row in fast.report.rows
            }
            for own, fast in made.items()
        },
        "seconds": spent,
        "timings_ms": {key: summary(timing) for key, timing in timings.items()},
        "speedup": {own: ratio(timings[own], timings["eager"]) for own in OWN},
        "against": {peer: ratio(timings["tsopt"], timings[peer]) for peer in PEERS if peer in timings},
        "failures": failures,
    }


def by_hand(model: nn.Module, example: tsopt.Example, options: dict[str, Any]) -> Callable[..., Any]:
    """The compiled model, called until it is warm."""
    compiled = torch.compile(model, **options)
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        for _ in range(3):
            compiled(*example.args, **example.kwargs)
    torch.cuda.synchronize()
    return compiled


def page(env: Environment, rows: Rows) -> list[str]:
    header = (
        *("model", "GPU", "eager ms", *(f"{peer} ms" for peer in PEERS), "tsopt runs", "ms", "speed-up"),
        *("against the best by hand", "with `auto`", "ms", "speed-up", "s", "verified"),
    )
    return [
        f"| {' | '.join(header)} |",
        "|" + "---|" * len(header),
        *(line(name, row) for name, row in rows.items()),
        "",
        "- s: that `optimize` took, without `auto`, cold",
        "- torch.compile was warm; its kernels may have come from the cache that it keeps on disk",
    ]


def line(name: str, row: dict[str, Any]) -> str:
    times = {key: f"{value['p50']:.3g}" for key, value in row["timings_ms"].items()}
    best = min(row["against"].values(), key=lambda found: found["ratio"], default=None)
    cells: list[str] = [name, row["gpu"].split()[1], times["eager"], *(times.get(peer, "-") for peer in PEERS)]
    for own in OWN:
        gain = row["speedup"][own]
        cells += [row["winner"][own], times[own], f"{gain['ratio']:.2f}x [{gain['low']:.2f}, {gain['high']:.2f}]"]
        if own == "tsopt":
            cells.append("-" if best is None else f"{best['ratio']:.2f}x [{best['low']:.2f}, {best['high']:.2f}]")
    cells += [f"{row['seconds']['tsopt']:.1f}", row["verified"]["tsopt"].split(" on ")[0]]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
