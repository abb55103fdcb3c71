"""A program that was read by another front end than torch.export is compared with the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tests.compiler.capture.models import Marked, X
from tests.passes.helpers import assert_computes
from tsopt.compiler.capture.capture import capture
from tsopt.compiler.capture.frontends import computes_the_same
from tsopt.errors import GraphBreakError


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (torch.relu, True),
        (lambda x: x.clamp(min=0) + (x[0, 0] != -1), False),
        (lambda x: x.relu().double(), False),
        (lambda x: (x.relu(),), False),
    ],
    ids=["the same", "on other values", "dtype", "structure"],
)
def test_a_program_is_compared_with_the_model(other, same):
    program = capture(torch.relu, X)
    assert computes_the_same(program, other, tsopt.example(X)) == same


def test_a_model_may_have_an_attribute_called_original():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.original = nn.ReLU()

        def forward(self, x):
            return self.original(x) + 1

    model = Keeps().eval()
    assert_computes(capture(model, X, frontend="fx"), model, [X, -X], exact=True)


def test_a_subclass_of_tensors_is_no_output():
    with pytest.raises(GraphBreakError, match="returns a subclass"):
        computes_the_same(capture(torch.relu, X), lambda x: x.relu().as_subclass(Marked), tsopt.example(X))


def test_whole_numbers_are_compared_exactly():
    x = torch.arange(100_000, 100_006)
    program = capture(lambda x: x + 1000, x)
    assert computes_the_same(program, lambda x: x + 1000, tsopt.example(x))
    assert not computes_the_same(program, lambda x: x + 1001, tsopt.example(x))


def test_a_constant_example_hides_nothing():
    program = capture(lambda x: x + 0, torch.ones(3))
    assert not computes_the_same(program, lambda x: x * 0 + 1, tsopt.example(torch.ones(3)))


def test_state_counts_and_is_put_back_after_the_comparison():
    class Stepping(nn.Module):
        def __init__(self, step):
            super().__init__()
            self.step = step
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count.add_(self.step)
            return x + 0

    model, other = Stepping(1), Stepping(2)
    program = capture(model, X)
    assert computes_the_same(program, model, tsopt.example(X))
    other.count = model.count
    assert not computes_the_same(program, other, tsopt.example(X))
    assert model.count == 0
