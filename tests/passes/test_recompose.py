"""User-written GELUs as one op."""

from __future__ import annotations

import math

import pytest
import torch

from tests.passes.helpers import check, check_declines, check_fires
from tsopt.compiler.rewrite import USED_ELSEWHERE
from tsopt.passes import STANDARD, recompose

K = math.sqrt(2 / math.pi)
X = torch.linspace(-4, 4, 64).reshape(8, 8)

TANH = {
    "transformers": lambda x: 0.5 * x * (1.0 + torch.tanh(K * (x + 0.044715 * torch.pow(x, 3.0)))),
    "integer power": lambda x: 0.5 * x * (1 + torch.tanh(K * (x + 0.044715 * x**3))),
    "product": lambda x: 0.5 * x * (1 + torch.tanh(K * (x + 0.044715 * (x * x * x)))),
    "half last": lambda x: x * (1 + torch.tanh(K * (x + 0.044715 * x**3))) * 0.5,
    "sum first": lambda x: (1 + torch.tanh(K * (x + 0.044715 * x**3))) * (x * 0.5),
}
ERF = {
    "divided": (recompose.gelu_erf_div, lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))),
    "multiplied": (recompose.gelu_erf_mul, lambda x: x * 0.5 * (1.0 + torch.erf(x * math.sqrt(0.5)))),
}


@pytest.mark.parametrize("form", TANH)
def test_the_tanh_form_is_one_op(form):
    found = check_fires(recompose.gelu_tanh, TANH[form], X, ops=["gelu"])
    assert "approximate='tanh'" in found.after.text


@pytest.mark.parametrize("form", ERF)
def test_the_erf_form_is_one_op(form):
    rule, model = ERF[form]
    found = check_fires(rule, model, X, ops=["gelu"])
    assert "tanh" not in found.after.text


@pytest.mark.parametrize(
    ("half", "one", "k", "c"),
    [(0.4, 1.0, K, 0.044715), (0.5, 2.0, K, 0.044715), (0.5, 1.0, 0.8, 0.044715), (0.5, 1.0, K, 0.0447)],
)
def test_other_constants_are_another_function(half, one, k, c):
    def model(x):
        return half * x * (one + torch.tanh(k * (x + c * x**3)))

    check_declines(recompose.gelu_tanh, model, X, recompose.OTHER_CONSTANTS)


def test_the_constants_of_the_two_erf_forms_are_not_exchanged():
    check_declines(
        recompose.gelu_erf_div,
        lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(0.5))),
        X,
        recompose.OTHER_CONSTANTS,
    )
    check_declines(
        recompose.gelu_erf_mul,
        lambda x: x * 0.5 * (1.0 + torch.erf(x * math.sqrt(2.0))),
        X,
        recompose.OTHER_CONSTANTS,
    )


def test_another_value_inside_is_no_gelu():
    check_declines(recompose.gelu_tanh, lambda x: 0.5 * x * (1 + torch.tanh(K * (x + 0.044715 * x.abs() ** 3))), X)


def test_a_tanh_that_is_returned_too_stays():
    def model(x):
        t = torch.tanh(K * (x + 0.044715 * x**3))
        return 0.5 * x * (1 + t), t

    check_declines(recompose.gelu_tanh, model, X, USED_ELSEWHERE)


def test_it_comes_before_the_powers_are_taken_apart():
    found = check(STANDARD, TANH["transformers"], X)
    assert found.ops == ["gelu"]
