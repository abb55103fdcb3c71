"""What int8 is worth: the fastest candidate in fp32 against the fastest in int8, in one race for each model.

Usage: python -m bench.int8 [MODEL ...]; writes bench/results/int8.{json,md}. A process for each model.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch

import tsopt
from bench.models import MODELS
from bench.precision import fastest
from bench.process import Rows, measure_each
from bench.side_by_side import summary as summary_of
from tsopt.compiler.calls.structure import flatten, unflatten
from tsopt.runtime.layer_table import summary
from tsopt.runtime.racing.environment import Environment
from tsopt.runtime.racing.row import EAGER
from tsopt.runtime.racing.tournament import measure

RESULTS = Path(__file__).parent / "results"
SECONDS = 15.0
CALIBRATION, UNSEEN = 32, 16  # inputs: to calibrate and judge by, and others that nothing has seen
ENGINES = {  # in tables: the variant of the program, and the backend
    "OpenVINO, static": ("int8-static", "openvino"),
    "ONNX Runtime, static": ("int8-static", "onnxruntime"),
    "OpenVINO, weights": ("int8-weights", "openvino"),
    "ONNX Runtime, weights": ("int8-weights", "onnxruntime"),
    "oneDNN": ("int8", "onednn"),
}
VISION = ("resnet18", "resnet50", "mobilenet_v2", "efficientnet_b0", "vit_b16")
TEXT = ("bert_base", "distilbert", "gpt2", "llama_160m", "llama_160m_token")
NAMES = ("mlp", *VISION, *TEXT, "whisper_tiny")


def main() -> None:
    measure_each("bench.int8:one", NAMES, RESULTS / "int8.json", line, page)


def one(name: str) -> dict[str, Any]:
    model, example = MODELS[name].load()
    data, unseen = drawn_like(example)
    said: list[tuple[float, str]] = []
    fast = tsopt.optimize(
        *(model, example),
        precision="int8",
        calibration=data,
        seconds=SECONDS,
        cache=False,
        time_all=True,
        progress=lambda text: said.append((time.perf_counter(), text)),
    )
    report = fast.report
    timed = [item for item in report.rows if item.name != EAGER and item.record()["p50_ms"] is not None]
    return {
        "winner": report.winner,
        "candidates": {item.name: item.record() | {"notes": list(item.notes)} for item in report.rows},
        "layers": summary(report.quantization),
        "quantize_seconds": dict(report.stages).get("quantize", 0.0),
        "apart": {} if any("precision" not in item.name for item in timed) else apart(fast, model, example),
        "away": away(fast, model, unseen),
    }


def apart(fast: tsopt.Optimized, model: torch.nn.Module, example: tsopt.Example) -> dict[str, Any]:
    """The winner beside that of a race in fp32, where memory had no room for both kinds of candidates at once."""
    full = tsopt.optimize(model, example, seconds=SECONDS, cache=False)
    timings = measure({"full": full, "low": fast}, [example], seconds=SECONDS)
    return {"candidate": full.report.winner, **{name: summary_of(timing)["p50"] for name, timing in timings.items()}}


def drawn_like(example: tsopt.Example) -> tuple[list[tsopt.Example], list[tsopt.Example]]:
    """Inputs to calibrate and judge by, and others that nothing has seen."""
    return [like(example, seed) for seed in range(CALIBRATION)], [like(example, 1000 + seed) for seed in range(UNSEEN)]


def like(example: tsopt.Example, seed: int) -> tsopt.Example:
    """Another input of the same kind: normal values, other tokens; masks as they are."""
    draw = torch.Generator().manual_seed(seed)
    leaves, structure = flatten((example.args, example.kwargs))

    def drawn(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.is_floating_point():
            return torch.randn(leaf.shape, generator=draw)
        return torch.randint(0, 1000, leaf.shape, generator=draw) if int(leaf.max()) > 1 else leaf

    return tsopt.Example(*unflatten(structure, [drawn(leaf) for leaf in leaves]))


def away(fast: Any, model: torch.nn.Module, calls: list[tsopt.Example]) -> dict[str, float]:
    """The relative error of the winner's outputs over all calls, and the lowest cosine with eager's, of the worst."""
    errors: list[list[float]] = []
    cosines: list[float] = []
    with torch.no_grad():
        for call in calls:
            mine, theirs = (flatten(f(*call.args, **call.kwargs))[0] for f in (fast, model))
            pairs = [(a.double(), b.double()) for a, b in zip(mine, theirs, strict=True) if b.is_floating_point()]
            squares = [(float((a - b).square().sum()), float(b.square().sum())) for a, b in pairs]
            errors.append([value for both in squares for value in both])
            cosines += [float((a * b).sum() / (a.norm() * b.norm())) for a, b in pairs]
    sums = [sum(column) for column in zip(*errors, strict=True)]
    relative = max(math.sqrt(noise / size) for noise, size in zip(sums[::2], sums[1::2], strict=True))
    return {"relative_error": relative, "lowest_cosine": min(cosines)}


def page(env: Environment, rows: Rows) -> list[str]:
    header = (
        *("model", "eager ms", "best in fp32", "ms", "best in int8", "ms", "int8 over fp32"),
        *("error", "lowest cosine", "layers", "quantize s", "chosen"),
    )
    gains = {name: _gain(row) for name, row in rows.items() if "int8" in row["winner"]}
    mean = math.exp(sum(map(math.log, gains.values())) / len(gains)) if gains else math.nan
    largest = max(row["away"]["relative_error"] for row in rows.values())
    return [
        f"| {' | '.join(header)} |",
        "|" + "---|" * len(header),
        *(line(name, row) for name, row in rows.items()),
        "",
        f"- int8 over the fastest in fp32, where int8 is chosen: geometric mean {mean:.2f}x over {len(gains)} models, "
        f"lowest {min(gains.values(), default=math.nan):.2f}x",
        f"- error: of the winner on {UNSEEN} inputs that neither calibration nor choice have seen, over all of them",
        "  together, in L2 norms. With an error e, the cosine of them together is at least sqrt(1 - e^2):"
        f" {math.sqrt(1 - largest**2):.5f} for the largest e",
        "- lowest cosine: of a single input. vit_b16 has two outputs: one input for which both are small decides it",
        f"- {CALIBRATION} inputs of normal values or random tokens. Weights are random too: errors say how rounding",
        "  adds up, not what a trained model loses; see trained.md",
        "- quantize s: calibration, measuring of layers, and choice, both for fixed scales and for those of each call",
    ]


def line(name: str, row: dict[str, Any]) -> str:
    full, low = _best(row)
    is_low = "precision" in low["candidate"]
    accuracy = row["away"]
    cells = (
        name,
        f"{row['candidates'][EAGER]['p50_ms']:.3g}",
        full["candidate"],
        f"{full['p50_ms']:.3g}",
        low["candidate"].replace(", precision", ",") if is_low else "-",
        f"{low['p50_ms']:.3g}" if is_low else "-",
        f"{_gain(row):.2f}x" if is_low else "-",
        f"{accuracy['relative_error']:.2%}",
        f"{accuracy['lowest_cosine']:.5f}",
        row["layers"].partition(";")[0],
        f"{row['quantize_seconds']:.1f}",
        "int8" if "int8" in row["winner"] else "fp32",
    )
    return f"| {' | '.join(cells)} |"


def _best(row: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fastest in fp32 and in int8."""
    full, low, both = fastest(row, low=False), fastest(row, low=True), row["apart"]
    if both:
        return {"candidate": both["candidate"], "p50_ms": both["full"]}, low | {"p50_ms": both["low"]}
    return full, low


def _gain(row: dict[str, Any]) -> float:
    full, low = _best(row)
    return float(full["p50_ms"] / low["p50_ms"])


if __name__ == "__main__":
    main()
