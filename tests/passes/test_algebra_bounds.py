"""Absolute values, `relu` and `clamp` of what is bounded already, and the bounds that must stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.passes.examples import FLOATS, INTS, N
from tests.passes.helpers import check, check_declines, check_fires, specials
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.rewriting.rewrite import NEW_ALIAS
from tsopt.passes import algebra

POSITIVE = {
    "abs": torch.abs,
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: x.softmax(-1),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("outer", [torch.relu, torch.abs])
@pytest.mark.parametrize("inner", POSITIVE)
def test_what_is_positive_already_stays_as_it_is(inner, outer, dtype):
    x = specials(3, N, dtype=dtype)
    found = check_fires(algebra.positive_already, lambda x: outer(POSITIVE[inner](x)) + 1, x, exact=True)
    assert len(found.ops) == 2


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("op", [torch.relu, torch.abs])
def test_relu_relu_becomes_one(op, dtype):
    x = specials(N, dtype=dtype) if dtype.is_floating_point else INTS.to(dtype)
    check_fires(algebra.positive_already, lambda x: op(op(op(x))), x, ops=[op.__name__], exact=True)


def test_relu_relu_becomes_one_where_the_inner_is_used_elsewhere():
    def model(x):
        y = x.relu()
        return y.neg(), y.relu() + 1

    check_fires(algebra.positive_already, model, specials(N), ops=["relu", "neg", "add.Tensor"])


def test_relu_relu_stays_where_the_inner_is_returned():
    def model(x):
        y = x.relu()
        return y, y.relu()

    check_declines(algebra.positive_already, model, specials(N), NEW_ALIAS)


def test_abs_of_the_smallest_integer_is_negative():
    check_declines(algebra.positive_already, lambda x: x.abs().relu() + 1, INTS)


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x.relu().abs(),  # relu keeps -0.0
        lambda x: x.sqrt().relu(),
        lambda x: x.tanh().relu(),
        lambda x: x.log_softmax(-1).abs(),
        lambda x: x.neg().abs(),
    ],
)
def test_what_may_be_negative_stays(model):
    check_declines(algebra.positive_already, lambda x: model(x) + 1, specials(N))


def test_abs_of_a_complex_value_stays():
    check_declines(algebra.positive_already, lambda x: x.abs() + 1, torch.tensor([-1 + 2j]))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
def test_abs_of_relu_goes_when_rounding_is_allowed(dtype):
    x = specials(N, dtype=dtype) if dtype.is_floating_point else INTS
    check_fires(algebra.abs_relu, lambda x: x.relu().abs(), x, ops=["relu"])
    check_declines(algebra.abs_relu, lambda x: x.relu().abs(), x, level=Numerics.EXACT)


@pytest.mark.parametrize("model", [lambda x: x.abs().relu(), lambda x: F.relu6(x).abs(), lambda x: F.silu(x).abs()])
def test_other_absolute_values_stay(model):
    check_declines(algebra.abs_relu, model, specials(N))


@pytest.mark.sliced(20)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("model", "ops", "text"),
    [
        (lambda x: x.clamp(-1, 5).clamp(0, 7), ["clamp"], "0, 5)"),
        (lambda x: x.clamp(-1, 5).clamp(6, 7), ["clamp"], "6, 6)"),
        (lambda x: x.clamp(-1, 5).clamp(-3, -2), ["clamp"], "-2, -2)"),
        (lambda x: x.clamp(0.1, 0.5).clamp(-3, 2), ["clamp"], "0.1, 0.5)"),
        (lambda x: x.clamp(min=0.1).clamp(max=0.5), ["clamp"], "0.1, 0.5)"),
        (lambda x: x.clamp(min=0.1).clamp(min=0.5), ["clamp"], "0.5)"),
        (lambda x: x.clamp_min(0.1).clamp_max(0.5), ["clamp"], "0.1, 0.5)"),
        (lambda x: x.clamp_min(0.1).clamp_min(0.05), ["clamp_min"], "0.1)"),
        (lambda x: F.relu6(x).relu(), ["relu6"], ""),
        (lambda x: F.relu6(x.relu()), ["relu6"], ""),
        (lambda x: x.relu().clamp(max=6.0), ["clamp"], "0, 6.0)"),
        (lambda x: F.hardtanh(x).relu(), ["clamp"], "0, 1.0)"),
        (lambda x: F.hardtanh(F.hardtanh(x, -2, 2)), ["hardtanh"], "1.0)"),
        (lambda x: F.hardtanh(x).clamp(-2, 2), ["hardtanh"], "1.0)"),
    ],
)
def test_clamps_become_one(model, ops, text, dtype):
    found = check_fires(algebra.clamp_clamp, model, specials(2, N, dtype=dtype), ops=ops)
    assert text in found.after.text


def test_clamps_of_integers_become_one():
    check_fires(algebra.clamp_clamp, lambda x: x.clamp(-5, 7).relu(), INTS, ops=["clamp"], exact=True)


@pytest.mark.parametrize(
    ("model", "ops", "text"),
    [
        (lambda x: F.hardtanh(x).relu(), ["clamp"], "0, 1)"),
        (lambda x: F.hardtanh(x, -2.0, 5.7).relu(), ["clamp"], "0, 5)"),
        (lambda x: F.hardtanh(x, -3.9, 3.0).clamp(min=-2), ["clamp"], "-2, 3)"),
        (lambda x: F.hardtanh(x, -2.5, 5.7).clamp(-2, 5), ["hardtanh"], "-2.5, 5.7)"),
    ],
)
def test_bounds_of_hardtanh_are_integers_where_its_values_are(model, ops, text):
    found = check_fires(algebra.clamp_clamp, model, INTS, ops=ops, exact=True)
    assert text in found.after.text


def test_a_clamp_used_elsewhere_is_enough_where_it_is_the_tighter_one():
    def model(x):
        y = F.relu6(x)
        return y.neg(), y.relu() + 1

    check_fires(algebra.clamp_clamp, model, specials(N), ops=["relu6", "neg", "add.Tensor"])


def test_a_clamp_used_elsewhere_stays_before_a_tighter_one():
    def model(x):
        y = x.relu()
        return y.neg(), F.relu6(y) + 1

    check_declines(algebra.clamp_clamp, model, specials(N), algebra.SHARED)


@pytest.mark.parametrize("model", [lambda x: x.clamp(5, -1).clamp(0, 7), lambda x: x.clamp(0, 7).clamp(5, -1)])
def test_bounds_out_of_order_stay(model):
    check_declines(algebra.clamp_clamp, model, specials(N), algebra.CROSSED)


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x.clamp(-5, 3).clamp(0, 10),
        lambda x: x.clamp_min(-5).relu(),
        lambda x: x.relu().clamp_max(-1),
        lambda x: F.relu6(x).clamp(-5, 3),
    ],
    ids=["clamp", "lower end", "upper end", "relu6"],
)
def test_bounds_that_wrap_around_in_the_dtype_are_not_compared(model):
    """-5 is 251 in uint8."""
    check_declines(algebra.clamp_clamp, model, torch.tensor([0, 3, 5, 200, 251, 255], dtype=torch.uint8), algebra.WRAPS)


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x.clamp(float("nan"), 5).clamp(0, 7),
        lambda x: x.relu().neg().relu(),
        lambda x: x.clamp(torch.tensor(0.0), torch.tensor(5.0)).clamp(0, 7),
        lambda x: F.leaky_relu(x).relu(),
    ],
)
def test_other_bounds_stay(model):
    found = check(algebra.clamp_clamp, model, specials(N))
    assert found.done == set()


def test_a_clamp_that_promotes_stays():
    check_declines(algebra.clamp_clamp, lambda x: x.clamp(0, 3).clamp(0.5, 7.5), INTS)
    check_declines(algebra.clamp_clamp, lambda x: x.clamp(0.5, 3.5).clamp(0, 7), INTS)


@pytest.mark.parametrize(
    ("item", "model"),
    [
        (algebra.plus_zero, lambda x: 1 / (x + 0.0)),
        (algebra.plus_zero, lambda x: torch.atan2((x + 0).neg() * 3, -x.abs())),
        (algebra.abs_relu, lambda x: 1 / x.relu().abs()),
        (algebra.clamp_clamp, lambda x: torch.signbit(x.clamp(min=0).clamp(max=1))),
        (algebra.small_power, lambda x: 1 / x**0.5),
    ],
    ids=["quotient", "atan2", "abs", "clamp", "root"],
)
def test_what_changes_the_sign_of_zero_stays_where_it_is_read(item, model):
    check_declines(item, model, specials(N), algebra.SIGN_READ)


@pytest.mark.parametrize(
    ("item", "model", "ops"),
    [
        (
            *(algebra.small_power, lambda x: x / (x * x).sum(-1, keepdim=True) ** 0.5),
            ["mul.Tensor", "sum.dim_IntList", "sqrt", "div.Tensor"],
        ),
        (algebra.clamp_clamp, lambda x: 1 / x.abs().relu().clamp(0, 6), ["abs", "clamp", "reciprocal", "mul.Tensor"]),
        (algebra.plus_zero, lambda x: 1 / (x.exp() + 0.0), ["exp", "reciprocal", "mul.Tensor"]),
    ],
    ids=["a root", "a bound", "a sum"],
)
def test_where_no_zero_is_negative_its_sign_does_not_matter(item, model, ops):
    check_fires(item, model, specials(N), ops=ops)
