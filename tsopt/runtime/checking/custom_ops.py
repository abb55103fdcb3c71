"""Custom ops, whose kernels may read or write outside of memory if their inputs are made up.

`torchvision::roi_align` does: a box that is NaN, or of a batch that does not exist, ends the process. So where there
are custom ops, candidates are compared on the example and on values near it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tsopt.compiler.calls.example import Example
from tsopt.compiler.graph.control import all_calls
from tsopt.compiler.graph.program import Program
from tsopt.compiler.watching_mode import WatchingMode

# The namespaces that torch itself registers ops in.
OF_TORCH = frozenset(
    {"aten", "prim", "prims", "quantized", "quantized_decomposed", "_quantized", "sparse", "mkl", "mkldnn"}
    | {"mkldnn_prepacked", "onednn", "inductor", "inductor_prims", "rngprims", "c10d", "_c10d_functional", "_native"}
    | {"c10d_functional", "_c10d_functional_autograd", "profiler", "export", "onnx", "quantization", "higher_order"}
    | {
        "static_runtime",
        "symm_mem",
        "_dtensor",
        "debug_mode_ops",
        "debugprims",
        "_test",
        "tsopt",
        "xnnpack",
        "prepacked",
    }
)


def of_program(program: Program) -> tuple[str, ...]:
    """The custom ops that a program calls."""
    return among(node.target.name() for node in all_calls(program) if isinstance(node.target, torch._ops.OpOverload))


def among(names: Iterable[str]) -> tuple[str, ...]:
    """Which of these ops are custom."""
    return tuple(dict.fromkeys(name for name in names if name.partition("::")[0] not in OF_TORCH))


def ops_of_call(model: Callable[..., Any], example: Example) -> tuple[str, ...]:
    """The ops that a call of a model goes through, up to where it fails. Takes one call."""
    seen = _Seen()
    with contextlib.suppress(Exception), seen:  # what is wrong with the call is said where it counts
        model(*example.args, **example.kwargs)
    return tuple(seen.names)


class _Seen(WatchingMode):
    """Notes the ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.name() if isinstance(func, torch._ops.OpOverload) else f"higher_order::{func}"] = None
        return func(*args, **(kwargs or {}))
