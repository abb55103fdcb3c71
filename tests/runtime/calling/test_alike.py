"""Which values are alike for the code that computes with them."""

from __future__ import annotations

import pytest
import torch

from tsopt.runtime.calling.alike import Kept, all_alike

ONE = torch.ones(1)
PAIRS = {
    "an integer and a float": (1, 1.0, False),
    "a truth value and an integer": (True, 1, False),
    "zeros of two signs": (0.0, -0.0, False),
    "two NaNs": (float("nan"), float("nan"), True),
    "two numbers in tuples": ((1, 2), (1, 2.0), False),
    "equal tuples": ((1, "a"), (1, "a"), True),
    "equal texts": ("gelu", "".join(["ge", "lu"]), True),
    "texts": ("gelu", "relu", False),
    "nothing and something": (None, 0, False),
    "equal tensors of one value": (ONE, torch.ones(1), False),
    "a tensor and itself": (ONE, ONE, True),
    "functions": (torch.relu, torch.tanh, False),
    "dicts in another order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),
}


@pytest.mark.parametrize("name", PAIRS)
def test_values_are_alike_or_not(name):
    before, now, wanted = PAIRS[name]
    same = [None, "text", len, 3, torch.zeros(4)]
    assert all_alike([*same, now], [*same, before]) is wanted
    assert Kept([*same, before]).alike([*same, now]) is wanted
    assert Kept([before]).alike([now]) is wanted


def test_a_value_more_or_less_is_not_alike():
    assert Kept([]).alike([])
    assert not Kept([1]).alike([])
    assert not Kept([None]).alike([None, None])


def test_another_tensor_is_told_or_cannot_be_compared():
    kept = Kept([torch.ones(4)])
    with pytest.raises(RuntimeError, match="ambiguous"):
        kept.alike([torch.ones(4)])
