"""Two constant factors or terms as one, and where they must stay two."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.passes.examples import FLOATS, INTS, NARROW, N, With
from tests.passes.helpers import check, check_declines, check_fires, specials
from tsopt import capture, compile, transform
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.rewriting.rewrite import RulePass
from tsopt.passes import ALGEBRA, CANONICALIZE, DeadCode, FoldConstants, constants

ROW, TABLE = torch.rand(7) + 0.5, torch.rand(2, 7) + 0.5


@pytest.mark.sliced(14)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("function", "literal"),
    [
        (lambda x: x * 0.5 * 0.3, 0.15),
        (lambda x: x * 2 * 3, 6.0),
        (lambda x: x / 255 * 2, 2 / 255),
        (lambda x: x * 3 / 2, 1.5),
        (lambda x: x / 3 / 5, 1 / 15),
        (lambda x: x * -1.5 * -2, 3.0),
        (lambda x: x * 0 * 2, 0.0),
    ],
)
def test_two_factors_become_one(function, literal, dtype):
    x = specials(2, 3, dtype=dtype)
    found = check_fires(constants.mul_mul, function, x, ops=["mul.Tensor"], also=[torch.randn(2, 3).to(dtype)])
    (node,) = found.after.calls()
    assert isinstance(node.args[1], float)
    assert math.isclose(node.args[1], literal)
    assert found.after.numerics == Numerics.ROUNDING


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "function",
    [
        lambda x, v, w: x * v * 2,
        lambda x, v, w: x / 3 * v,
        lambda x, v, w: x * v / w,
        lambda x, v, w: x / w * v,
        lambda x, v, w: x * w.flatten()[:7] * v,
    ],
)
def test_constant_factors_become_one(function, dtype):
    passes = (CANONICALIZE, FoldConstants(), DeadCode(), RulePass("products", (constants.mul_mul,)))
    model = With(function, ROW.to(dtype), TABLE.to(dtype))
    found = check(passes, model, torch.randn(3, 2, 7).to(dtype), ["mul.Tensor"])
    assert "mul_mul" in found.done
    assert len(found.after.weights) == 1


def test_factors_become_one_with_the_values_at_the_edge():
    check_fires(constants.mul_mul, lambda x: x * 0.5 * 0.25, specials(N), ops=["mul.Tensor"])
    check_fires(constants.mul_mul, lambda x: x * 8.0 * 2.0, specials(N), ops=["mul.Tensor"])


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_integer_factors_and_terms_become_one_where_they_wrap(dtype):
    x = INTS.to(dtype)
    check_fires(constants.mul_mul, lambda x: x * 100 * 77, x, ops=["mul.Tensor"], exact=True)
    check_fires(constants.add_add, lambda x: x + 100 - 77 + 120, x, ops=["add.Tensor"], exact=True)
    model = With(lambda x, w: x * w * 3, torch.arange(8).to(dtype) * 19)
    check_fires(constants.mul_mul, model, x, ops=["mul.Tensor"], exact=True)


@pytest.mark.parametrize(
    "function", [lambda x: (x + 0.1 + 0.2).floor(), lambda x: (x - 0.7 + 0.1) >= 3, lambda x: (1 + (x + 0.3)).long()]
)
def test_terms_stay_where_the_last_digit_of_their_sum_decides(function):
    check_declines(constants.add_add, function, torch.arange(-200, 200) / 10, constants.CUT)


@pytest.mark.parametrize(
    ("dtype", "function"),
    [
        (torch.float32, lambda x: x * 1e30 * 1e30),
        (torch.float32, lambda x: x * 1e-30 * 1e-30),
        (torch.float32, lambda x: x * 1e-20 * 1e-19),
        (torch.float32, lambda x: x / 0 * 2),
        (torch.float32, lambda x: x * math.inf * 2),
        (torch.float32, lambda x: x * math.nan * 2),
        (torch.float16, lambda x: x * 300.0 * 300.0),
        (torch.float16, lambda x: x * 0.005 * 0.005),
    ],
)
def test_factors_stay_where_one_would_be_no_normal_number(dtype, function):
    check_declines(constants.mul_mul, function, specials(N, dtype=dtype), constants.OUT_OF_RANGE)


@pytest.mark.parametrize(
    ("dtype", "function"),
    [
        (torch.float32, lambda x: x * 1e10 * 1e-10),
        (torch.float32, lambda x: x / 1e-10 * 1e-5),
        (torch.float16, lambda x: x * 8 * 0.25),
        (torch.float64, lambda x: x * 1e100 * 0.5),
    ],
)
def test_factors_stay_where_the_first_may_overflow(dtype, function):
    check_declines(constants.mul_mul, function, specials(N, dtype=dtype), constants.OVERFLOWS)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x / 60 / 60).floor(),
        lambda x: (x * 24 / 7).ceil(),
        lambda x: (x / 7 * 24).int(),
        lambda x: (1 - x * 3 / 41) > 0,
        lambda x: torch.div(x / 41 * 2, 2, rounding_mode="floor"),
        lambda x: torch.div(x * 7 / 6, 17, rounding_mode="floor"),
        lambda x: F.pad(x / 41 * 2, (1, 1)).floor(),
        lambda x: (x / 41 * 2).reshape(2, -1).max(-1).values.floor(),
        lambda x: F.hardshrink(x / 41 * 2, 1.9999999),
        lambda x: (x * 13 * 0.1).floor(),
        lambda x: (x * 3 * 5).ceil(),
        lambda x: x * 0.1 * 3 == 9,
        lambda x: torch.zeros(400, dtype=torch.int64).copy_(x / 41 * 2),
    ],
)
def test_factors_stay_where_a_whole_result_decides(function):
    check_declines(constants.mul_mul, function, torch.arange(-200, 200) * 60.0, constants.CUT)


@pytest.mark.parametrize(
    ("function", "multiple"),
    [
        (lambda x: torch.div(x / 41 * 2, 2, rounding_mode="floor"), 41.0),
        (lambda x: torch.div(x * 7 / 6, 17, rounding_mode="floor"), 102.0),
        (lambda x: F.pad(x / 41 * 2, (1, 1)).floor(), 41.0),
        (lambda x: (x / 41 * 2).max(-1).values.floor(), 41.0),
        (lambda x: F.interpolate((x / 41 * 2)[None], scale_factor=2).floor(), 41.0),
        (lambda x: (x * 13 * 0.1).floor(), 90.0),
        (lambda x: (x * 3 * 0.1).ceil(), 50.0),
        (lambda x: (x * 3 * 5).floor(), 25 / 3),
        (lambda x: torch.zeros(1, 3, dtype=torch.int64).copy_(x / 41 * 2), 41.0),
        (lambda x: torch.zeros(1, 3, dtype=torch.int64).fill_((x / 41 * 2).max()), 41.0),
        (lambda x: (x / 41 * 2).sum(-1, dtype=torch.int64), 41.0),
        (lambda x: ((x / 41 * 2).view(torch.int32) >> 23) - 127, 41.0),
        (lambda x: torch.special.round(x / 41 * 2), 71.75),
        (lambda x: torch.frexp(x / 41 * 2).exponent, 41.0),
        (lambda x: torch.histogram(x / 41 * 2, torch.tensor([0.0, 2.0, 4.0]))[0], 41.0),
        (lambda x: (torch.ones(2, 3) * (x / 41 * 2).max().item()).floor(), 41.0),
    ],
)
def test_a_whole_result_stays_one(function, multiple):
    x = torch.full((1, 3), multiple)
    assert torch.equal(transform(capture(function, x)).module()(x)[0], function(x))


@pytest.mark.parametrize("factors", [lambda x: x / 4 * 3, lambda x: x * 2 * 3, lambda x: x * 0.1 * 0.5])
def test_factors_of_which_one_is_not_rounded_become_one_before_any_call(factors):
    x = torch.arange(-80.0, 80) / 7
    check_fires(constants.mul_mul, lambda x: factors(x).floor(), x, ops=["mul.Tensor", "floor"], exact=True)


class Kept(nn.Module):
    """Rounds what it has kept of the call before."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.ones(1))

    def forward(self, x):
        found = self.last.floor()
        self.last.copy_(x / 41 * 2)
        return found


