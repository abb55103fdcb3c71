"""Values on which rules are tried, and a function of constants as a model."""

from __future__ import annotations

import torch
from torch import nn

from tests.passes.helpers import SPECIAL, specials

N = len(SPECIAL)
X = specials(2, 3, 4)
INTS = torch.tensor([0, 1, -1, 7, 2**31, -(2**63), 2**63 - 1, 5])
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
NARROW = [torch.int64, torch.int32, torch.int8, torch.uint8]


class With(nn.Module):
    """A function of its inputs and of constants."""

    def __init__(self, function, *tensors):
        super().__init__()
        self.function, self.count = function, len(tensors)
        for i, tensor in enumerate(tensors):
            self.register_buffer(f"w{i}", tensor)
        self.eval()

    def forward(self, *xs):
        return self.function(*xs, *(getattr(self, f"w{i}") for i in range(self.count)))
