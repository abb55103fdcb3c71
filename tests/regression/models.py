"""The model that is checked in tests, and how."""

from __future__ import annotations

import torch
from torch import nn

OPTIONS = {"backends": ("torchscript",), "isolate": False, "cache": False, "seconds": 0.05}


X = torch.ones(1, 4)


class Net(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))

    def forward(self, x):
        return self.layers(x)
