"""Which sums are exact because they are of whole numbers."""

from __future__ import annotations

import pytest
import torch

import tsopt
from tsopt.compiler.analysis.whole_numbers import is_exact_sum

X, MANY = torch.ones(2, 3), torch.ones(2**12, 2**13)

EXACT = {
    "a count": lambda x: (x > 0).float().sum(1),
    "in float16": lambda x: (x > 0).half().sum(),
    "counts so far": lambda x: (x > 0).float().cumsum(1),
    "one moved, and chosen": lambda x: torch.cat([(x > 0).float(), (x < 1).float()])[:1].reshape(-1).sum(),
    "weights that are whole": lambda x: ((x > 0).float() * 4 + 3.0).sum(1),
    "of either": lambda x: torch.where(x > 0, (x > 1).float(), (x < -1).float() - 1).sum(1),
    "of counts in integers": lambda x: (x > 0).sum(1).float().sum(),
    "a sum of sums": lambda x: (x > 0).float().sum(1).sum(0),
    "a difference": lambda x: (1 - (x > 0).float()).sum(),
}
ROUNDED = {
    "of numbers": lambda x: x.sum(1),
    "of halves": lambda x: ((x > 0).float() * 0.5).sum(1),
    "of either, one of which is no whole number": lambda x: torch.where(x > 0, (x > 1).float(), x).sum(1),
    "of products with numbers": lambda x: ((x > 0).float() * x).sum(1),
    "of what may be large": lambda x: ((x > 0).float() * 2**24 + 1).sum(1),
    "of integers of any size": lambda x: x.long().float().sum(1),
    "scaled as they are added": lambda x: torch.add((x > 0).float(), (x > 1).float(), alpha=0.5).sum(1),
}


def sums(model, x=X):
    return [is_exact_sum(node) for node in tsopt.capture(model, x).graph.nodes if "sum" in str(node.target)]


@pytest.mark.parametrize("name", EXACT)
def test_sums_of_small_whole_numbers_are_exact(name):
    found = sums(EXACT[name])
    assert found == [True] * max(1, len(found))


@pytest.mark.parametrize("name", ROUNDED)
def test_others_are_rounded(name):
    assert sums(ROUNDED[name]) == [False]


@pytest.mark.parametrize(("dtype", "is_exact"), [(torch.float32, False), (torch.float64, True)])
def test_a_dtype_has_whole_numbers_up_to_a_size(dtype, is_exact):
    assert sums(lambda x: (x > 0).to(dtype).sum(), MANY) == [is_exact]
