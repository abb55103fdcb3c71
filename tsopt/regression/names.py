"""What a baseline says of a call and of what was timed, each in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.structure import flatten
from tsopt.compiler.capture.names import name_of
from tsopt.compiler.protect import protected
from tsopt.regression.baseline import line
from tsopt.runtime.bundles.members import MANIFEST
from tsopt.runtime.checking.inputs import InputSet


def inputs_of(example: Example) -> str:
    """`float32[1, 3, 224, 224]`, for each input."""
    return _types((example.args, example.kwargs))


def outputs_of(
    called: Callable[..., Any], model: Callable[..., Any], example: Example, state: list[torch.Tensor]
) -> str:
    """The same for each output of what is called like the model."""
    call = InputSet("example", example).clone()
    with protected(model, written=state):
        return _types(called(*call.args, **call.kwargs))


def _types(value: Any) -> str:
    leaves, _ = flatten(value)
    return line(", ".join(f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" for leaf in leaves))


def name_for(model: Callable[..., Any], fast: Any) -> str:
    report = getattr(fast, "report", None)
    return line(str(getattr(report, "model", None) or name_of(model)))


def title_of(called: Any) -> str:
    """The title of a race's winner, or the name of a callable of the user's own."""
    winner = getattr(getattr(called, "report", None), "winner", None)
    return line(str(winner or name_of(called, "candidate")))


def winner_of(bundle: Path) -> str:
    """Which candidate a bundle says it is of."""
    claims = json.loads((bundle / MANIFEST).read_text()).get("claims")
    return line(str(claims.get("winner", ""))) if isinstance(claims, dict) else ""
