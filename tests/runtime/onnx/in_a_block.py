"""A model whose submodule calls one function: errors about that function name the submodule."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class Calls(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class InABlock(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.block = Calls(function)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x * 2)
