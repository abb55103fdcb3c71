"""Which quotients by constants decide what a later call returns."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsopt
from tsopt.compiler.analysis.jumps import is_cut, is_power_of_two, quotients

X, ROW = torch.ones(3), torch.tensor([7.0, 8.0, 41.0])


class Divisor(nn.Module):
    def __init__(self, then):
        super().__init__()
        self.then = then
        self.register_buffer("row", ROW.clone())

    def forward(self, x):
        return self.then(x, self.row[None])


def cut(model, x=X):
    return [float(torch.as_tensor(q.divisor).max()) for q in quotients(tsopt.capture(model, x)) if is_cut(q.node)]


@pytest.mark.parametrize(
    ("model", "divisor"),
    [
        (lambda x: (x / 7).ceil(), 7.0),
        (lambda x: (x / 7).int(), 7.0),
        (lambda x: (x / 7) == 3, 7.0),
        (lambda x: (x / 7) >= x, 7.0),
        (lambda x: x.round() + (x / -0.3).bool(), -0.3),
        (lambda x: (1 - (x / 7).reshape(1, 3) * 4).clamp(0, 9).sum().floor(), 7.0),
        (lambda x: torch.where(x > 0, x / 7, x).amax().trunc() + 1, 7.0),
        (lambda x: torch.true_divide(x, 60).floor(), 60.0),
        (lambda x: torch.bucketize(x / 7, ROW), 7.0),
        (lambda x: torch.fake_quantize_per_tensor_affine(x / 7, 1.0, 0, 0, 255), 7.0),
        (lambda x: torch.addcdiv(x, x, ROW).ceil(), 41.0),
        (Divisor(lambda x, row: (x / row).ceil()), 41.0),
    ],
)
def test_a_quotient_is_followed_to_where_its_last_digit_decides(model, divisor):
    assert cut(model) == [pytest.approx(divisor)]


def test_so_is_one_of_whole_numbers():
    assert cut(lambda x: (x / 60).ceil(), torch.arange(3)) == [60.0]


@pytest.mark.parametrize(
    "model",
    [
        lambda x: (x / 8).ceil() + (x / -0.25).int(),
        lambda x: x / 7,
        lambda x: (x / x).ceil(),
        lambda x: (x / 7).softmax(0) > 0.5,
        lambda x: F.linear(x / 7, ROW[None]).ceil(),
        lambda x: (x / 7, x.ceil()),
        lambda x: torch.div(x, 7, rounding_mode="floor").int(),
        lambda x: (x * 7).ceil(),
        Divisor(lambda x, row: (x / (row * 0 + 4)).ceil()),
    ],
)
def test_others_are_not(model):
    assert not cut(tsopt.transform(tsopt.capture(model, X)).module())


def test_only_inverses_of_powers_of_two_are_exact():
    assert all(map(is_power_of_two, (1, 2.0**-140, -4, torch.tensor([0.5, -8.0]))))
    assert not any(map(is_power_of_two, (0, 3, 0.1, torch.tensor([0.5, 0.6]))))
