"""Integers made of numbers behind which rounding may have made another decision."""

from __future__ import annotations

import pytest
import torch

import tsopt
from tsopt.runtime.checking.accuracy import Oracle

ROWS = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0))
WEIGHTS = [torch.randn(8, 8, generator=torch.Generator().manual_seed(number)) for number in (1, 2)]
NEAR_A_HALF = torch.tensor([0.1, 0.2, 0.5 - 1e-7, 0.5, 0.5 + 1e-7, 0.9]) / 3


def judged(model, other, *example):
    return Oracle(model, tsopt.example(*example), tsopt.capture(model, example)).judge(other)


@torch.library.custom_op("tests_other_decisions::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5


halved.register_fake(torch.empty_like)

# What comes before a sigmoid that is rounded to 0 or 1; no decision is close on these rows.
BEFORE = {
    "the largest of several": lambda y: y.max(1).values,
    "the largest few": lambda y: y.topk(2, 1).values.sum(1),
    "a place": lambda y: y.flatten(1).argmax(1).to(y.dtype)[:, None] - 11.3,
    "a comparison": lambda y: torch.where(y > 0, y, y * 0.1).sum(1),
    "steps": lambda y: (y * 10 + 0.3).floor().sum(1) / 7,
    "an op that is not known": lambda y: halved(y).sum(1),
}


@pytest.mark.parametrize("name", BEFORE)
def test_a_decision_that_is_not_close_excuses_no_other_class(name):
    def model(x, dtype=torch.float32):
        y = BEFORE[name](x.to(dtype) @ WEIGHTS[0].to(dtype))
        return torch.sigmoid(y @ WEIGHTS[1][: y.shape[-1]].to(dtype)).round().long()

    assert judged(model, lambda x: model(x, torch.float64), ROWS).ok
    assert not judged(model, lambda x: torch.zeros_like(model(x)), ROWS).ok
    assert not judged(model, lambda x: 1 - model(x), ROWS).ok


def test_another_way_to_round_is_not_excused_by_a_comparison_before():
    def model(x, cut=torch.round):
        h = x @ WEIGHTS[0]
        return cut(torch.where(h > 0, h, h * 0.1).sigmoid() * 255.0).to(torch.uint8)

    assert judged(model, model, ROWS).ok
    assert not judged(model, lambda x: model(x, torch.trunc), ROWS).ok


# Of a comparison that is within rounding on some pixels: a number, and what no decision makes of it.
PIXELS = {
    "a cast and a product": (lambda y, t: ((y > t).float() * 255).to(torch.uint8), 128),
    "a product of a cast integer": (lambda y, t: (y > t).long() * 255, 128),
    "a product of a boolean": (lambda y, t: (y > t) * 255, 254),
    "a difference": (lambda y, t: ((y > t).float() * 2 - 1).to(torch.int8), 0),
    "a sum": (lambda y, t: ((y > t).float() * 2 + (y > 0.3).float() * 8).to(torch.uint8), 9),
    "a choice of floats": (lambda y, t: torch.where(y > t, 200.0, 10.0).round().to(torch.uint8), 100),
    "a choice of numbers": (lambda y, t: torch.where(y > t, y * 70, y).round().to(torch.uint8), 20),
    "an exclusive or": (lambda y, t: ((y > t) ^ (y > 0.3)).int() * 3, 2),
    "another comparison": (lambda y, t: (torch.where(y > t, y + 3, y) > 3).int(), 2),
}


@pytest.mark.parametrize("name", PIXELS)
def test_what_is_computed_of_a_decision_may_be_what_the_other_one_gives(name):
    made, third = PIXELS[name]
    model = lambda x: made(x * 3, 0.5)  # noqa: E731
    close = (NEAR_A_HALF * 3 - 0.5).abs() < 1e-5
    assert judged(model, lambda x: made(x.double() * 3, 0.5 - 1e-5), NEAR_A_HALF).test == "decision"
    assert not judged(model, lambda x: made(x * 3, 0.3), NEAR_A_HALF * 0.8).ok

    def wrong_at(places):
        return lambda x: model(x).masked_fill(places, third) if x.equal(NEAR_A_HALF) else model(x)

    assert not judged(model, wrong_at(close), NEAR_A_HALF).ok
    assert not judged(model, wrong_at(~close), NEAR_A_HALF).ok


STEPS = torch.tensor([1.0, 2.0 - 1e-7, 2.0, 2.0 + 1e-7, 2.7, 7.0])


def tripled(x, more=0.0):
    """Three times a number, and a little more where that is rounded."""
    product = x.double() * 3
    return torch.where(product == x * 3, product, product + more)


@pytest.mark.parametrize("cut", [torch.floor, torch.ceil, torch.trunc, torch.round])
def test_a_step_before_may_be_the_next_one_and_nothing_between(cut):
    x = (STEPS + (0.5 if cut is torch.round else 0.0)) / 3
    model = lambda x: (cut(x * 3) * 10 + 1).to(torch.int32)  # noqa: E731
    for more in (-1e-6, 1e-6):
        assert judged(model, lambda x, more=more: (cut(tripled(x, more)) * 10 + 1).to(torch.int32), x).ok
    assert not judged(model, lambda x: model(x) + 1, x).ok
    assert not judged(model, lambda x: model(x) + 20, x).ok


def test_places_that_are_tied_within_rounding_may_be_exchanged():
    table = torch.tensor([10.0, 20.0, 30.0, 40.0])
    model = lambda x: (table[(x * 3).argmax(1)] * 2).to(torch.int32)  # noqa: E731
    tied, clear = torch.tensor([[0.1, 0.7, 0.7 + 1e-7, 0.3]]), torch.tensor([[0.1, 0.7, 0.9, 0.3]])
    second = lambda x: (table[(x * 3).topk(2, 1).indices[:, 1]] * 2).to(torch.int32)  # noqa: E731
    first_if = lambda tied: lambda x: second(x) if x.equal(tied) else model(x)  # noqa: E731
    assert judged(model, first_if(tied), tied).test == "decision"
    assert not judged(model, first_if(clear), clear).ok


def test_a_decision_that_float64_makes_otherwise_is_not_taken_for_rounding():
    x = torch.cat([NEAR_A_HALF, torch.rand(58, generator=torch.Generator().manual_seed(0))])
    assert bool(((x * 3 > 0.5) != (x.double() * 3 > 0.5)).any())
    model = lambda x: (torch.where(x * 3 > 0.5, 200.0, 10.0) + x * 5).to(torch.uint8)  # noqa: E731
    assert judged(model, lambda x: (torch.where(x.double() * 3 > 0.5, 200.0, 10.0) + x * 5).to(torch.uint8), x).ok
    for wrong in (lambda y: torch.zeros_like(y), lambda y: y.clamp(max=190), lambda y: 255 - y):
        assert not judged(model, lambda y, wrong=wrong: wrong(model(y)) if y.equal(x) else model(y), x).ok


@pytest.mark.parametrize("cut", [lambda y: y.fmod(0.7), lambda y: y.remainder(0.7)])
def test_of_numbers_so_large_that_rounding_leaves_no_digit_any_remainder_may_be_right(cut):
    model = lambda x, w=WEIGHTS[0]: (cut(x.to(w.dtype) @ w) * 9).to(torch.int32)  # noqa: E731
    large = ROWS[0] * 1e7
    assert judged(model, lambda x: model(x, WEIGHTS[0].double()), large).test == "decision"
    assert not judged(model, lambda x: model(x) + 20, large).ok


# Several decisions are close, of which float64 makes one otherwise.
SEVERAL = torch.cat([torch.linspace(0.49999, 0.499999, 20), torch.tensor([0.5, 0.9])]) / 3


def area(y):
    return (y * 3 > 0.5).float().sum(-1, keepdim=True).to(torch.int32)


def best(y):
    steps = (y * 3 * 10000).round()
    return torch.stack([steps.sum(-1), steps[..., -2:].sum(-1) * 10 + 0.5]).argmax(0)


def test_of_decisions_that_are_added_up_only_some_may_be_made_otherwise():
    assert judged(area, lambda x: area(x.double()), SEVERAL).ok
    assert not judged(area, lambda x: area(x) + 50, SEVERAL).ok
    assert judged(best, lambda x: best(x.double()), SEVERAL).ok


def test_a_step_follows_from_another_step_before_it():
    def model(x):
        return ((x * 3).round() * 0.7).round().mul(10).add(1).to(torch.int32)

    assert judged(model, lambda x: model(x.double()), NEAR_A_HALF).ok
    assert not judged(model, lambda x: model(x.double()).clamp(max=5), NEAR_A_HALF).ok
