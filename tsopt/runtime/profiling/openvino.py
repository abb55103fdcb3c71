"""How long each kernel of an OpenVINO model takes, by its own performance counters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from torch import fx

from tsopt.runtime.onnx.onnx_model import OnnxModel
from tsopt.runtime.onnx.places import values_of, with_unknown_ones
from tsopt.runtime.profiling.kernels import Timed, by_median, called

COUNTERS = {"PERF_COUNT": "YES"}  # of the configuration of a compiled model


def timed(compiled: Any, inputs: Sequence[Any], model: OnnxModel) -> Timed:
    """The kernels of a compiled model.

    Args:
        compiled: with COUNTERS.
        inputs: flat, as tensors.
        model: what it was made from.
    """
    request = compiled.create_infer_request()
    feed = {place: np.asarray(value.numpy(force=True), order="C") for place, value in enumerate(inputs)}
    ms: dict[str, list[float]] = defaultdict(list)
    kinds: dict[str, str] = {}

    def note() -> None:
        for item in request.get_profiling_info():
            if str(item.status).endswith("EXECUTED"):
                ms[item.node_name].append(item.real_time.total_seconds() * 1e3)
                kinds[item.node_name] = item.exec_type

    spent = called(lambda: request.infer(feed, share_inputs=True), note)
    made = _values(compiled, model)
    return Timed(
        by_median([(kind, made.get(name, ())) for name, kind in kinds.items()], [ms[name] for name in kinds]),
        median(spent),
    )


def _values(compiled: Any, model: OnnxModel) -> dict[str, tuple[fx.Node, ...]]:
    """The values of the program that each kernel computes, by the name of the kernel."""
    # A node that makes an output of the model goes by the name of the output.
    nodes = {value.name: node for node in model.model.graph for value in node.outputs}
    nodes |= {node.name: node for node in model.model.graph}
    kernels = compiled.get_runtime_model().get_ordered_ops()
    names = [kernel.get_friendly_name() for kernel in kernels]
    place = {name: number for number, name in enumerate(names)}
    merged = [kernel.get_rt_info()["originalLayersNames"].astype(str).split(",") for kernel in kernels]
    readers = [
        {place[use.get_node().get_friendly_name()] for output in kernel.outputs() for use in output.get_target_inputs()}
        for kernel in kernels
    ]
    # What it makes of a node it names after it: `node_linear/WithoutBiases`.
    parts = [[nodes.get(part) or nodes.get(part.partition("/")[0]) for part in parts] for parts in merged]
    found = with_unknown_ones([values_of(filter(None, known)) for known in parts], readers)
    return dict(zip(names, found, strict=True))
