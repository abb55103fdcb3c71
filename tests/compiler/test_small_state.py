"""State in containers, objects, globals and arrays: `optimize` leaves it as it was, and calls go on from there."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import tsopt
from tsopt.compiler.small_state import LARGEST, Values

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
COUNT, ARRAY = torch.zeros(1), np.zeros(1)
QUICK = {"seconds": 0.05, "isolate": False, "cache": False, "backends": ("torchscript",)}


class Counts(nn.Module):
    def __init__(self, place):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.place = nn.Linear(4, 4), place
        self.held, self.table = [torch.zeros(1)], {"count": torch.zeros(1)}
        self.inner, self.array = SimpleNamespace(count=torch.zeros(1)), np.zeros(1)

    def forward(self, x):
        count = self.place(self)
        count += 1
        return self.layer(x) * (count if isinstance(count, torch.Tensor) else float(count[0]))


PLACES = {
    "a list": lambda model: model.held[0],
    "a dict": lambda model: model.table["count"],
    "an object": lambda model: model.inner.count,
    "a global": lambda model: COUNT,
    "an array": lambda model: model.array,
    "a global array": lambda model: ARRAY,
}


@pytest.fixture(autouse=True)
def from_zero():
    COUNT.zero_()
    ARRAY[:] = 0


@pytest.mark.filterwarnings("ignore:tsopt")
@pytest.mark.usefixtures("always_faster", "single_threaded")
@pytest.mark.parametrize(
    "make",
    [lambda model: tsopt.optimize(model, X, **QUICK), lambda model: tsopt.hybridize(model, **QUICK)],
    ids=["optimize", "hybridize"],
)
@pytest.mark.parametrize("name", PLACES)
def test_calls_go_on_from_the_state_that_there_was(name, make):
    model = Counts(PLACES[name]).eval()
    reference = copy.deepcopy(model)
    with torch.no_grad():
        wanted = [reference(X) for _ in range(3)]
        COUNT.zero_()
        ARRAY[:] = 0
        called = make(model)
        assert float(PLACES[name](model)[0]) == 0
        for expected in wanted:
            torch.testing.assert_close(called(X), expected)
    assert float(PLACES[name](model)[0]) == 3


def test_what_has_not_changed_is_not_written():
    tensor, array = torch.tensor([float("nan"), 1.0]), np.ones(3)
    array.flags.writeable = False
    values = Values()
    for value in (tensor, array, torch.zeros(LARGEST), "nothing"):
        values.add(value)
    assert values.are_same()
    version = tensor._version
    assert not values.put_back()
    assert tensor._version == version
    tensor[1] = 2
    assert not values.are_same()
    assert values.put_back()
    assert tensor[1] == 1
