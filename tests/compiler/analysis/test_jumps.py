"""Which quotients by constants decide what a later call returns."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsopt
from tsopt.compiler.analysis.jumps import is_cut, is_decision, is_power_of_two, quotients

X, ROW = torch.ones(3), torch.tensor([7.0, 8.0, 41.0])


class Divisor(nn.Module):
    def __init__(self, then):
        super().__init__()
        self.then = then
        self.register_buffer("row", ROW.clone())

    def forward(self, x):
        return self.then(x, self.row[None])


def cut(model, x=X):
    program = tsopt.capture(model, x)
    return [float(torch.as_tensor(q.divisor).max()) for q in quotients(program) if is_cut(program, q.node)]


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
        (lambda x: torch.div(x / 41 * 2, 2, rounding_mode="floor"), 41.0),
        (lambda x: torch.div(x / 41, x, rounding_mode="trunc"), 41.0),
        (lambda x: F.threshold(x / 7, 3.0, 0.0), 7.0),
        (lambda x: F.hardshrink(x / 7, 3.0), 7.0),
        (lambda x: F.grid_sample(x.expand(1, 1, 3, 3), (x[:2] / 7).expand(1, 2, 2, 2), mode="nearest"), 7.0),
        (lambda x: torch.isin(x / 7, ROW), 7.0),
        (lambda x: torch.logical_not(x / 7 - 3), 7.0),
        (lambda x: torch.zeros(3, dtype=torch.int64).copy_(x / 7), 7.0),
        (lambda x: torch.zeros(3, dtype=torch.int64).fill_((x / 7).max()), 7.0),
        (lambda x: (x / 7).sum(dtype=torch.int64), 7.0),
        (lambda x: (x / 7).view(torch.int32), 7.0),
        (lambda x: (x / 7).view(torch.bfloat16), 7.0),
        (lambda x: torch.special.round(x / 7), 7.0),
        (lambda x: torch.frexp(x / 7).exponent, 7.0),
        (lambda x: torch.histogram(x / 7, ROW)[0], 7.0),
        (lambda x: (ROW * (x / 7).max().item()).floor(), 7.0),
    ],
)
def test_a_quotient_is_followed_to_where_its_last_digit_decides(model, divisor):
    assert cut(model) == [pytest.approx(divisor)]


PLACES = torch.tensor([[0, 1, 2, 0]])
MOVES = {
    "pad": lambda x: F.pad(x, (1, 1)),
    "reflection": lambda x: F.pad(x, (1, 1), mode="reflect"),
    "max": lambda x: x.max(-1).values,
    "largest": lambda x: x.max(),
    "sort": lambda x: x.sort().values,
    "topk": lambda x: x.topk(2).values,
    "median": lambda x: x.median(),
    "kthvalue": lambda x: x.kthvalue(2).values,
    "cummax": lambda x: x.cummax(-1).values,
    "tril": lambda x: x.tril(),
    "scatter": lambda x: torch.zeros(1, 4).scatter(1, PLACES, x),
    "index_put": lambda x: torch.zeros(1, 4).index_put((torch.tensor([0]),), x),
    "nearest": lambda x: F.interpolate(x[None], scale_factor=2),
    "shuffle": lambda x: F.pixel_shuffle(x.reshape(4, 1, 1), 2),
    "mean": lambda x: x.mean(-1),
    "average": lambda x: F.avg_pool1d(x, 2),
    "prod": lambda x: x.prod(),
    "bilinear": lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
    "window": lambda x: F.unfold(x[None, None], (1, 2)),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_a_quotient_is_followed_through_what_moves_chooses_and_adds_numbers(move):
    assert cut(lambda x: move(x / 7).floor(), torch.ones(1, 4)) == [7.0]


@pytest.mark.parametrize(
    ("within", "after"),
    [
        (lambda x: x.floor(), lambda x: x + 1),
        (lambda x: (x > 3).float(), lambda x: x + 1),
        (lambda x: x + 1, lambda x: x.floor()),
    ],
)
def test_a_quotient_is_followed_into_branches_and_out_of_them(within, after):
    def model(x, y):
        return after(torch.cond(y.sum() > 0, within, lambda x: x * 2, (x / 7,)))

    assert cut(model, (X, X)) == [7.0]


@torch.library.custom_op("tests_jumps::cutting", mutates_args=())
def cutting(x: torch.Tensor) -> torch.Tensor:
    return x.floor()


@cutting.register_fake
def _(x):
    return torch.empty_like(x)


class Kept(nn.Module):
    """Reads what it has kept of the call before, or of the one before that."""

    def __init__(self, read):
        super().__init__()
        self.read = read
        self.register_buffer("last", X.clone())
        self.register_buffer("before", X.clone())

    def forward(self, x):
        found = self.read(self.before)
        self.before.copy_(self.last * 2)
        self.last.copy_(x / 7)
        return found


def test_a_quotient_is_followed_into_later_calls():
    assert cut(Kept(lambda before: before.floor())) == [7.0]
    assert not cut(Kept(lambda before: before + 1))


def test_a_quotient_is_followed_through_an_input_that_is_written():
    def model(x, last):
        found = last.floor()
        last.copy_(x / 7)
        return found

    assert cut(model, (X, X.clone())) == [7.0]


@pytest.mark.parametrize(
    "call", [torch.frexp, lambda x: x.view(torch.int32), lambda x: torch.zeros(3, dtype=torch.int64).copy_(x)]
)
def test_where_it_is_not_known_where_a_result_jumps_rounding_excuses_nothing(call):
    assert not any(map(is_decision, tsopt.capture(lambda x: call(x / 7), X).calls()))


def test_a_call_that_is_not_known_may_round():
    assert cut(lambda x: cutting(x / 7)) == [7.0]


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
        lambda x: F.conv1d((x / 7).reshape(1, 1, 3), ROW.reshape(1, 1, 3)).round(),
        lambda x: F.layer_norm(x / 7, (3,)).floor(),
        lambda x: F.pad(x / 7, (1, 1)).sort().values,
        lambda x: (x / 7).argmax() == 3,
        lambda x: (x / 7).sort().indices + (x / 7).isnan(),
        lambda x: torch.zeros_like(x / 7, dtype=torch.int64) + (x / 7).shape[0],
        lambda x: torch.zeros(3).copy_(x / 7),
        lambda x: F.grid_sample((x / 7).expand(1, 1, 3, 3), x[:2].expand(1, 2, 2, 2)),
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
