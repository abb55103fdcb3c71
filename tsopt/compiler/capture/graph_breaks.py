"""Where dynamo splits a model that is not one graph: how large each part is, and why it ends there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tsopt.compiler.calls.example import Example
from tsopt.compiler.graph.origin import is_library, is_python, short_path
from tsopt.compiler.protect import protected
from tsopt.compiler.quiet import silent
from tsopt.errors import CaptureError

LONGEST = 120  # characters of dynamo's reason


@dataclass(frozen=True, slots=True)
class Part:
    """One graph between two graph breaks.

    Attributes:
        ops: number of calls in it.
        ends_at: `model.py:12` of the graph break behind it; empty where the model ends.
        why: dynamo's reason for the break.
    """

    ops: int
    ends_at: str = ""
    why: str = ""


def parts_of_model(model: Callable[..., Any], example: Example) -> tuple[Part, ...]:
    """Traces a model with dynamo and runs it once on the example.

    Raises:
        CaptureError: dynamo fails on the model.
    """
    try:
        with protected(model), silent("torch._dynamo", "torch._dynamo.variables.tensor"), torch.no_grad():
            torch._dynamo.reset()
            found = torch._dynamo.explain(model)(*example.args, **example.kwargs)  # type: ignore[no-untyped-call]
    except Exception as error:  # dynamo's own, or the model's under it
        said = (str(error).splitlines() or [""])[0][:LONGEST]
        raise CaptureError("TorchDynamo cannot trace the model", why=f"{type(error).__name__}: {said}") from error
    breaks = [(_place(item.user_stack), item.reason.splitlines()[0][:LONGEST]) for item in found.break_reasons]
    counts = [sum(node.op.startswith("call_") for node in made.graph.nodes) for made in found.graphs]
    breaks += [("", "")] * (len(counts) - len(breaks))
    return tuple(Part(count, *ending) for count, ending in zip(counts, breaks, strict=False))


def _place(stack: Any) -> str:
    """The innermost frame of the user's own code."""
    own = [f for f in stack or () if not is_library(f.filename) and not is_python(f.filename)]
    return f"{short_path(own[-1].filename)}:{own[-1].lineno}" if own else ""
