"""What results share memory with: inputs, each other, the weights. The caller writes to them, as callers do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from bench.hazards import RIGHT, Case, Outcome, served_by


class Model(nn.Module):
    """Weights, a buffer that is written, one that is not, around a function of them and an input."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, generator=generator), requires_grad=False)
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("count", torch.zeros(4))
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def pair(first: torch.Tensor) -> Any:
    return first, first.view(-1)


def counted(model: Model, x: torch.Tensor) -> Any:
    model.count.add_(1)
    return x + model.count, model.count


def counted_in_part(model: Model, x: torch.Tensor) -> Any:
    model.count.add_(1)
    return x + model.count, model.count[1:3]


def kept(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.relu(x)
    return whole[:, 1:3], whole


def overlapping(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    whole = torch.relu(x)
    return whole[:, :3], whole[0, 1:], whole[:, :1].expand(-1, 3)


FUNCTIONS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "the input": lambda model, x: x,
    "the input beside a result": lambda model, x: (x, x + 1),
    "a reshaped input": lambda model, x: x.view(-1),
    "a transposed input": lambda model, x: x.t(),
    "a row of the input": lambda model, x: (x[0], x.exp()),
    "an expanded input": lambda model, x: x.expand(2, *x.shape),
    "a contiguous input": lambda model, x: x.contiguous(),
    "an input that has its dtype already": lambda model, x: x.to(torch.float32),
    "an input that dropout leaves as it is": lambda model, x: nn.functional.dropout(x, 0.5, False),
    "a copy of the input": lambda model, x: x.clone(),
    "an input times one": lambda model, x: x * 1,
    "an input that is written": lambda model, x: x.add_(1),
    "a view of an input that is written": lambda model, x: x.mul_(2)[0],
    "a result, and a view of it": lambda model, x: pair(x + 1),
    "a part of a result, and the whole": lambda model, x: kept(x),
    "parts of a result that overlap": lambda model, x: overlapping(x),
    "one result twice": lambda model, x: (x + 1,) * 2,
    "two equal results": lambda model, x: (x + 1, x + 1),
    "halves of a result": lambda model, x: (x + 1).chunk(2),
    "a list of numbers beside it": lambda model, x: (x + 1, torch.arange(4)),
    "zeros beside it": lambda model, x: (x + 1, torch.zeros(3), torch.zeros(3)),
    "zeros in the form of the input": lambda model, x: (x + 1, torch.zeros_like(x)),
    "a copy of a weight": lambda model, x: (x + 1, model.weight.clone()),
    "what is computed of weights": lambda model, x: (x + 1, model.weight * 2 + model.table),
    "a table": lambda model, x: (x + 1, model.table * 1),
    "a buffer that is written": counted,
    "a part of a buffer that is written": counted_in_part,
}


def leaves(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else list(found)


def pattern(found: Any, x: torch.Tensor) -> list[tuple[int, int, bool]]:
    """Which results share memory with the input (-1), or with an earlier one, and whether they are it."""
    values = [x, *leaves(found)]
    ends = [(value.data_ptr(), value.data_ptr() + _reach(value)) for value in values]
    return [
        (later - 1, earlier - 1, values[later] is values[earlier])
        for later in range(1, len(values))
        for earlier in range(later)
        if ends[earlier][0] < ends[later][1] and ends[later][0] < ends[earlier][1]
    ]


def _reach(value: torch.Tensor) -> int:
    return (1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))) * value.itemsize


def differs(called: Callable[..., Any], model: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> str:
    """What calls in a row make otherwise than the model, where the caller writes to each result."""
    for x in inputs:
        mine, theirs = x.clone(), x.clone()
        found, wanted = called(mine), model(theirs)
        if pattern(found, mine) != pattern(wanted, theirs):
            return f"results share memory as {pattern(found, mine)}, not as {pattern(wanted, theirs)}"
        for number, (value, reference) in enumerate(zip(leaves(found), leaves(wanted), strict=True)):
            if not torch.allclose(value, reference):
                return f"result {number} has other values"
        for value, reference in zip(leaves(found), leaves(wanted), strict=True):
            if 0 not in value.stride():
                value.add_(5)
                reference.add_(5)
        pairs = [(mine, theirs), *zip(leaves(found), leaves(wanted), strict=True)]
        if not all(torch.allclose(value, reference) for value, reference in pairs):
            return "what is written to a result shows elsewhere"
    return ""


def check(function: Callable[..., Any]) -> Callable[[str], Outcome]:
    def outcome(backend: str) -> Outcome:
        inputs = [torch.randn(2, 4) for _ in range(3)]
        model = Model(function).eval()
        for called in served_by(model, inputs[0].clone(), backend):
            model.count.zero_()
            reference = Model(function).eval()
            found = differs(called, reference, inputs)
            if found:
                return Outcome("wrong", found)
        return RIGHT

    return outcome


CASES = tuple(Case(name, check(function)) for name, function in FUNCTIONS.items())
