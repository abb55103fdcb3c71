"""TorchScript as a program: what sizes and constants decide is followed, what values decide is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

X = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.filterwarnings("ignore")  # TorchScript is deprecated, and says so


class Rich(nn.Module):
    """Lists, dicts, loops, branches on sizes, options, an assert, a buffer, numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.last = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("shift", torch.ones(3))
        self.factor = 2

    def forward(self, x, y: torch.Tensor | None = None, n: int = 2, name: str = "a"):
        found: list[torch.Tensor] = []
        for layer in self.layers:
            found.append(torch.relu(layer(x)))  # noqa: PERF401
        for i in range(n):
            x = x * self.factor + i
        if y is not None:
            x = x + y
        i = 0
        while i < x.size(0):
            i += 2
        if x.shape[0] > 2 and x.dim() == 2:
            x = x.view(x.size(0), -1) * (i / 2) + float(i // 3) + i % 3
        held = {"x": x}
        held["twice"] = x * 2
        assert x.shape[1] == 3, "three columns"
        h = self.drop(self.last(held["x"] + held["twice"]))
        first, second = torch.chunk(h, 2, 0)
        return {"cat": torch.cat(found, 1), "sum": h.sum(dtype=torch.float64), name: second + self.shift + first.sum()}
