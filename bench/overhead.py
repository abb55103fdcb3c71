"""What a call through tsopt costs over a bare `session.run` on the MLP: for one batch size, and for any.

Usage: python -m bench.overhead; writes bench/results/overhead.json.
"""

from __future__ import annotations

import json
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tsopt
from bench.models import MODELS
from tsopt.compiler.calls.example import Example
from tsopt.runtime.onnx.export import to_onnx
from tsopt.runtime.onnx.ort import open_session
from tsopt.runtime.racing.environment import environment
from tsopt.runtime.racing.tournament import measure

SECONDS = 10


def main() -> None:
    model, example = MODELS["mlp"].load()
    name = tsopt.capture(model, example).signature.inputs[0].name
    given: dict[str, Any] = {"one size": None, "any batch": {name: {0: "batch[1..32]"}}}
    options: dict[str, Any] = {"backends": ("onnxruntime",), "seconds": 2, "cache": False}
    fast = {kind: tsopt.optimize(model, example, dynamic=dynamic, **options) for kind, dynamic in given.items()}
    calls: dict[str, Callable[..., Any]] = {}
    for kind, made in fast.items():
        calls |= {f"bare session.run, {kind}": bare(made, example), f"tsopt, {kind}": made}
    timings = measure(calls, [Example((example.args[0].clone(),)) for _ in range(3)], seconds=SECONDS)
    over = {
        kind: np.array(timings[f"tsopt, {kind}"].samples) - np.array(timings[f"bare session.run, {kind}"].samples)
        for kind in fast
    }
    out = {
        "runs": {kind: made.report.winner for kind, made in fast.items()},
        "microseconds": {kind: timing.p50 * 1e3 for kind, timing in timings.items()},
        "guard_microseconds": {kind: guard(made, example) for kind, made in fast.items()},
        "overhead_microseconds": {kind: float(np.median(paired) * 1e3) for kind, paired in over.items()},
        "environment": environment().to_json(),
    }
    (Path(__file__).parent / "results" / "overhead.json").write_text(json.dumps(out, indent=1) + "\n")
    print(json.dumps({name: out[f"{name}_microseconds"] for name in ("guard", "overhead")}, indent=1))


def guard(made: tsopt.Optimized, example: Example) -> float:
    """The check alone that a call is of the captured form, best of several thousand calls at once."""
    accepts = tsopt.compile(made.program, "eager").accepts
    timer = timeit.Timer(lambda: accepts(example.args, example.kwargs))
    return min(timer.repeat(repeat=9, number=10_000)) / 10_000 * 1e6


def bare(made: tsopt.Optimized, example: Example) -> Callable[..., Any]:
    """The same model in a session of its own, called with an array that is there already."""
    proto, weights = to_onnx(made.program).detached()
    session = open_session(proto, {"threads": torch.get_num_threads()}, weights).session
    array = {session.get_inputs()[0].name: example.args[0].numpy()}
    return lambda x: session.run(None, array)


if __name__ == "__main__":
    main()
