"""Where the sign of a zero is read: by which calls, and through which others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsopt
from tests.passes.helpers import find, ops_of
from tsopt.compiler.analysis.zero_signs import is_sign_of_zero_read, may_be_negative_zero

X = torch.tensor([[-0.0, 0.0, 1.0], [2.0, -0.0, -3.0]])
WEIGHT = torch.eye(3)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda x: torch.atan2(x, X), True),
        (lambda x: torch.atan2(X, x), True),
        (lambda x: 1 / x, True),
        (lambda x: x.reciprocal(), True),
        (lambda x: X / x, True),
        (lambda x: x / 3, False),
        (lambda x: x / X, False),
        (lambda x: x**-1, True),
        (lambda x: x**3, False),
        (lambda x: torch.copysign(X, x), True),
        (lambda x: torch.copysign(x, X), False),
        (lambda x: x.signbit(), True),
        (lambda x: x.view(torch.int32), True),
        (lambda x: torch.complex(X, x), True),
        (lambda x: 1 / (x.view(3, 2).t() * 3).neg().sqrt().relu(), True),
        (lambda x: 1 / x**3, True),
        (lambda x: 1 / x**2, False),
        (lambda x: 1 / (x * x), False),
        (lambda x: 1 / (x + 1e-5), False),
        (lambda x: 1 / (x + X), True),
        (lambda x: 1 / F.linear(x, WEIGHT), False),
        (lambda x: 1 / x.exp(), False),
        (lambda x: 1 / x.abs(), False),
        (lambda x: X / (x > 0), False),
        (lambda x: (x * 2).relu(), False),
    ],
)
def test_what_reads_the_sign_of_a_zero(model, expected):
    program = tsopt.capture(model, X)
    (value,) = (node for node in program.graph.nodes if node.op == "placeholder")
    assert is_sign_of_zero_read(program, value) is expected


class Kept(nn.Module):
    """Reads what it has kept of the call before."""

    def __init__(self, read):
        super().__init__()
        self.read = read
        self.register_buffer("last", torch.ones(2, 3))

    def forward(self, x):
        found = self.read(self.last)
        self.last.copy_((x + 0.0) * 2)
        return found


def test_the_sign_of_a_kept_zero_is_read_in_the_next_call():
    program = tsopt.capture(Kept(lambda last: 1 / last), X)
    assert is_sign_of_zero_read(program, find(program, "add.Tensor"))
    run = tsopt.compile(tsopt.transform(program), "eager")
    run(X)
    assert run(X)[0, 0] == float("inf")


def test_the_sign_of_a_kept_zero_may_not_be_read():
    program = tsopt.capture(Kept(lambda last: 1 / last.abs()), X)
    assert not is_sign_of_zero_read(program, find(program, "add.Tensor"))
    assert "add.Tensor" not in ops_of(tsopt.transform(program))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda x: x, True),
        (lambda x: x * 2, True),
        (lambda x: x * X, True),
        (lambda x: x * x, False),
        (lambda x: x**2, False),
        (lambda x: x**-2.0, False),
        (lambda x: x**3, True),
        (lambda x: x**0.5, True),
        (lambda x: (x * x).sum(-1, keepdim=True).expand(2, 3).sqrt(), False),
        (lambda x: x.sum(-1), True),
        (lambda x: x.abs().t().mean(0), False),
        (lambda x: torch.linalg.vector_norm(x, dim=-1), False),
        (lambda x: x.relu(), True),
        (lambda x: x.exp().relu(), False),
        (lambda x: x + 1e-6, False),
        (lambda x: x + X, True),
        (lambda x: x + 0.0, True),
        (lambda x: x - 1e-6, True),
        (lambda x: x.half() + 1e-6, True),
        (lambda x: torch.complex(x, x) * torch.complex(x, x), True),
    ],
)
def test_what_may_be_a_negative_zero(model, expected):
    program = tsopt.capture(model, X)
    (value,) = program.graph.output_node().args[0]
    assert may_be_negative_zero(value) is expected
