"""What eager does in a call, and what its time says about the machine."""

from __future__ import annotations

import cProfile
import sys

import pytest
import torch
from torch import nn

import tsopt
from tests.regression.models import OPTIONS, Net, X
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


def test_the_model_is_left_as_it_was():
    model = Counts()
    EagerWork.of(model, tsopt.example(X), [model.calls])
    assert model.calls == 0
    assert sys.getprofile() is None


def test_beside_another_profiler_functions_are_not_counted():
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        found = work(Net())
        assert sys.getprofile() is not None
    finally:
        profiler.disable()
    assert (found.macs, found.functions) == (32, None)


def test_beside_a_bundle_only_macs_are_needed():
    assert EagerWork.of(Net().eval(), tsopt.example(X), [], only_macs=True) == EagerWork(32)


@pytest.mark.parametrize(("eager", "verdict"), [(8.5, "undecided"), (10.0, "slower"), (11.5, "slower")])
def test_on_several_threads_a_machine_with_less_to_do_helps_eager_more_than_an_engine(
    model, baseline, paces, eager, verdict
):
    paces(now=0.5 * 1.08 * eager, eager=eager)
    found = tsopt.check(model, X, baseline, **OPTIONS)
    assert found.verdict == verdict
    assert any("may account for 5%" in remark for remark in found.remarks) == (verdict == "undecided")
