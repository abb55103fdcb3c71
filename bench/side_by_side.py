"""Eager, tsopt, and what an engineer would write by hand with TorchScript and ONNX Runtime, timed in one run.

Usage: python -m bench.side_by_side [MODEL ...]; writes bench/results/side_by_side.{json,md}. Each model has a process
of its own, as it has with a user: what another has left in memory and in the garbage collector counts for nobody.
"""

from __future__ import annotations

import contextlib
import io
import logging
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import nn

import tsopt
from bench.models import MODELS
from bench.process import Rows, measure_each
from tsopt.compiler.capture.capture import capture
from tsopt.compiler.protect import protected
from tsopt.runtime.checking.inputs import input_sets
from tsopt.runtime.racing.environment import Environment
from tsopt.runtime.racing.speedup import Timing, speedup
from tsopt.runtime.racing.tournament import measure
from tsopt.transforms import transform

RESULTS = Path(__file__).parent / "results"
SECONDS = 20.0
PEERS = ("TorchScript by hand", "ONNX Runtime by hand")


def main() -> None:
    measure_each("bench.side_by_side:one", MODELS, RESULTS / "side_by_side.json", line, page)


def page(env: Environment, rows: Rows) -> list[str]:
    return [HEADER, RULE, *(line(name, row) for name, row in rows.items())]


def one(name: str) -> dict[str, Any]:
    model, example = MODELS[name].load()
    start = time.perf_counter()
    program = capture(model, example)
    capture_seconds = time.perf_counter() - start
    start = time.perf_counter()
    transform(program)
    pass_seconds = time.perf_counter() - start
    start = time.perf_counter()
    fast = tsopt.optimize(model, example, cache=False)
    optimize_seconds = time.perf_counter() - start
    calls: dict[str, Callable[..., Any]] = {"eager": model, "tsopt": fast}
    failures: dict[str, str] = {}
    for peer, make in zip(PEERS, (torchscript, ort), strict=True):
        try:
            calls[peer] = make(model, example)
        except Exception as error:
            failures[peer] = f"{type(error).__name__}: {str(error)[:120]}"
    inputs = [item.clone() for item in input_sets(example, 7)[:3]]
    with protected(model), torch.inference_mode():
        timings = measure(calls, inputs, seconds=SECONDS)
    return {
        "winner": fast.report.winner,
        "verified": str(fast.report.winning.accuracy or "eager itself"),
        "race": {row.name: [row.status, None if row.timing is None else row.timing.p50] for row in fast.report.rows},
        "nodes": list(fast.report.nodes),
        "capture_seconds": capture_seconds,
        "pass_seconds": pass_seconds,
        "optimize_seconds": optimize_seconds,
        "timings_ms": {key: summary(timing) for key, timing in timings.items()},
        "speedup": ratio(timings["tsopt"], timings["eager"]),
        "against": {peer: ratio(timings["tsopt"], timings[peer]) for peer in PEERS if peer in timings},
        "failures": failures,
    }


def torchscript(model: nn.Module, example: tsopt.Example) -> Callable[..., Any]:
    """The recipe of the documentation: trace, freeze, optimize_for_inference."""
    keys = list(example.kwargs)

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *leaves: torch.Tensor) -> Any:
            split = len(leaves) - len(keys)
            result = self.model(*leaves[:split], **dict(zip(keys, leaves[split:], strict=True)))
            return result if isinstance(result, torch.Tensor) else result[0]

    leaves = (*example.args, *example.kwargs.values())
    with warnings.catch_warnings(), torch.no_grad(), protected(model):
        warnings.simplefilter("ignore")
        script = torch.jit.trace(Flat().eval(), leaves, check_trace=False)
        script = torch.jit.optimize_for_inference(torch.jit.freeze(script.eval()))
    return lambda *args, **kwargs: script(*args, *kwargs.values())


def ort(model: nn.Module, example: tsopt.Example) -> Callable[..., Any]:
    """torch.onnx.export with its defaults, and a bare session on numpy arrays."""
    logging.getLogger("torch.onnx").setLevel(logging.CRITICAL)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), protected(model):
        warnings.simplefilter("ignore")
        exported = torch.onnx.export(model, example.args, kwargs=example.kwargs, dynamo=True, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4
    proto = exported.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_inputs()]

    def run(*args: Any, **kwargs: Any) -> Any:
        return session.run(None, {name: v.numpy() for name, v in zip(names, (*args, *kwargs.values()), strict=True)})

    return run


def summary(timing: Timing) -> dict[str, float]:
    return {"p50": timing.p50, "p90": timing.p90, "std_percent": timing.std_percent}


def ratio(candidate: Timing, baseline: Timing) -> dict[str, float]:
    found = speedup(candidate, baseline)
    return {"ratio": found.ratio, "low": found.low, "high": found.high}


HEADER = (
    "| model | tsopt runs | eager ms | tsopt ms | TorchScript by hand ms | ONNX Runtime by hand ms | speed-up | "
    "against the best by hand | op nodes | passes / capture | verified |"
)
RULE = "|" + "---|" * 11


def line(name: str, row: dict[str, Any]) -> str:
    times = {key: f"{value['p50']:.3g}" for key, value in row["timings_ms"].items()}
    s = row["speedup"]
    best = min(row["against"].values(), key=lambda found: found["ratio"], default=None)
    against = "-" if best is None else f"{best['ratio']:.2f}x [{best['low']:.2f}, {best['high']:.2f}]"
    share = row["pass_seconds"] / row["capture_seconds"]
    cells = (
        name,
        row["winner"],
        times["eager"],
        times["tsopt"],
        *(times.get(peer, "-") for peer in PEERS),
        f"{s['ratio']:.2f}x [{s['low']:.2f}, {s['high']:.2f}]",
        against,
        f"{row['nodes'][0]} -> {row['nodes'][1]}",
        f"{share:.2f}",
        row["verified"].split(" on ")[0],
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
