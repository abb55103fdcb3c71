"""The same pure call on the same values is made once; nothing else is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.passes.helpers import SPECIAL, aten, capture, check, ops_of, run, specials
from tsopt.compiler.rewriting.pass_base import Limits
from tsopt.compiler.rewriting.rewrite import NEW_ALIAS
from tsopt.passes import CommonSubexpressions

CSE = CommonSubexpressions()
X = specials(len(SPECIAL))


def test_equal_calls_are_made_once():
    found = check(CSE, lambda x: x.sin() * x.sin(), X, ["sin", "mul.Tensor"])
    assert found.done == {"same_call"}


def test_chains_of_equal_calls_are_made_once():
    check(CSE, lambda x: (x.sin() + 1).cos() * (x.sin() + 1).cos(), X, ["sin", "add.Tensor", "cos", "mul.Tensor"])


def test_a_default_written_out_is_the_default():
    check(CSE, lambda x: aten.add.Tensor(x, 2) * aten.add.Tensor(x, 2, alpha=1), X, ["add.Tensor", "mul.Tensor"])


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (lambda x: x + 1, lambda x: x + 1.0),
        (lambda x: x + 1, lambda x: aten.add.Tensor(x, True)),
        (lambda x: x * 0.0, lambda x: x * -0.0),
        (lambda x: x.to(torch.float16), lambda x: x.to(torch.bfloat16)),
        (lambda x: x.sum(0), lambda x: x.sum(0, keepdim=True)),
        (lambda x: torch.sub(x, 2), lambda x: torch.sub(x, 2, alpha=2)),
    ],
    ids=["int-float", "int-bool", "zeros", "dtype", "keepdim", "alpha"],
)
def test_literals_are_equal_by_type_and_bits(a, b):
    model = lambda x: torch.cat([a(x).reshape(-1).float(), b(x).reshape(-1).float()])  # noqa: E731
    found = check(CSE, model, X)
    assert "same_call" not in found.done or len(found.ops) >= 5


def test_one_and_one_point_zero_stay_apart_where_the_type_shows():
    found = check(CSE, lambda x: ((x + 1).float(), (x + 1.0).sin()), torch.arange(3))
    assert found.ops.count("add.Tensor") == 2


def test_swapped_operands_stay_apart():
    check(CSE, lambda x, y: (x - y) * (y - x), (X, X.flip(0)), ["sub.Tensor", "sub.Tensor", "mul.Tensor"])


@pytest.mark.parametrize("random", [torch.rand_like, lambda x: F.dropout(x, 0.5, True), lambda x: x + torch.empty(3)])
def test_random_calls_are_never_merged(random):
    program = capture(lambda x: random(x) - random(x), torch.ones(3))
    after, _ = run(program, (CSE,))
    assert len(ops_of(after)) >= len(ops_of(program)) - 1
    for name in ("rand_like", "dropout", "empty.memory_format"):
        assert ops_of(after).count(name) == ops_of(program).count(name)


def test_dropout_in_eval_is_merged():
    check(CSE, lambda x: F.dropout(x, 0.5, False) * F.dropout(x, 0.5, False), X, ["dropout", "mul.Tensor"])


def test_two_returned_values_do_not_become_one():
    found = check(CSE, lambda x: (x + 1, x + 1), X, ["add.Tensor", "add.Tensor"])
    assert ("same_call", NEW_ALIAS) in found.declined


def test_views_of_two_returned_values_do_not_share_memory():
    check(CSE, lambda x: ((x + 1).view(-1), (x + 1).view(2, -1)), X)


def test_a_returned_value_and_an_inner_one_become_one():
    check(CSE, lambda x: (x + 1, (x + 1).sin()), X, ["add.Tensor", "sin"])


def test_the_same_results_of_two_splits_become_one():
    found = check(CSE, lambda x: x.split(9)[0] + x.split(9)[1], X)
    assert found.ops.count("split.Tensor") == 1


def test_equal_scalars_become_one_weight():
    def model(x):
        return x * torch.tensor(2.5) + torch.tensor(2.5)

    found = check(CSE, model, X)
    assert "same_weight" in found.done


@pytest.mark.parametrize("pair", [(0.0, -0.0), (1, 1.0), (float("nan"), 1.0)])
def test_unequal_scalars_stay_apart(pair):
    def model(x):
        return x * torch.tensor(pair[0]) + torch.tensor(pair[1])

    found = check(CSE, model, X)
    assert "same_weight" not in found.done


def test_large_weights_are_one_only_if_they_are_the_same_memory():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * self.a + self.b

    assert check(CSE, Net().eval(), torch.ones(3)).done == set()


def test_different_views_of_one_weight_stay_apart():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            base = torch.arange(6.0)
            self.register_buffer("a", base[:4].view(2, 2))
            self.register_buffer("b", base[:4].view(2, 2).t())

        def forward(self, x):
            return x * self.a + self.b

    assert check(CSE, Net().eval(), torch.ones(2, 2)).done == set()


def test_a_weight_and_its_conjugate_stay_apart():
    """They are the same memory, but not the same values."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("a", torch.tensor([1 + 2j, 3 - 1j]))
            self.register_buffer("b", self.a.conj())
            self.register_buffer("c", self.b.imag)
            self.register_buffer("d", self.a.imag)

        def forward(self, x):
            return torch.view_as_real(x * self.a + 2 * x * self.b), x * self.c + 3 * x * self.d

    assert check(CSE, Net().eval(), torch.tensor([1.0, 2.0])).done == set()


def test_fuel_stops_the_merging():
    program = capture(lambda x: x.sin() + x.sin() + x.sin(), X)
    after, _ = run(program, (CSE,), Limits(fuel=1))
    assert ops_of(after).count("sin") == 2
