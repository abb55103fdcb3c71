"""A model for hybrids in the background, and their reports."""

from __future__ import annotations

import torch
from torch import nn

from tsopt.hybrid import compiled_of

QUICK = {"seconds": 0.05, "isolate": False, "cache": False, "backends": ("torchscript",), "background": True}
X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        return x + 0.1 * nn.functional.gelu(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(Small() for _ in range(4)))
        self.register_buffer("x", torch.zeros(()))  # called as the input is

    def forward(self, x):
        self.x += 1
        return self.layers(x)


def reports(net):
    return compiled_of(net).fast.reports
