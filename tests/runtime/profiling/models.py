"""The model whose profiles are looked at, and what is profiled of it."""

from __future__ import annotations

from torch import nn

import tsopt
from tsopt.compiler.graph.values import flat_inputs


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        self.block = nn.Conv2d(32, 32, 3, padding=1)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = self.stem(x)
        return self.head((self.block(x) + x).mean((2, 3)))


def optimized(model, example):
    program = tsopt.transform(tsopt.capture(model.eval(), example))
    return program, [value.clone() for value in flat_inputs(program, tsopt.example(example))]
