"""Which terms take digits from what they are added to, and where they are subtracted again."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import tsopt
from tsopt.compiler.analysis.large_terms import absorbs, roundings

ROW = torch.tensor([0.0, -100000.0, 1.0])
DTYPES = [(torch.float16, 255.0, 256.0), (torch.bfloat16, 31.0, 32.0), (torch.float32, 2896.0, 2897.0)]


@pytest.mark.parametrize(("dtype", "modest", "large"), DTYPES, ids=str)
def test_a_term_is_large_by_the_digits_of_its_dtype(dtype, modest, large):
    for term in (large, -large, math.inf, math.nan, torch.tensor([0.0, large])):
        assert absorbs(term, dtype)
    assert not absorbs(-modest, dtype)
    assert not absorbs(large, torch.int32)


def found(function):
    return list(roundings(tsopt.capture(function, torch.ones(3))))


@pytest.mark.parametrize(
    ("function", "term", "by_tensor"),
    [
        (lambda x: (x + 100000) - 80000.0, 100000.0, False),
        (lambda x: torch.add(x, ROW, alpha=2) + 100000, 200000.0, True),
        (lambda x: -100000 - (x.cos() - 120000).double(), 120000.0, False),
        (lambda x: F.batch_norm(x[None], ROW, ROW.abs()) - 100000.0, 100000.0, True),
        (lambda x: torch.cond(x.sum() > 0, lambda x: (x + 100000) - 100000, torch.sin, (x,)), 100000.0, False),
    ],
)
def test_a_large_term_is_followed_to_where_it_is_subtracted(function, term, by_tensor):
    assert [(rounding.term, rounding.by_tensor) for rounding in found(function)] == [(term, by_tensor)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x + 100000).log() - 100000,
        lambda x: (x + 100000) + 100000,
        lambda x: (x - 100000) * -1 + 100000,
        lambda x: (x + 100000) * x - 100000,
        lambda x: (x + 100000, x - 100000),
        lambda x: (x + math.inf) - math.inf,
        lambda x: (x.long() + 100000) - 100000,
        lambda x: (x + torch.zeros(0, 1)) - 100000,
    ],
)
def test_other_terms_are_not_found(function):
    assert not found(function)


def test_fine_steps_are_not_taken_for_a_purpose():
    assert not found(lambda x: ((x - 27315.0) / 100).relu() * 100 + 27315.0)
