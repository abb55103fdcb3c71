"""Models that are called in ways for which they were not compiled."""

from __future__ import annotations

import torch
from torch import nn

OPTIONS = {"backends": ("onnxruntime", "eager"), "seconds": 0.05, "isolate": False, "cache": False}
X = torch.randn(2, 8, generator=torch.Generator().manual_seed(3))


def outcomes(fast) -> list[str]:
    return [outcome for _, outcome in fast.report.signatures]


class Signs(nn.Module):
    """Decides by its values, and writes nothing in eval mode."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        hidden = self.norm(self.first(x))
        return {"y": hidden if hidden.sum() > 1e6 else -hidden}
