"""Masks that hide nothing, everything, or whole rows are tried even if the example has no such rows."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import tsopt
from tsopt.runtime.checking.accuracy import Oracle
from tsopt.runtime.checking.inputs import input_sets
from tsopt.runtime.checking.masks import FALSE_ROWS, MASKS, TRUE_ROWS

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
ALL = torch.ones(4, 8, dtype=torch.bool)


def masks(model, *args):
    sets = input_sets(tsopt.example(*args), 0, tsopt.capture(model, args))
    return {item.kind: item.example.args for item in sets if item.kind.startswith(MASKS)}


def hidden(x, keep):
    return x.masked_fill(~keep, 0.0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8], ids=str)
def test_no_row_a_row_and_all_rows_are_hidden(dtype):
    found = masks(lambda x, keep: x * keep, X, ALL.to(dtype))
    zeros, rows, ones = (found[kind][1] for kind in (f"{MASKS} of zeros", FALSE_ROWS, TRUE_ROWS))
    assert f"{MASKS} of ones" not in found  # that is the example
    assert not zeros.any()
    assert (rows == 0).all(-1).sum() == 1
    assert (ones == 1).all(-1).any()
    assert ones.any()
    assert not ones.all()
    assert {value.dtype for value in (zeros, rows, ones)} == {dtype}
    assert all(args[0] is X for args in found.values())


def test_what_the_example_hides_stays_hidden_beside_the_row():
    keep = ALL.tril()
    (_, value) = masks(hidden, X, keep)[FALSE_ROWS]
    assert not (value & ~keep).any()
    assert (value != keep).any()


def test_each_axis_of_a_mask_but_the_last_loses_a_slice():
    keep = torch.ones(3, 1, 4, 5, dtype=torch.bool).tril()
    (_, value) = masks(hidden, torch.ones(3, 2, 4, 5), keep)[FALSE_ROWS]
    assert not value.flatten(1).any(1).all()
    assert not value.any(-1).any(0).all()
    assert value.stride() == keep.stride()


def test_a_flag_is_set_and_cleared():
    found = masks(hidden, X, torch.tensor(True))
    assert [args[1].item() for args in found.values()] == [False]


def test_an_index_and_a_number_are_no_masks():
    index = torch.tensor([0, 1, 1])
    assert not masks(lambda x, i: x[i], X, index)
    assert not masks(lambda x, n: x * n, X[:, :3], torch.tensor([0, 1, 2]))
    assert not masks(lambda x, n: x * n, X, torch.zeros(8, dtype=torch.int64))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64], ids=str)
def test_a_candidate_that_is_wrong_only_where_a_row_is_hidden_is_caught(dtype):
    """The inputs are finite, and eager makes the infinities and NaN: a candidate that differs there is wrong."""

    def model(x, keep):
        return F.linear(x, torch.eye(8)).masked_fill(keep == 0, -math.inf).softmax(-1)

    def candidate(x, keep):
        return model(x, keep).nan_to_num(0.0)

    keep = ALL.to(dtype)
    oracle = Oracle(model, tsopt.example(X, keep), tsopt.capture(model, (X, keep)))
    verdict = oracle.judge(candidate)
    assert not verdict.ok
    assert FALSE_ROWS in verdict.reason
    assert any(text.startswith(f"{MASKS} of zeros: eager returns no finite value") for text in oracle.skipped)
    assert oracle.judge(model).ok
