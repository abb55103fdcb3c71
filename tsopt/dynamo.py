"""`torch.compile(model, backend="tsopt")`: each graph that TorchDynamo captures is optimized at its first call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import fx

from tsopt.api import optimize
from tsopt.compiler.calls.example import Example
from tsopt.runtime.calling.graph_parts import Graph
from tsopt.runtime.calling.optimized import Optimized
from tsopt.runtime.calling.partitioned import PART


def backend(
    graph: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The torch.compile backend registered as `tsopt`.

    Args:
        graph: the graph that TorchDynamo has captured.
        example_inputs: not used: they are fake tensors, and the race needs values.
        options: options of `tsopt.optimize`, as in `torch.compile(model, backend="tsopt", options={"level": 1})`.
    """

    def part(graph: Callable[..., Any], inputs: Example) -> Optimized:
        return cast(Optimized, optimize(graph, inputs, **PART | dict(options or {}) | {"frontend": "export"}))

    return Graph(graph, part)
