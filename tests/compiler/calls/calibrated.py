"""Calibration data, read for a linear layer."""

from __future__ import annotations

import torch
from torch import nn

import tsopt
from tsopt.compiler.calls.calibration import read_calibration
from tsopt.compiler.calls.example import as_example

X = torch.zeros(2, 3)


def read(data, model=None, example=X, *, size=None, **options):
    example = example if size is None else torch.zeros(size, 3)
    program = tsopt.capture(model or nn.Linear(3, 1).eval(), example)
    return read_calibration(data, program.signature, as_example(example), **options)


def first(calibration):
    """The first argument of each call."""
    return [call.args[0] if call.args else next(iter(call.kwargs.values())) for call in calibration.calls]


def rows(count, start=0):
    return torch.arange(start, start + 3 * count, dtype=torch.float32).reshape(count, 3)
