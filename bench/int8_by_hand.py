"""int8 as tsopt sets it up, against int8 set up by hand with ONNX Runtime's own quantizers, side by side.

Usage: python -m bench.int8_by_hand [MODEL ...]; writes bench/results/int8_by_hand.{json,md}. A process for each model.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import nn

import tsopt
from bench.int8 import CALIBRATION, NAMES, UNSEEN, like
from bench.models import MODELS
from bench.process import Rows, measure_each
from bench.side_by_side import ratio, summary
from tsopt.compiler.calls.structure import flatten
from tsopt.runtime.racing.environment import Environment
from tsopt.runtime.racing.tournament import measure

RESULTS = Path(__file__).parent / "results"
SECONDS = 15.0
PEERS = ("static", "dynamic")


def main() -> None:
    measure_each("bench.int8_by_hand:one", NAMES, RESULTS / "int8_by_hand.json", line, page)


def one(name: str) -> dict[str, Any]:
    model, example = MODELS[name].load()
    data = [like(example, seed) for seed in range(CALIBRATION)]
    unseen = [like(example, 1000 + seed) for seed in range(UNSEEN)]
    fast = tsopt.optimize(model, example, precision="int8", calibration=data, cache=False)
    calls: dict[str, Callable[..., Any]] = {"eager": model, "tsopt": fast}
    failures = {}
    for peer in PEERS:
        try:
            calls[peer] = by_hand(model, example, data if peer == "static" else None)
        except Exception as error:  # whatever the quantizer or the runtime raises
            failures[peer] = f"{type(error).__name__}: {str(error)[:120]}"
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


def by_hand(model: nn.Module, example: tsopt.Example, data: list[tsopt.Example] | None) -> Callable[..., Any]:
    """The quantizers as their documentation has it: preprocessed; QDQ with 8-bit weights per channel and unsigned
    activations, or scales in each call; a bare session on numpy arrays."""
    logging.disable(logging.CRITICAL)
    keys = [f"input_{i}" for i in range(len(example.args))] + list(example.kwargs)
    with (
        tempfile.TemporaryDirectory() as directory,
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        plain, ready, made = (Path(directory) / f"{name}.onnx" for name in ("plain", "ready", "made"))
        exported = torch.onnx.export(model, example.args, kwargs=example.kwargs, dynamo=True, verbose=False)
        proto = exported.model_proto
        del proto.graph.value_info[:]  # the quantizers trip over what the exporter has recorded
        onnx.save(proto, plain)
        quant_pre_process(plain, ready)
        if data is None:
            quantize_dynamic(ready, made, weight_type=QuantType.QInt8, per_channel=True)
        else:
            names = [item.name for item in proto.graph.input]
            options: dict[str, Any] = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
            quantize_static(ready, made, _Reader(names, data), per_channel=True, **options)
        session_options = onnxruntime.SessionOptions()
        session_options.intra_op_num_threads = torch.get_num_threads()
        session_options.log_severity_level = 4
        session = onnxruntime.InferenceSession(str(made), session_options, providers=["CPUExecutionProvider"])
    inputs = [item.name for item in session.get_inputs()]
    assert len(inputs) == len(keys)

    def run(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        feed = {name: value.numpy() for name, value in zip(inputs, (*args, *kwargs.values()), strict=True)}
        return [torch.from_numpy(value) for value in session.run(None, feed)]

    return run


class _Reader(CalibrationDataReader):
    def __init__(self, names: list[str], data: list[tsopt.Example]) -> None:
        self._items: Iterator[dict[str, np.ndarray]] = iter(
            {name: value.numpy() for name, value in zip(names, (*item.args, *item.kwargs.values()), strict=True)}
            for item in data
        )

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._items, None)


def _relative_error(called: Callable[..., Any], model: nn.Module, calls: list[tsopt.Example]) -> float:
    """Of the first output over all calls, in L2 norms."""
    noise = size = 0.0
    for call in calls:
        mine, theirs = (flatten(f(*call.args, **call.kwargs))[0][0].double() for f in (called, model))
        noise += float((mine - theirs).square().sum())
        size += float(theirs.square().sum())
    return math.sqrt(noise / size)


def page(env: Environment, rows: Rows) -> list[str]:
    header = (
        "model",
        "tsopt runs",
        "ms",
        "error",
        "static by hand ms",
        "error",
        "dynamic by hand ms",
        "error",
        "against the best",
    )
    best = [found["ratio"] for row in rows.values() if (found := _against(row)) is not None]
    mean = math.exp(sum(map(math.log, best)) / len(best)) if best else math.nan
    return [
        f"| {' | '.join(header)} |",
        "|" + "---|" * len(header),
        *(line(name, row) for name, row in rows.items()),
        "",
        f"- tsopt against the faster of the two: geometric mean {mean:.2f}x, lowest {min(best, default=math.nan):.2f}x",
        f"- error: relative error of the first output on {UNSEEN} inputs that were not used; weights are random",
        *(f"- {name}, {peer} by hand: {why}" for name, row in rows.items() for peer, why in row["failures"].items()),
    ]


def _against(row: dict[str, Any]) -> dict[str, float] | None:
    return min(row["against"].values(), key=lambda found: found["ratio"], default=None)


def line(name: str, row: dict[str, Any]) -> str:
    def cells(key: str) -> tuple[str, str]:
        if key not in row["timings_ms"]:
            return "-", "-"
        return f"{row['timings_ms'][key]['p50']:.3g}", f"{row['errors'][key]:.2%}"

    best = _against(row)
    against = "-" if best is None else f"{best['ratio']:.2f}x [{best['low']:.2f}, {best['high']:.2f}]"
    parts = (name, row["winner"], *cells("tsopt"), *cells("static"), *cells("dynamic"), against)
    return f"| {' | '.join(parts)} |"


if __name__ == "__main__":
    main()
