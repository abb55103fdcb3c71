"""Which terms take digits from what they are added to, and where they are subtracted again."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import tsopt
from tsopt.compiler.analysis.large_terms import absorbs, roundings

ROW = torch.tensor([0.0, -5000.0, 1.0])
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
        (lambda x: (x + 5000) - 4000.0, 5000.0, False),
        (lambda x: torch.add(x, ROW, alpha=2) + 5000, 10000.0, True),
        (lambda x: -5000 - (x.cos() - 6000).double(), 6000.0, False),
        (lambda x: F.batch_norm(x[None], ROW, ROW.abs()) - 5000.0, 5000.0, True),
        (lambda x: torch.cond(x.sum() > 0, lambda x: (x + 5000) - 5000, torch.sin, (x,)), 5000.0, False),
    ],
)
def test_a_large_term_is_followed_to_where_it_is_subtracted(function, term, by_tensor):
    assert [(rounding.term, rounding.by_tensor) for rounding in found(function)] == [(term, by_tensor)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x + 5000).log() - 5000,
        lambda x: (x + 5000) + 5000,
        lambda x: (x - 5000) * -1 + 5000,
        lambda x: (x + 5000) * x - 5000,
        lambda x: (x + 5000, x - 5000),
        lambda x: (x + math.inf) - math.inf,
        lambda x: (x.long() + 5000) - 5000,
        lambda x: (x + torch.zeros(0, 1)) - 5000,
    ],
)
def test_other_terms_are_not_found(function):
    assert not found(function)
