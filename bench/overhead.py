"""What a call through tsopt costs over a bare `session.run` on the MLP. Writes bench/results/overhead.json."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

import tsopt
from bench.models import MODELS
from tsopt.compiler.example import Example
from tsopt.runtime.environment import environment
from tsopt.runtime.onnx_export import to_onnx
from tsopt.runtime.ort import open_session
from tsopt.runtime.timing import measure


def main() -> None:
    model, example = MODELS["mlp"].load()
    fast = tsopt.optimize(model, example, backends=("onnxruntime",), seconds=2, cache=False)
    proto, weights = to_onnx(fast.program).detached()
    session = open_session(proto, {"threads": torch.get_num_threads()}, weights).session
    array = {session.get_inputs()[0].name: example.args[0].numpy()}
    calls = {"bare session.run": lambda x: session.run(None, array), "tsopt": fast}
    timings = measure(calls, [Example((example.args[0].clone(),)) for _ in range(3)], seconds=10)
    p50 = {name: timing.p50 * 1e3 for name, timing in timings.items()}
    paired = np.array(timings["tsopt"].samples) - np.array(timings["bare session.run"].samples)
    out = {
        "runs": fast.report.winner,
        "microseconds": p50,
        "overhead_microseconds": float(np.median(paired) * 1e3),
        "environment": environment().to_json(),
    }
    (Path(__file__).parent / "results" / "overhead.json").write_text(json.dumps(out, indent=1) + "\n")
    print(json.dumps(out["microseconds"]), f"overhead {out['overhead_microseconds']:.1f} microseconds")


if __name__ == "__main__":
    main()
