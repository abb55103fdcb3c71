"""Intervals of whole numbers: what each rule says holds for what torch computes, and is no wider than it must be."""

from __future__ import annotations

import math

import pytest
import torch

import tsopt
from tsopt.compiler.analysis.intervals import ANY, Range, of_dtype, range_of_tensor
from tsopt.compiler.analysis.ranges import ranges_of, recorded

LOW, HIGH = -6, 9
X = torch.arange(LOW, HIGH + 1).reshape(4, 4)


def found(model, *inputs: Range, example=None) -> Range:
    """The range of the only output."""
    args = example or tuple(X.clone() for _ in inputs)
    program = tsopt.capture(model, args)
    (output,) = program.outputs
    return ranges_of(program, recorded(program), inputs)[output]


CASES = [
    (lambda x: x + 5, -1, 14),
    (lambda x: x - 5, -11, 4),
    (lambda x: torch.add(x, 2, alpha=3), 0, 15),
    (lambda x: 3 - x, -6, 9),
    (lambda x: x * -2, -18, 12),
    (lambda x: -x, -9, 6),
    (lambda x: abs(x), 0, 9),
    (lambda x: x // 4, -2, 3),
    (lambda x: x % 7, 0, 6),
    (lambda x: x % -7, -6, 0),
    (lambda x: torch.fmod(x, 4), -3, 3),
    (lambda x: x.clamp(-2, 3), -2, 3),
    (lambda x: x.clamp(min=0), 0, 9),
    (lambda x: x.relu(), 0, 9),
    (lambda x: x.sign(), -1, 1),
    (lambda x: x.sum(), -96, 144),
    (lambda x: x.sum(1), -24, 36),
    (lambda x: x.cumsum(0), -24, 36),
    (lambda x: x.amax(1), -6, 9),
    (lambda x: x.argmax(1), 0, 3),
    (lambda x: x.argmax(), 0, 15),
    (lambda x: x.max(1)[0], -6, 9),
    (lambda x: x.max(1)[1], 0, 3),
    (lambda x: x.sort(1)[1], 0, 3),
    (lambda x: torch.maximum(x, x.flip(0)), -6, 9),
    (lambda x: torch.where(x > 2, x, 100), -6, 100),
    (lambda x: x.masked_fill(x > 2, -50), -50, 9),
    (lambda x: torch.cat([x, x * 2]), -12, 18),
    (lambda x: ~x, -10, 5),
    (lambda x: x << 2, -24, 36),
    (lambda x: x >> 1, -3, 4),
    (lambda x: x.clamp(min=0) & 5, 0, 15),
    (lambda x: x**2, 0, 81),
    (lambda x: x > 3, 0, 1),
    (lambda x: x.diff(dim=1), -15, 15),
    (lambda x: x.diff(n=2, dim=0), -30, 30),
    (lambda x: x.diff(prepend=x[:, :1] * 2), -30, 30),
    (lambda x: torch.isin(x, x[:1]), 0, 1),
    (lambda x: torch.arange(3, 10, 3), 3, 9),
    (lambda x: torch.arange(4, -4, -3), -2, 4),
    (lambda x: torch.arange(0.5, 3, dtype=torch.int64), 0, 3),
    (lambda x: (x > 3).long().cumsum(1), 0, 4),
    (lambda x: x.t()[1:].reshape(-1), -6, 9),
    (lambda x: torch.zeros_like(x), 0, 0),
    (lambda x: torch.full_like(x, 7), 7, 7),
    (lambda x: x.float().long(), -6, 9),
    (lambda x: (x.float() / 4).floor().long(), -2, 3),
    (lambda x: x.clamp(1, 8).float().log().long(), 0, 3),
    (lambda x: torch.nn.functional.one_hot(x.clamp(0, 3), 4), 0, 1),
    (lambda x: torch.scatter(x, 0, x.clamp(0, 3), 30), -6, 30),
    (lambda x: torch.nn.functional.pad(x, (1, 1), value=20), -6, 20),
]


@pytest.fixture(scope="module")
def all_found() -> list[Range]:
    """The ranges of all cases: they are one program, because capture takes longer than all that is asked of it."""
    program = tsopt.capture(lambda x: tuple(case[0](x) for case in CASES), (X,))
    ranges = ranges_of(program, recorded(program), [Range(LOW, HIGH)])
    leaves = [ranges[node] for node in program.outputs]
    assert len(leaves) == len(CASES)
    return leaves


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_range_holds_what_torch_computes_and_is_no_wider(number, all_found):
    (model, low, high), made = CASES[number], all_found[number]
    real = model(X)
    assert made.low <= int(real.min())
    assert int(real.max()) <= made.high
    assert low - 1 <= made.low <= low
    assert high <= made.high <= high + 1


@pytest.mark.parametrize(
    "model",
    [lambda x, y: x @ y, lambda x, y: x // y, lambda x, y: x.scatter_add(0, y.clamp(0, 3), x)],
)
def test_of_what_is_not_known_nothing_is_said(model):
    assert found(model, Range(0, 3), Range(0, 3), example=(X, X.abs() + 1)) == ANY


def test_bits_of_negative_numbers_are_as_many_as_of_the_larger_one():
    assert found(lambda x, y: x ^ -y, Range(0, 3), Range(0, 3), example=(X, X)) == Range(-4, 3)
    assert found(lambda x, y: x & y, Range(-9, 3), Range(0, 100), example=(X, X)) == Range(-128, 127)


def test_a_float_is_anything_unless_it_was_a_whole_number():
    assert found(lambda x: x.long(), ANY, example=(torch.ones(2),)) == ANY
    assert found(lambda x: x + 1, ANY, example=(torch.ones(2),)) == ANY


def test_a_float_beside_a_large_whole_number_is_within():
    made = found(lambda x: x.float().long(), Range(0, 2**31 - 1))
    assert made.high >= int(torch.tensor(2**31 - 1).float().long())


def test_overflow_is_seen_and_what_follows_may_be_anything():
    assert found(lambda x: x + x, Range(0, 200), example=(X.to(torch.uint8),)).high == 400
    assert found(lambda x: (x + x) + 0, Range(0, 200), example=(X.to(torch.uint8),)) == of_dtype(torch.uint8)


def test_a_weight_has_the_range_of_its_values():
    assert range_of_tensor(torch.tensor([3, -4])) == Range(-4, 3)
    assert range_of_tensor(torch.tensor(2.5)) == Range(2.5, 2.5)
    assert range_of_tensor(torch.ones(0, dtype=torch.int8)) == Range(-128, 127)
    assert range_of_tensor(torch.tensor(math.nan)) == ANY
