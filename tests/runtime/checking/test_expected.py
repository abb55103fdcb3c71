"""What is known of eager's answers."""

from __future__ import annotations

import math

import pytest
import torch

from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.structure import flatten
from tsopt.runtime.checking.expected import Expected
from tsopt.runtime.checking.inputs import InputSet


def answered(*leaves):
    leaves = tuple(map(torch.tensor, leaves))
    return Expected(InputSet("example", Example((), {})), leaves, flatten(leaves)[1], (), ())


@pytest.mark.parametrize(
    ("leaves", "largest"),
    [
        (([1.0, -3.0], [2.0]), 3.0),
        (([1.0, -math.inf, 2.0], [math.nan, -4.0], [math.inf]), 4.0),
        (([math.nan], [math.inf], [7]), None),
        (([0.0],), 0.0),
        ((), None),
    ],
)
def test_the_largest_magnitude_is_that_of_finite_floats(leaves, largest):
    assert answered(*leaves).largest == largest


def test_finite_numbers_are_selected_only_where_others_are_among_them(monkeypatch):
    def refuse(*_):
        raise AssertionError("selecting them takes ten times as long as looking for the largest")

    monkeypatch.setattr(torch.Tensor, "isfinite", refuse)
    assert answered([1.0, -3.0]).largest == 3.0
