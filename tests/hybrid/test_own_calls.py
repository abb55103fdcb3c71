"""`hybridize`: what calls change that the model itself serves, beside what is compiled for others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tsopt
from tests.hybrid.models import QUICK, close
from tsopt import hybrid_state
from tsopt.hybrid import compiled_of

pytestmark = [
    pytest.mark.usefixtures("single_threaded", "always_faster"),
    pytest.mark.filterwarnings("ignore:tsopt"),
]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def rows(count):
    return torch.linspace(-3, 3, count * 8).reshape(count, 8)


def eager(net, x, **options):
    """What a copy of the model computes, with caches of its own."""
    return copy.deepcopy(tsopt.hybridize(net, active=False))(x, **options)


class BySize(nn.Module):
    """Keeps what it computes from sizes."""

    def __init__(self):
        super().__init__()
        self.linear, self.kept = nn.Linear(8, 8), {}

    def forward(self, x):
        size = int(str(len(x)))  # of which no program can be made for many
        if size not in self.kept:
            self.kept[size] = size**-0.5, torch.full((8,), float(size))
        factor, shift = self.kept[size]
        return self.linear(x) * factor + shift


def test_a_cache_that_calls_of_other_sizes_fill_is_no_change(calls):
    net = tsopt.hybridize(BySize().eval(), **QUICK)
    for size in (16, 20, 24, 28, 32, 36, 40, 44, 48, 16):
        close(net(rows(size)), eager(net, rows(size)))
    assert len(calls) == 1
    assert compiled_of(net).why_eager == ""


def test_what_is_in_the_cache_counts_when_somebody_else_changes_it(calls):
    net = tsopt.hybridize(BySize().eval(), **QUICK)
    for size in (16, 20, 16):
        net(rows(size))
    assert len(calls) == 1
    net.kept[20][1].fill_(7.0)
    net(rows(16))
    assert len(calls) == 2
    net.kept[16] = 3.0, torch.zeros(8)
    close(net(rows(16)), net.linear(rows(16)) * 3)


class Counts(BySize):
    """How much is in its cache matters to calls of all sizes."""

    def forward(self, x):
        return super().forward(x) * len(self.kept)


class Registers(BySize):
    """Is told, in calls of another form, what its calls compute."""

    def forward(self, x, factor=None, bound=None):
        if factor is not None:
            self.factor = factor
        if bound is not None:
            self.kept["bound"] = bound
        return super().forward(x).clamp(max=self.kept.get("bound", 100.0)) * getattr(self, "factor", 1.0)


class Tells(BySize):
    """Changes what is there already, in calls of some sizes."""

    def forward(self, x):
        if int(str(len(x))) == 20:
            self.kept[16] = 5.0, torch.zeros(8)
        return super().forward(x)


CHANGING = {
    "a length": (Counts, lambda net: net(rows(20))),
    "an attribute": (Registers, lambda net: net(rows(16), factor=2.0)),
    "an entry that another form of calls has added": (Registers, lambda net: net(rows(16), bound=20.0)),
    "an entry that was there": (Tells, lambda net: net(rows(20))),
}


@pytest.mark.parametrize("how", CHANGING)
def test_what_makes_a_difference_to_compiled_calls_is_a_change(how):
    cls, change = CHANGING[how]
    net = tsopt.hybridize(cls().eval(), **QUICK)
    net(rows(16))
    assert compiled_of(net).fast.executable is not None
    change(net)
    for x in (rows(16), 1000 * rows(16)):
        close(net(x), eager(net, x))


def test_a_cache_that_goes_on_filling_is_compared_only_so_often(calls, monkeypatch):
    monkeypatch.setattr(hybrid_state, "FILLS", 2)
    net = tsopt.hybridize(BySize().eval(), **QUICK)
    for size in (16, 20, 16, 24, 16, 28, 16):
        close(net(rows(size)), eager(net, rows(size)))
    assert len(calls) == 2


class Scaled(BySize):
    """Computes with all that is in its cache, in calls of another form."""

    def forward(self, x, all=False):
        found = super().forward(x)
        return found + sum(factor for factor, _ in self.kept.values()) if all else found


def test_what_was_compiled_for_other_forms_of_calls_is_not_used_any_more():
    net = tsopt.hybridize(Scaled().eval(), **QUICK | {"warmup": 0})
    net(rows(16))
    for _ in range(2):
        close(net(rows(16), all=True), eager(net, rows(16), all=True))
    compiled_of(net).fast.new_signatures._warmup = 9
    net(rows(20))
    close(net(rows(16), all=True), eager(net, rows(16), all=True))
