"""Small networks to quantize, inputs for them, and the pass that these calibrate."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # it registers the ops
import torch.nn.functional as F
from torch import nn

from tsopt.compiler.graph.program import Program
from tsopt.passes.quantize.layers import layers_of, readers_of_integers
from tsopt.passes.quantize.observe import observe, qparams_of
from tsopt.passes.quantize.static import StaticInt8

own = torch.ops.quantized_decomposed


def calibrated_pass(program: Program, calls: Sequence[Sequence[torch.Tensor]], **options: Any) -> StaticInt8:
    """The pass with parameters from flat calls."""
    values = readers_of_integers(layers_of(program))
    ordered = [node for node in program.graph.nodes if node in values]
    return StaticInt8(qparams_of(ordered, observe(program, calls, ordered, lambda text: None)), **options)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def with_outliers(size: int, *lead: int) -> torch.Tensor:
    """Rows of which one value is much larger than the others."""
    x = torch.randn(*lead, size, generator=seeded(size))
    x[..., size // 2] *= 30
    return x


def images(count: int, seed: int = 0) -> list[torch.Tensor]:
    return [torch.randn(1, 3, 8, 8, generator=seeded(seed + i)) for i in range(count)]


class Residual(nn.Module):
    """Two convolutions around a residual sum, pooling, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.inner = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        x = (x + self.inner(x)).relu()
        return self.head(self.pool(x).mean((2, 3)))


class Sequences(nn.Module):
    """1-D convolutions around a residual sum, and a linear layer for each step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv1d(3, 8, 3, padding=1)
        self.inner = nn.Conv1d(8, 8, 3, padding=2, dilation=2, groups=2)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        x = torch.nn.functional.gelu(self.inner(x)) + x
        return self.head(torch.nn.functional.max_pool1d(x, 2).transpose(1, 2))


class Video(nn.Module):
    """3-D convolutions, pooling, and a linear layer for each place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.inner = nn.Conv3d(3, 8, 3, padding=1), nn.Conv3d(8, 8, 3, padding=1, bias=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        x = torch.nn.functional.max_pool3d(x + self.inner(x), 2)
        return self.head(x.permute(0, 2, 3, 4, 1))


class Bounds(nn.Module):
    """Convolutions, each with an activation that cuts its results off."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU6()),
            *(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Hardtanh(-0.5, 1.5)),
            nn.Conv2d(8, 4, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).clamp(max=0.25)


class Attention(nn.Module):
    """Self-attention of two heads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts, self.out = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (2, 8)).transpose(1, 2) for part in self.parts)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Convolved(nn.Module):
    """Attention that reads a convolution, which an engine runs on integers only if its result is quantized."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(5, 5, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        return F.scaled_dot_product_attention(x, x, x)


def sequences(count: int) -> list[torch.Tensor]:
    return [torch.randn(2, 5, 16, generator=seeded(seed)) for seed in range(count)]


def mlp(*sizes: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for size, following in pairwise(sizes):
        layers += [nn.Linear(size, following), nn.GELU()]
    return nn.Sequential(*layers[:-1]).eval()


class OwnWeight(nn.Module):
    """A user's own int8 weight, in the form that tsopt writes, read by a layer with an input in float."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 64)
        self.register_buffer("integers", torch.randint(-127, 128, (64, 64), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(64) * 1e-3 + 1e-4)
        self.register_buffer("zeros", torch.zeros(64, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = (0, -127, 127, torch.int8)
        weight = own.dequantize_per_channel.default(self.integers, self.scales, self.zeros, *kind)
        return F.linear(self.first(x).relu(), weight)


class OwnInput(OwnWeight):
    """The same, and the input of the layer is rounded by the user's own parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = (0.05, 128, 0, 255, torch.uint8)
        x = own.dequantize_per_tensor.default(own.quantize_per_tensor.default(x, *kind), *kind)
        weight = own.dequantize_per_channel.default(self.integers, self.scales, self.zeros, 0, -127, 127, torch.int8)
        return F.linear(x, weight)


class OwnScores(nn.Module):
    """Attention with queries and keys that the user has rounded."""

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        kind = (0.5, 0, -128, 127, torch.int8)
        k = own.dequantize_per_tensor.default(own.quantize_per_tensor.default(q, *kind), *kind)
        return F.scaled_dot_product_attention(k, k, q)
