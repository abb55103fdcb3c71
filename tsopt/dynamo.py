"""`torch.compile(model, backend="tsopt")`: each graph that TorchDynamo captures is optimized at its first call."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import fx

from tsopt.api import check_options, names_of_options, optimize
from tsopt.compiler.calls.example import Example
from tsopt.errors import UsageError
from tsopt.runtime.calling.graph_parts import Graph
from tsopt.runtime.calling.optimized import Optimized
from tsopt.runtime.calling.partitioned import PART

CHANGES = 3  # of its weights, after which a graph is optimized again; then it is run unchanged
BY_DYNAMO = ("frontend", "dynamic")  # it has captured the graph, and decides which sizes are dynamic
EXAMPLE = 'torch.compile(model, backend="tsopt", options={"seconds": 5.0})'


def backend(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    **other: Any,
) -> Callable[..., Any]:
    """The torch.compile backend registered as `tsopt`.

    A graph is optimized at its first call under torch.no_grad() or torch.inference_mode(), for the weights of each
    object that calls it, and again when these have been written to, up to three times; where gradients are required it
    runs unchanged. Writes through numpy or `.data` are found by audits only, within a hundred calls or more: see
    docs/audits.md.

    Args:
        graph: the graph that TorchDynamo has captured.
        example_inputs: not used: they are fake tensors, and the race needs values.
        options: options of `tsopt.optimize`, as in `torch.compile(model, backend="tsopt", options={"level": 1})`.
        mode: for Inductor only.

    Raises:
        UsageError: an option is unknown or invalid.
    """
    given = dict(options or {})
    _check(given, mode, other)

    def part(graph: Callable[..., Any], inputs: Example) -> Optimized:
        return cast(Optimized, optimize(graph, inputs, **PART | given | {"frontend": "export"}))

    return Graph(graph, part, changes=CHANGES)


def _check(given: Mapping[str, Any], mode: str | None, other: Mapping[str, Any]) -> None:
    """Raises UsageError, before anything is called: a graph that needs gradients would never show what is wrong."""
    if mode is not None or other:
        name = "mode" if mode is not None else next(iter(other))
        raise UsageError(
            f"the backend tsopt does not take {name}={other.get(name, mode)!r}",
            why="it belongs to Inductor" if name == "mode" else "torch.compile passes on only mode= and options=",
            fix=f"leave it out; options of tsopt.optimize go into options=: {EXAMPLE}",
        )
    known = sorted(names_of_options() - {*BY_DYNAMO})
    for name in given:
        if name in BY_DYNAMO:
            raise UsageError(
                f"the option {name!r} cannot be used with torch.compile",
                why="TorchDynamo captures the graph, and decides which sizes are dynamic",
                fix=f"leave it out, or call tsopt.optimize(model, example_input, {name}=...)",
            )
        if name not in known:
            close = difflib.get_close_matches(str(name), known, 1)
            raise UsageError(
                f"unknown option {name!r} of the backend tsopt",
                why="options= takes the options of tsopt.optimize",
                fix=f"write {close[0]!r}" if close else f"use one of: {', '.join(known)}",
            )
    check_options(given)
