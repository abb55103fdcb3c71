"""What each family of passes is worth: on the captured graph run by torch itself, and before ONNX Runtime.

Usage: python -m bench.ablation [MODEL ...]; writes bench/results/ablation.{json,md}. Each model has a process of its
own, which keeps the memory that it frees, and in it all variants take turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tsopt
from bench.models import MODELS
from bench.process import Rows, keep_memory, measure_each
from bench.side_by_side import ratio
from tsopt.compiler.analysis.liveness import peak_bytes
from tsopt.compiler.graph.program import Program
from tsopt.compiler.protect import protected
from tsopt.compiler.rewriting.pass_base import Pass, Repeat
from tsopt.passes import STANDARD
from tsopt.runtime.checking.inputs import input_sets
from tsopt.runtime.racing.environment import Environment
from tsopt.runtime.racing.tournament import measure

RESULTS = Path(__file__).parent / "results"
SECONDS = 25.0  # for what torch runs, and for ONNX Runtime
NAMES = (
    *("resnet50", "mobilenet_v2", "efficientnet_b0", "bert_base", "gpt2", "llama_160m", "vit_b16", "swin_tiny"),
    *("convnext_tiny", "segformer_b0", "whisper_tiny", "ensemble_16", "heads_8", "pyramid_4"),
)
CLEAN = ("dce", "canonicalize", "fold", "cse", "fold-again", "cse-again", "dce-again")
# On top of the clean-up, which the others are written for.
FAMILIES: dict[str, tuple[str, ...]] = {
    "clean-up": (),
    "recompose": ("recompose",),
    "algebra": ("algebra", "data-movement"),
    "fuse": ("fuse",),
    "merge": ("merge",),
    "order": ("order",),
}


def main() -> None:
    measure_each("bench.ablation:one", NAMES, RESULTS / "ablation.json", line, page)


def page(env: Environment, rows: Rows) -> list[str]:
    return [HEADER, RULE, *(line(name, row) for name, row in rows.items()), "", *summary(rows)]


def only(passes: tuple[Pass | Repeat, ...], names: tuple[str, ...]) -> tuple[Pass | Repeat, ...]:
    """The pipeline with the passes of these names alone, in its own order."""
    kept: list[Pass | Repeat] = []
    for item in passes:
        if isinstance(item, Repeat):
            inner = only(item.passes, names)
            kept += [Repeat(inner, item.limit)] if inner else []
        elif item.name in names:
            kept.append(item)
    return tuple(kept)


def one(name: str) -> dict[str, Any]:
    kept = keep_memory()
    model, example = MODELS[name].load()
    captured = tsopt.capture(model, example)
    variants = {family: tsopt.transform(captured, only(STANDARD, CLEAN + more)) for family, more in FAMILIES.items()}
    variants["all"] = tsopt.transform(captured)
    calls: dict[str, Callable[..., Any]] = {"none": tsopt.compile(captured, "eager")}
    same_as = _torch_variants(captured, variants, calls)
    failures: dict[str, str] = {}
    for row, program, backend, options in (
        ("oneDNN none", captured, "onednn", {}),
        ("oneDNN all", variants["all"], "onednn", {}),
        ("ORT none", captured, "onnxruntime", {"fused": False}),
        ("ORT all", variants["all"], "onnxruntime", {}),
    ):
        try:
            calls[row] = tsopt.compile(program, backend, **options)
        except tsopt.TsoptError as error:
            failures[row] = error.what
    inputs = [item.clone() for item in input_sets(example, 7)[:3]]
    groups = [{row: call for row, call in calls.items() if row.startswith("ORT") == is_ort} for is_ort in (False, True)]
    with protected(model), torch.inference_mode():  # what is compared is timed in turns, and nothing else between
        timings = {row: timing for group in groups for row, timing in measure(group, inputs, seconds=SECONDS).items()}
    against = {row: "ORT none" if row.startswith("ORT") else "none" for row in timings}
    gains = {row: ratio(timings[row], timings[base]) for row, base in against.items() if base in timings}
    return {
        "nodes": {"none": captured.node_count} | {row: program.node_count for row, program in variants.items()},
        "peak_bytes": {"none": peak_bytes(captured)} | {row: peak_bytes(p) for row, p in variants.items()},
        "not_from_input": _constant_nodes(variants["all"]),
        "p50_ms": {row: timing.p50 for row, timing in timings.items()},
        "gain": gains | {row: gains[other] for row, other in same_as.items()},
        "same_program": same_as,
        "failures": failures,
        "memory_kept": kept,
    }


def _torch_variants(
    captured: Program, variants: dict[str, Program], calls: dict[str, Callable[..., Any]]
) -> dict[str, str]:
    """Adds the variants that differ; equal programs are timed once. Returns which variant is which other."""
    seen = {captured.fingerprint(): "none"}
    same: dict[str, str] = {}
    for row, program in variants.items():
        earlier = seen.setdefault(program.fingerprint(), row)
        if earlier == row:
            calls[row] = tsopt.compile(program, "eager")
        else:
            same[row] = earlier
    return same


def _constant_nodes(program: Program) -> int:
    """Calls whose value does not depend on the input."""
    depends: set[Any] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder" or any(source in depends for source in node.all_input_nodes):
            depends.add(node)
    return sum(1 for node in program.calls() if node not in depends)


HEADER = (
    f"| model | op nodes | of these constant | peak MB | torch: {' | '.join(FAMILIES)} | all | "
    "oneDNN: none | all | ORT: all |"
)
RULE = "|" + "---|" * (len(FAMILIES) + 8)


def line(name: str, row: dict[str, Any]) -> str:
    def gain(variant: str) -> str:
        found = row["gain"].get(variant)
        return "-" if found is None else f"{found['ratio']:.2f}x"

    nodes, peak = row["nodes"], row["peak_bytes"]
    ort = row["gain"].get("ORT all")
    cells = (
        name,
        f"{nodes['none']} -> {nodes['all']} ({100 * (nodes['all'] / nodes['none'] - 1):+.0f} %)",
        str(row["not_from_input"]),
        f"{peak['none'] / 1e6:.1f} -> {peak['all'] / 1e6:.1f} ({100 * (peak['all'] / peak['none'] - 1):+.0f} %)",
        *(gain(family) for family in (*FAMILIES, "all", "oneDNN none", "oneDNN all")),
        "-" if ort is None else f"{ort['ratio']:.2f}x [{ort['low']:.2f}, {ort['high']:.2f}]",
    )
    return f"| {' | '.join(cells)} |"


def summary(rows: Rows) -> list[str]:
    lines = []
    for variant, text in (("all", "torch"), ("oneDNN all", "torch with oneDNN"), ("ORT all", "ONNX Runtime")):
        ratios = [row["gain"][variant]["ratio"] for row in rows.values() if variant in row["gain"]]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            lines.append(f"- {text}: geometric mean {mean:.2f}x over {len(ratios)} models, worst {min(ratios):.2f}x")
    return lines


if __name__ == "__main__":
    main()
