"""Models that cannot be captured as one graph, optimized in parts."""

from __future__ import annotations

import torch
from torch import nn

import tsopt

QUICK = {"seconds": 0.05, "isolate": False, "cache": False, "backends": ("eager", "onednn")}
X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


class Branches(nn.Module):
    """Goes on by the values of what it has computed, and remembers its calls."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.yes, self.no = nn.Linear(16, 4), nn.Linear(16, 4)
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, x, *, scale: float = 1.0):
        self.calls += 1
        self.count.add_(1)
        hidden = self.first(x * scale)
        if hidden.sum() > 40:
            return {"y": self.yes(hidden), "count": self.count * 2}
        return {"y": self.no(hidden), "count": self.count * 2}


def optimized(model=None, example=X, **options):
    return tsopt.optimize(model or Branches().eval(), example, **QUICK | options)


def due(fast):
    """An audit at the next call."""
    fast._audits.left = fast._audits.count = 0
    return fast


class Block(nn.Module):
    """Two graphs, with Python between them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        hidden = self.a(x)
        torch._dynamo.graph_break()
        return x + self.b(torch.relu(hidden))


class Decides(nn.Module):
    """Not one graph for torch.export, and one script."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        if float(y.sum()) > 0:
            y = y * 2
        return y
