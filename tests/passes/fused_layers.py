"""Layers to fold scales and shifts into, and what follows them."""

from __future__ import annotations

import torch
from torch import nn


def warm(norm: nn.Module) -> nn.Module:
    """A batch norm that does something, in eval mode."""
    for name, tensor in [*norm.named_parameters(), *norm.named_buffers()]:
        if tensor.is_floating_point():
            tensor.data.uniform_(0.5, 2.0)
            if name in ("bias", "running_mean"):
                tensor.data.sub_(1.0)
    return norm.eval()


def image(channels: int, dims: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, channels, *[5] * dims)


def net(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers).eval()


def then(layer: nn.Module, function) -> nn.Module:
    class Then(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return function(self.layer(x))

    return Then().eval()


def layer_then(layer: nn.Module, k: torch.Tensor, op) -> nn.Module:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer
            self.register_buffer("k", k)

        def forward(self, x):
            return op(self.layer(x), self.k)

    return Layer().eval()
