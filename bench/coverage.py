"""Which architectures are captured, and what runs them: tiny models of transformers, called as users call them.

Usage: python -m bench.coverage [ARCHITECTURE ...]; writes bench/results/coverage.{json,md}. A process for each model.
Every model is optimized, judged once more on inputs that `optimize` has not seen, and compared with what it was before.
"""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import tsopt
from bench.architectures import ARCHITECTURES
from bench.process import Rows, measure_each
from bench.untouched import changed, state_of
from tsopt.runtime.calling.optimized import Optimized
from tsopt.runtime.checking.accuracy import Oracle
from tsopt.runtime.racing.environment import Environment

RESULTS = Path(__file__).parent / "results"
SECONDS = 0.2
BACKENDS = ("eager", "onnxruntime")
HEADER = (
    "architecture",
    "kind",
    "captured",
    "op nodes",
    "by torch",
    "by ONNX Runtime",
    "other inputs",
    "left as it was",
)


def main() -> None:
    measure_each("bench.coverage:one", ARCHITECTURES, RESULTS / "coverage.json", line, page, at_once=2)


def one(name: str) -> dict[str, Any]:
    """What became of one architecture."""
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    architecture = ARCHITECTURES[name]
    model, example = architecture.load()
    before = state_of(model, example)
    row: dict[str, Any] = {"kind": architecture.kind, "captured": "refused", "reason": "", "nodes": None, "by": {}}
    row |= {"other": "", "why": ""}
    fast = None
    try:
        fast = tsopt.optimize(
            *(model, example), backends=BACKENDS, seconds=SECONDS, isolate=False, cache=False, time_all=True
        )
    except tsopt.TsoptError as error:
        row["reason"] = f"{type(error).__name__}: {error.what}"
    else:
        whole = isinstance(fast, Optimized)
        row["captured"] = "one graph" if whole else "in parts"
        row["reason"] = fast.report.frontend
        row["nodes"] = list(fast.report.nodes)
        row["by"] = {item.name: "ok" if item.status == "ok" else item.reason for item in fast.report.rows[1:]}
    touched = changed(before, state_of(model, example))
    row["kept"] = f"no: {', '.join(touched)}" if touched else "yes"
    if fast is not None:
        row["other"], row["why"] = on_other_inputs(model, fast, architecture.call)
    return row


def on_other_inputs(model: nn.Module, fast: Any, call: Any) -> tuple[str, str]:
    """The verdict on a call with other values, made as the first one was."""
    torch.manual_seed(1)
    example = tsopt.example(**call())
    program = tsopt.capture(model, example) if isinstance(fast, Optimized) else None
    verdict = Oracle(model, example, program, seed=7).judge(fast)
    return ("right", "") if verdict.ok else ("wrong", verdict.reason)


def line(name: str, row: dict[str, Any]) -> str:
    nodes = "" if row["nodes"] is None else f"{row['nodes'][0]} -> {row['nodes'][1]}"
    cells = (name, row["kind"], row["captured"], nodes, by(row, "torch"), by(row, "ONNX Runtime"), row["other"])
    return f"| {' | '.join((*cells, row['kept']))} |"


def by(row: dict[str, Any], engine: str) -> str:
    """`ok`, or a dash."""
    names = {"torch": ("eager", "torch", "partitioned", "in parts"), "ONNX Runtime": ("ONNX Runtime", "onnxruntime")}[
        engine
    ]
    found = [value for name, value in row["by"].items() if name.startswith(names)]
    return "ok" if "ok" in found else "-"


def page(env: Environment, rows: Rows) -> list[str]:
    count = len(rows)
    captured = Counter(row["captured"] for row in rows.values())
    torch_ok, ort_ok = (sum(by(row, engine) == "ok" for row in rows.values()) for engine in ("torch", "ONNX Runtime"))
    some = sum("ok" in row["by"].values() for row in rows.values())
    wrong = [name for name, row in rows.items() if row["other"] == "wrong"]
    touched = [name for name, row in rows.items() if row["kept"] != "yes"]
    return [
        f"- captured as one graph: {captured['one graph']} of {count}; in parts: {captured['in parts']}; "
        f"refused: {captured['refused']}",
        f"- verified on some backend: {some} of {count} ({some / count:.1%})",
        f"- by torch after the passes, or in parts: {torch_ok} ({torch_ok / count:.0%}); "
        f"by ONNX Runtime: {ort_ok} ({ort_ok / count:.0%})",
        f"- wrong on inputs that were not seen before: {len(wrong)}{': ' * bool(wrong)}{', '.join(wrong)}",
        f"- not left as they were: {len(touched)}{': ' * bool(touched)}{', '.join(touched)}",
        "",
        f"| {' | '.join(HEADER)} |",
        "|" + "---|" * len(HEADER),
        *(line(name, row) for name, row in rows.items()),
        "",
        "What is not a single graph, what a backend refused, and why:",
        "",
        *(f"- {name}: {reason}" for name, row in rows.items() for reason in reasons(row)),
    ]


def reasons(row: dict[str, Any]) -> list[str]:
    found = [row["reason"]] if row["reason"] else []
    found += [f"{name}: {reason}" for name, reason in row["by"].items() if reason not in ("ok", None, "")]
    return [*found, *([f"other inputs: {row['why']}"] if row["why"] else [])]


if __name__ == "__main__":
    main()