def test_what_is_rounded_in_the_next_call_stays_whole():
    run = compile(transform(capture(Kept(), torch.ones(1))), "eager")
    assert [run(torch.tensor([41.0])).item() for _ in range(2)] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("item", "x", "function"),
    [
        (constants.mul_mul, INTS, lambda x: x * 2 * 0.5),
        (constants.mul_mul, INTS, lambda x: x / 3 * 0.5),
        (constants.mul_mul, torch.tensor([True]), lambda x: x * 2 * 3),
        (constants.add_add, INTS, lambda x: x + 2 + 0.5),
        (constants.add_add, torch.tensor([True]), lambda x: x + 2 + 3),
    ],
)
def test_constants_that_promote_stay(item, x, function):
    check_declines(item, function, x, constants.PROMOTES)


def test_constants_that_widen_the_shape_stay():
    model = With(lambda x, v, w: x * v * w, ROW, TABLE)
    check_declines(constants.mul_mul, model, torch.randn(1, 1), constants.PROMOTES)


@pytest.mark.parametrize(
    ("item", "function"),
    [
        (constants.mul_mul, lambda x, v, w: x * w[0] * w.t()[0].reshape(2, 1)),  # a row and a column
        (constants.mul_mul, lambda x, v, w: (x + v) * w),
        (constants.mul_mul, lambda x, v, w: x * v.double() * 2.0 if x.dtype == torch.float64 else x * x * v),
        (constants.mul_mul, lambda x, v, w: (x % 2) * v),
        (constants.mul_mul, lambda x, v, w: x * v * x.neg()),
        (constants.mul_mul, lambda x, v, w: x / x.exp() * v),
        (constants.add_add, lambda x, v, w: x * v + w),
        (constants.add_add, lambda x, v, w: torch.add(x + v, w, alpha=2)),
        (constants.add_add, lambda x, v, w: 1 - (x + v)),
        (constants.add_add, lambda x, v, w: x + x + v),
        (constants.add_add, lambda x, v, w: x + v + x.neg()),
    ],
)
def test_other_constants_stay(item, function):
    passes = (FoldConstants(), RulePass("pairs", (item,)))
    found = check(passes, With(function, ROW, TABLE), torch.randn(2, 7))
    assert item.name not in found.done


