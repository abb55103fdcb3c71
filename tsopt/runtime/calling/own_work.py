"""Whether a compiled form still pays with all the work that is done around a call: checks of the model, of the inputs.

A race compares engines. Around each call, a hybrid looks at the weights, the modules and the modes that its compiled
form was made for, which takes a few microseconds: as long as a model of one or two layers takes by itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.structure import flatten
from tsopt.errors import CaptureError
from tsopt.runtime.racing.timing import seconds_in_turns, seconds_of

LONG = 1e-3  # seconds: no model that takes longer gets slower by work of microseconds
UNSEEN = 256  # calls of the model itself between two that are looked at
LARGER = 4  # times as many elements as the inputs had: another engine may be faster then


def loss(model: Callable[..., Any], served: Callable[..., Any], example: Example) -> str:
    """Why eager should serve the calls; empty if they are faster as they are served.

    Args:
        served: a call with all that is done around it.
    """
    if seconds_of(model, [example]) > LONG:
        return ""
    eager, ours = (statistics.median(found) for found in seconds_in_turns((model, served), example))
    if ours <= eager:
        return ""
    return f"a call takes {eager * 1e6:.1f} us in eager mode, and {ours * 1e6:.1f} us compiled and with its checks"


def size_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The number of elements of all tensors of a call; 0 if that cannot be told."""
    try:
        leaves, _ = flatten((args, kwargs))
    except CaptureError:
        return 0
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
