"""int8 as tsopt sets it up, against int8 set up by hand with the toolkits of the field, side by side.

Usage: python -m bench.int8_by_hand [MODEL ...]; writes bench/results/int8_by_hand.{json,md}. A process for each model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tsopt
from bench.int8 import NAMES, UNSEEN, drawn_like
from bench.int8_peers import PEERS
from bench.models import MODELS
from bench.process import Rows, measure_each
from bench.side_by_side import ratio, summary
from tsopt.compiler.calls.structure import flatten
from tsopt.runtime.racing.environment import Environment
from tsopt.runtime.racing.tournament import measure

RESULTS = Path(__file__).parent / "results"
SECONDS = 15.0


def main() -> None:
    measure_each("bench.int8_by_hand:one", NAMES, RESULTS / "int8_by_hand.json", line, page)


def one(name: str) -> dict[str, Any]:
    model, example = MODELS[name].load()
    data, unseen = drawn_like(example)
    fast = tsopt.optimize(model, example, precision="int8", calibration=data, cache=False)
    calls: dict[str, Callable[..., Any]] = {"eager": model, "tsopt": fast}
    failures = {}
    for peer, set_up in PEERS.items():
        try:
            calls[peer] = set_up(model, example, data)
        except Exception as error:  # whatever a toolkit raises
            failures[peer] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"
    with torch.inference_mode():
        timings = measure(calls, [example, *unseen[:2]], seconds=SECONDS)
        errors = {key: _relative_error(call, model, unseen) for key, call in calls.items() if key != "eager"}
    return {
        "winner": fast.report.winner,
        "timings_ms": {key: summary(timing) for key, timing in timings.items()},
        "against": {peer: ratio(timings["tsopt"], timings[peer]) for peer in PEERS if peer in timings},
        "errors": errors,
        "failures": failures,
    }


def _relative_error(called: Callable[..., Any], model: nn.Module, calls: Sequence[tsopt.Example]) -> float:
    """Of the first output over all calls, in L2 norms."""
    noise = size = 0.0
    for call in calls:
        mine, theirs = (flatten(f(*call.args, **call.kwargs))[0][0].double() for f in (called, model))
        noise += float((mine - theirs).square().sum())
        size += float(theirs.square().sum())
    return math.sqrt(noise / size)


def page(env: Environment, rows: Rows) -> list[str]:
    by_peer = [cell for peer in PEERS for cell in (f"{peer} ms", "error")]
    header = ("model", "tsopt runs", "ms", "error", *by_peer, "against the fastest", "against as accurate ones")
    fastest = [_least(row, row["against"]) for row in rows.values()]
    accurate = [_least(row, _as_accurate(row)) for row in rows.values()]
    return [
        f"| {' | '.join(header)} |",
        "|" + "---|" * len(header),
        *(line(name, row) for name, row in rows.items()),
        "",
        f"- tsopt against the fastest of the others: {_summary(fastest)}",
        f"- against the fastest of those whose error is at most a tenth larger: {_summary(accurate)}",
        f"- error: relative error of the first output on {UNSEEN} inputs that were not used; weights are random",
        *(f"- {name}, {peer}: {why}" for name, row in rows.items() for peer, why in row["failures"].items()),
    ]


def _as_accurate(row: dict[str, Any]) -> list[str]:
    return [peer for peer in row["against"] if row["errors"][peer] <= 1.1 * row["errors"]["tsopt"]]


def _least(row: dict[str, Any], peers: Sequence[str]) -> dict[str, float] | None:
    """tsopt against the fastest of these."""
    return min((row["against"][peer] for peer in peers), key=lambda found: found["ratio"], default=None)


def _summary(found: Sequence[dict[str, float] | None]) -> str:
    ratios = [item["ratio"] for item in found if item is not None]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan
    return f"geometric mean {mean:.2f}x over {len(ratios)} models, lowest {min(ratios, default=math.nan):.2f}x"


def line(name: str, row: dict[str, Any]) -> str:
    def cells(key: str) -> tuple[str, str]:
        if key not in row["timings_ms"]:
            return "-", "-"
        return f"{row['timings_ms'][key]['p50']:.3g}", f"{row['errors'][key]:.2%}"

    def against(found: dict[str, float] | None) -> str:
        return "-" if found is None else f"{found['ratio']:.2f}x [{found['low']:.2f}, {found['high']:.2f}]"

    by_peer = [cell for peer in PEERS for cell in cells(peer)]
    ends = (against(_least(row, row["against"])), against(_least(row, _as_accurate(row))))
    return f"| {' | '.join((name, row['winner'], *cells('tsopt'), *by_peer, *ends))} |"


if __name__ == "__main__":
    main()
