"""Ensembles of equal networks, and what is asked of every merge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.passes.helpers import Outcome, check
from tsopt.passes.merge import MergeBranches

MERGE = MergeBranches()
MERGED, JOINED = "isomorphic_branches", "parallel_linear"
COUNT = 8
WIDTH = 6
X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


class Ensemble(nn.Module):
    """`make(i)` for each branch; `end` brings the results together; `begin` gives each branch its input."""

    def __init__(
        self,
        make: Callable[[int], nn.Module],
        end: Callable[[list[torch.Tensor]], Any] = torch.stack,
        begin: Callable[[torch.Tensor, int], Any] | None = None,
        count: int = COUNT,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.members = nn.ModuleList(make(i) for i in range(count))
        self.end, self.begin = end, begin or (lambda x, count: [x] * count)
        self.eval()

    def forward(self, x):
        inputs = self.begin(x, len(self.members))
        return self.end([member(value) for member, value in zip(self.members, inputs, strict=True)])


class Body(nn.Module):
    """A linear layer, then `after(h, p, q)` with two vectors of its own."""

    def __init__(self, after: Callable[..., torch.Tensor], *, bias: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.p, self.q = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.after = after

    def forward(self, x):
        return self.after(self.layer(x), self.p, self.q)


class Linear(nn.Module):
    """A linear layer with weights of any dtype and shape."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


# Weights and biases that `linear` takes, and that cannot be put side by side.
ODD = {
    "a vector": lambda: Linear(torch.randn(WIDTH)),
    "a bias for all": lambda: Linear(torch.randn(2, WIDTH), torch.randn(1)),
    "a number as bias": lambda: Linear(torch.randn(2, WIDTH), torch.randn(())),
    "a bias by rows": lambda: Linear(torch.randn(2, WIDTH), torch.randn(3, 1)),
}


def perceptron(_: int = 0, *, bias: bool = True, act: type[nn.Module] = nn.ReLU) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=bias), act(), nn.Linear(WIDTH, 4, bias=bias))


def merged(model: nn.Module, x: Any, ops: list[str] | None = None, *, what: Any = MERGE, **options: Any) -> Outcome:
    """The branches are merged, and the four facts hold."""
    found = check(what, model, x, ops, **options)
    assert MERGED in found.done, found.declined
    return found


def left(model: Any, x: Any, reason: str | None = None, *, what: Any = MERGE) -> Outcome:
    """Nothing is done."""
    found = check(what, model, x)
    assert found.done == set(), found.ops
    if reason:
        assert reason in found.reasons, found.declined
    return found