@pytest.mark.parametrize("function", [lambda x, m: x * m * 2.0, lambda x, m: x * 2.0 * m])
def test_a_mask_that_is_a_factor_stays_a_mask(function):
    """It would be a table of floats, of four times the size."""
    check_declines(constants.mul_mul, With(function, torch.arange(N) > 3), specials(2, N))


def test_large_constants_stay_two():
    """The merged one would be a second table, where others use the first."""
    x, table = torch.ones(1, 1), torch.rand(1, constants.LARGEST + 1)
    check_declines(constants.add_add, With(lambda x, w: x.expand(w.shape) + w + 1, table), x)
    check_fires(constants.add_add, With(lambda x, w: x.expand(w.shape) + w + 1, table[:, 1:].clone()), x)


def test_a_constant_used_elsewhere_is_merged_all_the_same():
    model = With(lambda x, v, w: (x * v * 2) + v, ROW, TABLE)
    check_fires(constants.mul_mul, model, torch.randn(2, 7), ops=["mul.Tensor", "add.Tensor"])


def test_complex_and_boolean_constants_stay():
    check_declines(constants.mul_mul, lambda x: x * 2.0 * 3.0, torch.tensor([1 + 2j]))
    model = With(lambda x, v, w: x * v * w, torch.tensor([True]), torch.tensor([False]))
    check_declines(constants.mul_mul, model, torch.tensor([True, False]))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("function", "literal"),
    [
        (lambda x: x + 2 + 0.5, 2.5),
        (lambda x: x - 2 + 0.5, -1.5),
        (lambda x: x + 2 - 0.5, 1.5),
        (lambda x: x - 2 - 0.5, -2.5),
        (lambda x: x + 2.0 - 2.0, 0.0),
    ],
)
def test_two_terms_become_one(function, literal, dtype):
    x = specials(2, 3, dtype=dtype)
    found = check_fires(constants.add_add, function, x, ops=["add.Tensor"], also=[torch.randn(2, 3).to(dtype)])
    (node,) = found.after.calls()
    assert node.args[1] == literal


@pytest.mark.parametrize("function", [lambda x, v, w: x + w + v, lambda x, v, w: x - v - w, lambda x, v, w: x + 1 - w])
def test_constant_terms_become_one(function):
    """The tables of positions and of token types, added one after the other."""
    model = With(function, ROW, TABLE)
    found = check_fires(constants.add_add, model, torch.randn(3, 2, 7), ops=["add.Tensor"])
    assert len(found.after.weights) == 1


@pytest.mark.parametrize(
    ("dtype", "function"),
    [
        (torch.float32, lambda x: x + 12582912.0 - 12582912.0),
        (torch.float32, lambda x: x + math.inf - 1),
        (torch.float32, lambda x: x + 1 + math.nan),
        (torch.bfloat16, lambda x: x + 128 - 128),
        (torch.float16, lambda x: x + 1024.0 - 1024.0),
    ],
)
def test_a_term_that_rounds_on_purpose_stays(dtype, function):
    x = torch.tensor([0.3, 1.7, -2.5, 100.0]).to(dtype)
    check_declines(constants.add_add, function, x, constants.ABSORBS)


def test_long_chains_become_one():
    check(
        ALGEBRA,
        lambda x: (x * 2 / 3 * 4 + 1 - 2 + 3) * 0.5 * 3,
        torch.randn(2, 3),
        ["mul.Tensor", "add.Tensor", "mul.Tensor"],
    )
