"""Models that several tests of captures share."""

from __future__ import annotations

import torch
from torch import nn

X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Layered(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)


class Plain(Layered):
    def forward(self, x):
        return self.layer(x).relu()


class Marked(torch.Tensor):
    pass
