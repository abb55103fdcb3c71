"""A model, data, and candidates that are off by a share of its outputs."""

from __future__ import annotations

import torch
from torch import nn

import tsopt
from tsopt.runtime.checking.criterion import criterion_of

DATA = [tsopt.example(torch.randn(4, 8, generator=torch.Generator().manual_seed(i))) for i in range(5)]
torch.manual_seed(0)
MODEL = nn.Linear(8, 3).eval()
SIGNATURE = tsopt.capture(MODEL, DATA[0]).signature


def off_by(share):
    """The model with an error of a share of its output."""

    def called(x):
        y = MODEL(x)
        error = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        return y + error * share * y.norm() / error.norm()

    return called


def criterion(metric=None, max_drop=None, data=DATA, model=MODEL):
    return criterion_of(model, data, metric, max_drop, SIGNATURE)
