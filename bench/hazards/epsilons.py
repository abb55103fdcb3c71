"""Constants close to 0 and 1: an optimizer that compares with a tolerance removes them as if they were 0 and 1."""

from __future__ import annotations

import torch
from torch import nn

from bench.hazards.values import case

ORDINARY = (torch.tensor([[0.5, -1.5, 2.5, 3.5], [1.0, 2.0, -3.0, 4.0]]),)
NOTHING = (torch.zeros(2, 4),)
LITTLE = (torch.full((2, 4), 1e-9),)


class Buffer(nn.Module):
    """The epsilon is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("eps", torch.tensor(1e-8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.abs().sum(-1, keepdim=True) + self.eps)


class Cosine(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.flip(-1)
        return (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1) + 1e-8)


class InstanceNorm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spread, mean = torch.var_mean(x, dim=-1, keepdim=True)
        return (x - mean) * torch.rsqrt(spread + 1e-12)


CASES = (
    case("a row divided by its sum + 1e-8", lambda x: x / (x.abs().sum(-1, keepdim=True) + 1e-8), ORDINARY, NOTHING),
    case("an epsilon that is a buffer", Buffer(), ORDINARY, NOTHING),
    case("a cosine similarity by hand", Cosine(), ORDINARY, NOTHING),
    case("a norm with an epsilon of 1e-12", InstanceNorm(), ORDINARY, NOTHING),
    case("log(x + 1e-9)", lambda x: (x.abs() + 1e-9).log(), ORDINARY, NOTHING, LITTLE),
    case("log(1e-10 + x)", lambda x: (1e-10 + x.abs()).log(), ORDINARY, NOTHING, LITTLE),
    case("sqrt(x^2 + 1e-12)", lambda x: (x * x + 1e-12).sqrt().reciprocal(), ORDINARY, NOTHING),
    case("x + 1e-8 by itself", lambda x: x + 1e-8, ORDINARY, NOTHING),
    case("x - 1e-9", lambda x: 1 / (x - 1e-9), ORDINARY, NOTHING),
    case("isclose to little", lambda x: torch.isclose(x, x * 0), ORDINARY, LITTLE, NOTHING),
    case("an epsilon made of two", lambda x: x / (x.abs().amax(-1, keepdim=True) + 1e-4**2), ORDINARY, NOTHING),
    case("clamp to 1e-12", lambda x: x.abs().clamp(min=1e-12).log(), ORDINARY, NOTHING),
    case("a product with 1 + 1e-5", lambda x: (x * (1 + 1e-5) - x) * 1e5, ORDINARY, (ORDINARY[0] * 2,)),
    case("a quotient by 1 + 1e-5", lambda x: (x / (1 + 1e-5) - x) * 1e5, ORDINARY, (ORDINARY[0] * 2,)),
)
