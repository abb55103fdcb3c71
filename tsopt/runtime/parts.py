"""`torch.compile(model, backend="tsopt")`: each graph that dynamo finds is optimized at its first call.

For models that cannot be captured as a whole: the Python between the graphs stays as it is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from tsopt.api import optimize
from tsopt.compiler.example import example
from tsopt.errors import TsoptError
from tsopt.runtime.dispatch import Optimized

log = logging.getLogger("tsopt")
SECONDS = 2.0  # of timing for each graph; a model may have many


def backend(
    graph: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """A backend of torch.compile, registered as `tsopt`.

    Args:
        graph: what dynamo has traced.
        example_inputs: not used: they are fake, and the race needs values.
        options: of `tsopt.optimize`, as in `torch.compile(model, backend="tsopt", options={"level": 1})`.
    """
    # Other sizes in a graph that dynamo has made for all sizes: a capture for each would cost more than it gains.
    return Graph(graph, {"seconds": SECONDS, "on_new_signature": "eager"} | dict(options or {}))


class Graph:
    """One graph of dynamo: optimized at its first call without gradients, run as it is where gradients are wanted.

    Parameters and buffers, which dynamo passes in each call, are taken as constants for as long as they are the same
    tensors and nobody has written them.

    Attributes:
        fast: the optimized graph; None before the first call, and where it could not be optimized.
    """

    def __init__(self, graph: fx.GraphModule, options: Mapping[str, Any]) -> None:
        self.graph, self.options = graph, options
        self.fast: Optimized | None = None
        self._weights: dict[int, tuple[torch.Tensor, int]] = {}
        self._tried = False
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            return self.graph(*args)
        if not self._tried:
            with self._lock:
                if not self._tried:
                    self._optimize(args)
                    self._tried = True
        if self.fast is None or not self._same_weights(args):
            return self.graph(*args)
        return self.fast(*[value for i, value in enumerate(args) if i not in self._weights])

    def _optimize(self, args: Sequence[Any]) -> None:
        weights = {i: value for i, value in enumerate(args) if _is_static(value)}
        values = [value for i, value in enumerate(args) if i not in weights]
        training = any(module.training for module in self.graph.modules() if module is not self.graph)
        if training or not any(isinstance(value, torch.Tensor) for value in values):
            return
        try:
            found: Any = torch._dynamo.disable(optimize)  # type: ignore[no-untyped-call]
            with torch.no_grad():
                self.fast = found(_Bound(self.graph, weights), example(*values), **self.options)
        except TsoptError as error:
            log.info("a graph of torch.compile stays as it is: %s", error)
            return
        self._weights = {i: (value, value._version) for i, value in weights.items()}

    def _same_weights(self, args: Sequence[Any]) -> bool:
        return all(args[i] is value and value._version == version for i, (value, version) in self._weights.items())


class _Bound(nn.Module):
    """The graph with its weights, called with the rest."""

    def __init__(self, graph: fx.GraphModule, weights: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        graph.training = False  # dynamo's own flag; what the modules of the model did is in the graph
        self.graph = graph
        self.places = tuple(weights)
        for i, value in weights.items():
            if isinstance(value, nn.Parameter):
                self.register_parameter(f"weight_{i}", value)
            else:
                self.register_buffer(f"weight_{i}", value)
        self.training = False

    def forward(self, *values: Any) -> Any:
        rest = iter(values)
        count = len(self.places) + len(values)
        return self.graph(*[getattr(self, f"weight_{i}") if i in self.places else next(rest) for i in range(count)])


def _is_static(value: Any) -> bool:
    """Whether dynamo passes this tensor because a module owns it."""
    if not isinstance(value, torch.Tensor) or value.is_inference():
        return False
    return isinstance(value, nn.Parameter) or hasattr(value, "_dynamo_static_input_type")
