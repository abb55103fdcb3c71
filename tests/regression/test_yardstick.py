"""What eager does in a call, by which a check tells whether it is the same eager."""

from __future__ import annotations

import sys

import torch
from torch import nn

import tsopt
from tests.regression.models import Net, X
from tsopt.regression.yardstick import EagerWork


class Busy(Net):
    """Does more in Python than it computes."""

    def forward(self, x):
        for _ in range(10):
            len([])
        return super().forward(x)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * self.calls


def work(model):
    return EagerWork.of(model.eval(), tsopt.example(X), [])


def test_what_is_counted():
    found, more = work(Net()), work(Net(layers=3))
    assert (found.macs, more.macs) == (32, 48)
    assert more.ops - found.ops == found.ops // 2 > 0
    assert more.functions > found.functions > 2
    assert work(Net()) == found


def test_functions_of_python_and_c_are_counted():
    found, busy = work(Net()), work(Busy())
    assert (busy.macs, busy.ops) == (found.macs, found.ops)
    assert busy.functions >= found.functions + 10


def test_the_model_and_profilers_are_left_as_they_were():
    model, seen = Counts(), []

    def profile(*event):
        seen.append(event)

    sys.setprofile(profile)
    try:
        EagerWork.of(model, tsopt.example(X), [model.calls])
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
    assert model.calls == 0
