"""What is known of the numbers of a value, whatever the input is."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.passes.helpers import capture, check
from tests.passes.recompose.examples import INF, LOWEST
from tsopt.compiler.rewriting.rewrite import Site
from tsopt.passes import CANONICALIZE
from tsopt.passes.fold import FoldConstants
from tsopt.passes.recompose.bounds import bounds


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (lambda b, i, x: b.float(), (0, 1)),
        (lambda b, i, x: (1 - b.float()) * -1e4, (-1e4, 0)),
        (lambda b, i, x: b.float() / -2 + 3, (2.5, 3)),
        (lambda b, i, x: -(b.float() - 2), (1, 2)),
        (lambda b, i, x: i.to(torch.int8).float(), (-128, 127)),
        (lambda b, i, x: torch.where(b, 2.0, -3.0), (-3, 2)),
        (lambda b, i, x: b.float().masked_fill(b, -7.0), (-7, 1)),
        (lambda b, i, x: torch.sigmoid(x) * 16, (0, 16)),
        (lambda b, i, x: torch.tanh(x)[:, None].expand(2, 4, 2).transpose(0, 1), (-1, 1)),
        (lambda b, i, x: (b.float() - 3).triu(), (-3, 0)),
        (lambda b, i, x: F.embedding(i, torch.tensor([[1.0], [5.0], [-2.0]])), (-2, 5)),
        (lambda b, i, x: x + 0, None),
        (lambda b, i, x: torch.where(b, x, x), None),
        (lambda b, i, x: torch.where(b, 0.0, -INF), None),
        (lambda b, i, x: b.float() * x, None),
        (lambda b, i, x: torch.add(b.float(), b.float(), alpha=2), None),
        (lambda b, i, x: 1 / b.float(), None),
        (lambda b, i, x: b.float() / b.float(), None),
        (lambda b, i, x: b.float() / (b.float() + 1), None),
        (lambda b, i, x: b.float() / 0.0, None),
        (lambda b, i, x: torch.where(b, x, 1.0), None),
        (lambda b, i, x: b.float().masked_fill(b, True), None),
        (lambda b, i, x: b.float()[:0] + torch.zeros(0, 2), None),
        (lambda b, i, x: i.float() * LOWEST, None),
        (lambda b, i, x: i.half() + 0, None),
        (lambda b, i, x: (b.float() * LOWEST + LOWEST) * 1, None),
        (lambda b, i, x: torch.complex(b.float(), b.float()), None),
        (lambda b, i, x: b.float() + torch.full((2, 2), math.nan), None),
        (lambda b, i, x: i.to(torch.int32).view(torch.float32), None),
    ],
)
def test_bounds_hold_for_every_input(model, wanted):
    inputs = (torch.tensor([[True, False]] * 2), torch.tensor([[0, 1]] * 2), torch.randn(2, 2))
    program = check((CANONICALIZE, FoldConstants()), model, inputs).after
    found = bounds(Site(program, program.outputs[0]), program.outputs[0])
    assert found == wanted


def test_complex_numbers_have_no_bounds():
    program = capture(lambda x: x + torch.tensor([1j, 2.0]), torch.ones(2))
    (constant,) = (node for node in program.graph.nodes if node.op == "get_attr")
    assert bounds(Site(program, constant), constant) is None


def test_bounds_of_a_long_chain_are_given_up():
    """Python's stack has an end, which a chain of a thousand sums would reach."""

    def model(b):
        y = b.float()
        for _ in range(330):
            y = y * 0.5 + 0.25
        return y

    inputs = torch.tensor([True, False])
    program = capture(model, inputs)
    assert bounds(Site(program, program.outputs[0]), program.outputs[0]) is None
