"""What the tests of lower precisions share."""

from __future__ import annotations

import torch
from torch import nn

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
W = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)) / 3
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8)).eval()
