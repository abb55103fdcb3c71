"""Many repeated calls of a candidate on fresh inputs, to find what goes wrong once in a hundred calls.

Gross differences only: rounding is judged by the verdict, which compares every value on a few inputs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.structure import flatten, unflatten
from tsopt.compiler.precision_names import FP32
from tsopt.runtime.calling.audit import EAGER_RAISES, difference
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.checking.accuracy import LIMITS

CALLS = 300  # of which what is wrong once in a hundred calls survives 5 in a hundred times
GROSS = {FP32: "tf32"}  # the tolerance, where the candidate computes in full precision: 1 % of the output

Draw = Callable[[Sequence[torch.Tensor], torch.Generator], list[torch.Tensor]]


def unsteady(
    executable: Executable,
    model: Callable[..., Any],
    example: Example,
    *,
    seed: int = 0,
    seconds: float,
    calls: int = CALLS,
    draw: Draw | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """What is wrong in one of many calls with values drawn from the example's; an empty text for nothing.

    Args:
        draw: makes the values of a call; None: `drawn`.
        seconds: for how long to go on at most; one call is made whatever it takes.
    """
    generator = torch.Generator().manual_seed(seed)
    leaves, structure = flatten((example.args, example.kwargs))
    limit = LIMITS[GROSS.get(executable.precision, executable.precision)]
    # A candidate that was accepted on real data may be far off on shuffled values.
    gross = limit if executable.tolerance is None else math.inf
    end = clock() + seconds
    with torch.no_grad():
        for number in range(1, calls + 1):
            args, kwargs = unflatten(structure, (draw or drawn)(leaves, generator))
            call = Example(args, kwargs)
            found = difference(executable, model, call, state=executable.state, limit=gross)
            if found and not found.startswith(EAGER_RAISES):
                return f"repeated call {number} on fresh inputs: {found}"
            if clock() > end:
                break
    return ""


def drawn(leaves: Sequence[torch.Tensor], generator: torch.Generator) -> list[torch.Tensor]:
    """Tensors with the values of others at random places: an index stays an index."""
    return [_drawn(leaf.detach(), generator) for leaf in leaves]


def _drawn(leaf: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if leaf.numel() < 2:
        return leaf
    places = torch.randint(leaf.numel(), (leaf.numel(),), generator=generator, device="cpu").to(leaf.device)
    values = leaf.reshape(-1)[places].reshape(leaf.shape)
    if any(step == 0 for step in leaf.stride()):
        return values
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device).copy_(values)
