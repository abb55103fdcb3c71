"""Which sums are exact because they are of whole numbers."""

from __future__ import annotations

import pytest
import torch

import tsopt
from tsopt.compiler.analysis.whole_numbers import exact_sums

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
    "without a sign": lambda x: (x > 0).to(torch.uint8).reshape(-1).float().sum(),
    "a difference": lambda x: (1 - (x > 0).float()).sum(),
}
ROUNDED = {
    "of numbers": lambda x: x.sum(1),
    "of halves": lambda x: ((x > 0).float() * 0.5).sum(1),
    "of a choice between counts and other numbers": lambda x: torch.where(x > 0, (x > 1).float(), x).sum(1),
    "of products with numbers": lambda x: ((x > 0).float() * x).sum(1),
    "of what may be large": lambda x: ((x > 0).float() * 2**24 + 1).sum(1),
    "of integers of any size": lambda x: x.long().float().sum(1),
    "of differences that wrap around": lambda x: ((x > 5).to(torch.uint8) - (x > 0).to(torch.uint8)).float().sum(),
    "of what is negative without a sign": lambda x: (-1 * (x > 0).int()).to(torch.uint8).float().sum(),
    "of numbers of places": lambda x: torch.repeat_interleave((x[0] > 0).long(), output_size=3).float().sum(),
    "of complex numbers": lambda x: ((x > 0).to(torch.complex64) * 3000001.0).sum(),
    "of integers that wrap around": lambda x: ((x > 0).to(torch.int8) * 100 + 100).float().sum(),
    "scaled as they are added": lambda x: torch.add((x > 0).float(), (x > 1).float(), alpha=0.5).sum(1),
}


def sums(model, x=X):
    graph = tsopt.capture(model, x).graph
    exact = exact_sums(graph)
    return [node in exact for node in graph.nodes if "sum" in str(node.target)]


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


def test_a_program_of_many_ops_is_looked_through():
    def many(x):
        for _ in range(500):
            x = x * 0.999 + 0.001
        return x.sum(1)

    assert sums(many) == [False]
