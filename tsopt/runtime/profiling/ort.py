"""How long each kernel of an ONNX Runtime session takes, by the runtime's own profiler."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from torch import fx

from tsopt.runtime.onnx.onnx_model import OnnxModel
from tsopt.runtime.onnx.places import values_of, with_unknown_ones
from tsopt.runtime.profiling.kernels import Timed, by_median, called

KERNEL = "_kernel_time"
OPTIMIZED = "optimized.onnx"


def configure(options: Any, directory: Path) -> None:
    """Turns the profiler of a session on, which also writes what the runtime made of the model.

    Args:
        options: SessionOptions.
        directory: for its files.
    """
    options.enable_profiling = True
    options.profile_file_prefix = str(directory / "profile")
    options.optimized_model_filepath = str(directory / OPTIMIZED)
    entry = "session.optimized_model_external_initializers"
    options.add_session_config_entry(f"{entry}_file_name", f"{OPTIMIZED}.data")
    options.add_session_config_entry(f"{entry}_min_size_in_bytes", "1024")


def timed(session: Any, call: Callable[[], Any], model: OnnxModel, directory: Path) -> Timed:
    """The kernels of a session that `configure` has prepared.

    Args:
        call: runs the session once.
        model: what the session was made from.

    Returns:
        No kernels where the events of the profiler are not those of the model.
    """
    spent = called(call)
    events = json.loads(Path(session.end_profiling()).read_text())
    kernels = [event for event in events if event.get("cat") == "Node" and event["name"].endswith(KERNEL)]
    nodes = list(OnnxModel.read(directory / OPTIMIZED).model.graph)
    named = {f"{node.name}{KERNEL}" for node in nodes}
    if len(named) == len(nodes):  # those in branches and loops count for the node that these belong to
        kernels = [event for event in kernels if event["name"] in named]
    # One event for each node of the optimized model in each call, in its order.
    if (
        not nodes
        or len(kernels) % len(nodes)
        or any(event["args"]["op_name"] != nodes[place % len(nodes)].op_type for place, event in enumerate(kernels))
    ):
        return Timed((), median(spent))
    calls = [kernels[start : start + len(nodes)] for start in range(0, len(kernels), len(nodes))][-len(spent) :]
    made = fused(nodes, model)
    names = [node.op_type for node in nodes]
    ms = [[call[place]["dur"] / 1e3 for call in calls] for place in range(len(nodes))]
    return Timed(by_median(list(zip(names, made, strict=True)), ms), median(spent))


def fused(kernels: Sequence[Any], model: OnnxModel) -> list[tuple[fx.Node, ...]]:
    """The values of the program that each node of an optimized model computes.

    A node is known by the names of its results or by its own, which the runtime takes from the model and adds to.

    Args:
        kernels: the nodes of the optimized model.
        model: what it was made from.
    """
    makers = {value.name: node for node in model.model.graph for value in node.outputs}
    makers |= {node.name: node for node in model.model.graph if node.name}
    ends = [_ends(kernel, makers) for kernel in kernels]
    others = {node for end in ends for node in end}
    place = {kernel: number for number, kernel in enumerate(kernels)}
    readers = [
        {place[use.node] for value in kernel.outputs for use in value.uses() if use.node in place} for kernel in kernels
    ]
    return with_unknown_ones([values_of(_back_to(end, others)) for end in ends], readers)


def _ends(kernel: Any, makers: dict[str, Any]) -> set[Any]:
    """The nodes of the model that make the results of a node of the optimized one."""
    found = {makers[value.name] for value in kernel.outputs if value.name in makers}
    name = (kernel.name or "").removeprefix("fused ").partition("/")[0]
    while not found and name:
        found = {makers[name]} if name in makers else set()
        name = name.rpartition("_")[0]  # `relu_nchwc`
    return found


def _back_to(end: set[Any], others: set[Any]) -> list[Any]:
    """The nodes behind the results of a kernel, as far as the results of other kernels."""
    found, todo, seen = [], list(end), set(end)
    while todo:
        node = todo.pop()
        found.append(node)
        makers = (value.producer() for value in node.inputs if value is not None)
        new = {maker for maker in makers if maker is not None} - others - seen
        seen |= new
        todo += new
    return found[::-1]
