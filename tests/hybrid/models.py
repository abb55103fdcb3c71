"""Models for tests of `hybridize`, and what they ask about them."""

from __future__ import annotations

import torch
from torch import nn

import tsopt

QUICK = {"seconds": 0.05, "isolate": False, "cache": False, "backends": ("eager",)}
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """With a method, a property, a constant and a buffer of its own."""

    scale = 2.0

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
        self.register_buffer("shift", torch.ones(3))
        self.names = ["a", "b", "c"]

    @property
    def width(self):
        return self.layers[0].out_features

    def classes(self, x):
        return [self.names[i] for i in self(x).argmax(-1)]

    def forward(self, x):
        return self.layers(x) * self.scale + self.shift


def close(a, b):
    torch.testing.assert_close(a, b)


def assert_follows(model, change):
    """What a hybrid of the model answers is right before a change and at the next call, without audits."""
    net = tsopt.hybridize(model, audit=0, **QUICK)
    with torch.no_grad():
        for _ in range(3):
            close(net(X), model(X))
        assert not tsopt.report(net).in_eager, "it is compiled"
        change()
        close(net(X), model(X))


class Holding(nn.Module):
    """Computes with something that it holds."""

    def __init__(self, held, compute) -> None:
        super().__init__()
        self.held, self.compute = held, compute
        self.eval()

    def forward(self, x):
        return self.compute(self, x)


def eager(net, x=X):
    return nn.Module.__call__(tsopt.hybridize(net, active=False), x)


class Slotted(Net):
    """With an attribute outside of the `__dict__` that a hybrid shares."""

    __slots__ = ("factor", "unset")

    def __init__(self):
        super().__init__()
        self.factor = 3.0

    def forward(self, x):
        return super().forward(x) * self.factor


def relu(x):
    return torch.relu(x)
