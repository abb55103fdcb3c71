"""Indices that do not exist: PyTorch raises, engines answer."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from bench.hazards import Case
from bench.hazards.values import Model, case

TABLE = torch.arange(20.0).reshape(5, 4)
GOOD, NEGATIVE, BEYOND = torch.tensor([0, 3, 4]), torch.tensor([0, -1, 4]), torch.tensor([0, 5, 4])
WRAPS = torch.tensor([0, 2**32 + 1, 4])


class Embedded(nn.Module):
    """Tokens, some of them shifted or reshaped first."""

    def __init__(self, change: Model = lambda ids: ids) -> None:
        super().__init__()
        self.table, self.change = nn.Embedding(5, 4), change
        self.eval()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table(self.change(ids)) * 2
        return found


class Indexed(nn.Module):
    """A function of a table, which is a weight, and an index."""

    def __init__(self, function: Model) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("x", TABLE.clone())
        self.eval()

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.function(self.x, index)
        return found


def indexed(name: str, function: Model) -> Case:
    return _case(name, Indexed(function))


def _case(name: str, model: Model) -> Case:
    return case(name, model, (GOOD,), (GOOD,), (BEYOND,), (NEGATIVE,), (WRAPS,), notes="indices")


CASES = (
    _case("embedding", Embedded()),
    _case("embedding of shifted tokens", Embedded(lambda ids: ids + 1 - 1)),
    _case("embedding of reshaped tokens", Embedded(lambda ids: ids.reshape(3, 1).int())),
    _case("embedding of clamped tokens", Embedded(lambda ids: ids.clamp(min=0))),
    _case("embedding of chosen tokens", Embedded(lambda ids: torch.where(ids > 2, ids, 0))),
    indexed("gather", lambda x, i: x.gather(0, i[:, None])),
    indexed("index_select", lambda x, i: x.index_select(0, i)),
    indexed("x[i]", lambda x, i: x[i]),
    indexed("x[:, i]", lambda x, i: x.t()[:, i]),
    indexed("x[i, j]", lambda x, i: x[i, i.clamp(0, 3)]),
    indexed("scatter", lambda x, i: x.scatter(0, i[:, None], 1.0)),
    indexed("scatter_add", lambda x, i: x.scatter_add(0, i[:, None], torch.ones(3, 1))),
    indexed("index_add", lambda x, i: x.index_add(0, i, torch.ones(3, 4))),
    indexed("index_copy", lambda x, i: x.index_copy(0, i, torch.ones(3, 4))),
    indexed("index_put", lambda x, i: x.index_put((i,), torch.ones(3, 4))),
    indexed("take", lambda x, i: x.take(i + 15)),
    indexed("one_hot", lambda x, i: F.one_hot(i, 5)),
    indexed("cross_entropy", lambda x, i: F.cross_entropy(x[:3].repeat(1, 2)[:, :5], i)),
    indexed("nll_loss", lambda x, i: F.nll_loss(x[:3].repeat(1, 2)[:, :5], i)),
    indexed("embedding_bag", lambda x, i: F.embedding_bag(i[None], x)),
)
