"""What do changing sizes cost: three examples of different sizes, and a hybrid that sees thousands of sizes?

Usage: python -m bench.sizes [NAME ...]; writes bench/results/sizes.{json,md}. Each row has a process of its own.

- three_examples: `optimize` of a small BERT with three examples, then 50 calls of random sizes.
- ten_thousand: `hybridize` of a small network that is called with 10,000 sizes, each once, in random order; blocks of
  calls take turns with the same calls of the model. In ten_thousand_in_eager_mode, the model takes the hybrid's turns.
"""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

import tsopt
from bench.process import Rows, measure_each
from tsopt.runtime.racing.environment import Environment

RESULTS = Path(__file__).parent / "results"
CALLS, SIZES, BLOCK = 50, 10_000, 100
IN_EAGER = "ten_thousand_in_eager_mode"
NAMES = ("three_examples", "ten_thousand", "ten_thousand_in_background", IN_EAGER)


def main() -> None:
    measure_each("bench.sizes:one", NAMES, RESULTS / "sizes.json", line, page)


def one(name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    if name == "three_examples":
        return three_examples()
    return ten_thousand(background="background" in name, in_eager=name == IN_EAGER)


def three_examples() -> dict[str, Any]:
    config = transformers.BertConfig(
        vocab_size=8000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    )
    model = transformers.BertModel(config).eval()

    def call(batch: int, length: int) -> dict[str, torch.Tensor]:
        mask = torch.ones(batch, length, dtype=torch.long)
        mask[1:, length // 2 :] = 0
        return {"input_ids": torch.randint(0, 8000, (batch, length)), "attention_mask": mask}

    start = time.perf_counter()
    fast = tsopt.optimize(model, [call(2, 16), call(4, 32), call(8, 24)], cache=False)
    seconds = time.perf_counter() - start
    draw, worst = random.Random(0), 0.0
    with torch.no_grad():
        for _ in range(CALLS):
            given = call(draw.randint(1, 16), draw.randint(4, 64))
            wanted, found = model(**given).last_hidden_state, fast(**given).last_hidden_state
            worst = max(worst, float((wanted - found).abs().max()))
    return {
        "seconds": seconds,
        "sizes": fast.report.sizes,
        "winner": fast.report.winner,
        "new_signatures": len(fast.report.signatures),
        "difference": worst,
    }


def ten_thousand(*, background: bool, in_eager: bool) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 16)).eval()
    hybrid = tsopt.hybridize(model, background=background)
    served = model if in_eager else hybrid
    sizes = list(range(1, SIZES + 1))
    random.Random(0).shuffle(sizes)
    spent: dict[str, list[float]] = {"eager": [], "hybrid": []}
    memory, worst = [_megabytes()], 0.0
    with torch.no_grad():
        for block in range(0, SIZES, BLOCK):
            inputs = [torch.randn(size, 64) for size in sizes[block : block + BLOCK]]
            turns: list[tuple[str, Callable[..., Any]]] = [("eager", model), ("hybrid", served)]
            results = {}
            for name, run in turns if block // BLOCK % 2 else reversed(turns):
                start = time.perf_counter()
                results[name] = [run(x) for x in inputs]
                spent[name].append(time.perf_counter() - start)
            pairs = zip(results["eager"], results["hybrid"], strict=True)
            worst = max(worst, *(float((a - b).abs().max()) for a, b in pairs))
            memory.append(_megabytes())
    report = tsopt.report(hybrid)
    return {
        "seconds_of_blocks": spent,
        "megabytes": memory,
        "difference": worst,
        "captured": len(report.reports),
        "captures": [item for found in report.reports for item in map(list, found.signatures)],
        "compiled_calls": report.calls - report.in_eager.total(),
        "calls": report.calls,
        "seconds_of_compiling": report.compile_seconds,
    }


def _megabytes() -> float:
    """The largest that this process has been."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def line(name: str, row: dict[str, Any]) -> str:
    if name == "three_examples":
        calls = f"{row['new_signatures']} of {CALLS} calls needed a new capture"
        cells = (f"{row['seconds']:.1f}", row["sizes"], calls, f"{row['difference']:.1e}")
        return f"| {' | '.join(cells)} |"
    # Blocks are compared in pairs, because the form that runs first on new inputs takes 1.15 times as long.
    eager, hybrid = (np.array(row["seconds_of_blocks"][key]).reshape(-1, 2).sum(1) for key in ("eager", "hybrid"))
    later = slice(len(eager) // 2, None)
    ratios = eager[later] / hybrid[later]
    low, middle, high = np.percentile(ratios, (2.5, 50, 97.5))
    cells = (
        name,
        f"{row['compiled_calls']} of {row['calls']}",
        str(row["captured"] + len(row["captures"])),
        f"{row['seconds_of_compiling']:.1f}",
        f"{eager.sum():.1f}",
        f"{hybrid.sum():.1f}",
        f"{middle:.2f}x [{low:.2f}, {high:.2f}]",
        f"{row['megabytes'][len(row['megabytes']) // 2]:.0f}",
        f"{row['megabytes'][-1]:.0f}",
        f"{row['difference']:.1e}",
    )
    return f"| {' | '.join(cells)} |"


def page(env: Environment, rows: Rows) -> list[str]:
    three = {name: row for name, row in rows.items() if name == "three_examples"}
    many = {name: row for name, row in rows.items() if name != "three_examples"}
    columns = ("compiled calls", "captures", "s compiling", "eager, s", "hybrid, s", "second half, eager over hybrid")
    header = ("hybrid", *columns, "MB half-way", "MB at the end", "largest difference")
    return [
        f"`optimize` of a small BERT (4 layers, 256 wide) with three examples, and {CALLS} calls of random sizes:",
        "",
        "| optimize, s | sizes | calls of other sizes | largest difference |",
        "|---|---|---|---|",
        *(line(name, row) for name, row in three.items()),
        "",
        f"A network of three linear layers that is called with {SIZES} sizes, each once, in random order:",
        "",
        f"| {' | '.join(header)} |",
        "|" + "---|" * len(header),
        *(line(name, row) for name, row in many.items()),
        "",
        f"- s: of all calls, compiling included; blocks of {BLOCK} calls take turns with the same calls of the model",
        "- second half: median over pairs of blocks, one for each order; 2.5 and 97.5 percentiles",
        f"- {IN_EAGER}: what the network takes by itself, in both columns",
        "- MB: the largest that the process has been, half-way and at the end",
    ]


if __name__ == "__main__":
    main()
