"""Programs with integers, examined for an engine."""

from __future__ import annotations

import torch
from torch import nn

import tsopt
from tsopt.runtime.onnx.integers.engine import Engine
from tsopt.runtime.onnx.integers.engine_differences import ONNX_RUNTIME, OPENVINO
from tsopt.runtime.onnx.integers.narrow_integers import examine

INTS, FLOATS = torch.tensor([1, 2, 0]), torch.tensor([0.5, 1.5, 2.0])
BOTH = [OPENVINO, ONNX_RUNTIME]


def examined(model, *args, engine: Engine = OPENVINO, dynamic=None, **options):
    return examine(tsopt.capture(model, args, dynamic=dynamic), engine, **options)


def limits(found):
    return [(bound.low, bound.high, bound.kind) for bound in found.bounds]


class Products(nn.Module):
    """A table, and enough work behind it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(50, 8), nn.Linear(8, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(self.table(ids))
        return found
