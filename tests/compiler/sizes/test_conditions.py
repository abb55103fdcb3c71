"""Conditions on sizes at all sizes of a range, and the ranges that are left."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, Max, Mod

import tsopt
from tsopt.compiler.calls.signature import Dim
from tsopt.compiler.sizes import conditions
from tsopt.compiler.sizes.conditions import fitted, holds_at
from tsopt.errors import CaptureError

pytestmark = pytest.mark.filterwarnings("ignore")
A, B = sympy.symbols("a b", integer=True, positive=True)
SIZES = np.arange(1, 40)


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (sympy.Ne(A, 7), lambda a: a != 7),
        (sympy.Ne(FloorDiv(A - 1, 2) + 1, 4), lambda a: (a - 1) // 2 + 1 != 4),
        (sympy.Eq(Mod(A, 3), 0), lambda a: a % 3 == 0),
        (sympy.Or(A < 4, sympy.And(A > 9, sympy.Not(sympy.Eq(A, 12)))), lambda a: a < 4 or (a > 9 and a != 12)),
        (Max(A, 12) < 20, lambda a: max(a, 12) < 20),
        (A**2 <= 50, lambda a: a**2 <= 50),
        (sympy.sqrt(A) > 2.5, lambda a: a**0.5 > 2.5),
        (sympy.Eq(A / 2, 3), lambda a: a / 2 == 3),
        (sympy.true, lambda a: True),
    ],
)
def test_a_condition_is_asked_for_all_sizes_at_once(condition, expected):
    found = np.broadcast_to(holds_at(condition, {A: SIZES}), SIZES.shape)
    assert found.tolist() == [expected(int(a)) for a in SIZES]


def test_a_condition_that_would_divide_by_zero_does_not_hold():
    found = holds_at(sympy.Ne(Mod(24, A - 5, evaluate=False), 3), {A: SIZES})
    assert not found[SIZES == 5].any()
    assert found[SIZES == 9].all()


def test_what_is_unknown_in_a_condition_is_no_guess():
    with pytest.raises(TypeError, match="zeta"):
        holds_at(sympy.zeta(A) > 1, {A: SIZES})


def of_grid(product, *, low=1, high=(40, 36), traced=(20, 18)):
    """A program that was traced where `h * w` is not a number, for ranges that nobody has checked."""

    def model(x):
        return x * 2 if x.shape[0] * x.shape[1] == product else x * 3

    program = tsopt.capture(model, torch.zeros(traced), dynamic={"x": {0: "h", 1: "w"}})
    dims = tuple(replace(dim, low=low, high=end) for dim, end in zip(program.signature.dims, high, strict=True))
    return program, replace(program.signature, dims=dims)


def inner(*ends):
    return [Dim(name, *end) for name, end in zip("hw", ends, strict=True)]


def test_pairs_of_sizes_that_fail_are_cut_off():
    program, signature = of_grid(1024)
    assert list(map(str, fitted(program.conditions, signature, inner((10, 20), (12, 18))))) == ["h: 1..40", "w: 1..31"]


def test_a_size_of_one_counts_where_the_condition_is_not_on_ones():
    program, signature = of_grid(32)
    found = fitted(program.conditions, signature, inner((20, 20), (18, 18)))
    rows, columns = (range(dim.low, dim.high + 1) for dim in found)
    assert not any(row * column == 32 for row in rows for column in columns)


def test_ranges_stay_whole_where_all_conditions_hold():
    program, signature = of_grid(1009)  # a prime
    assert fitted(program.conditions, signature, inner((20, 20), (18, 18))) == signature.dims


def test_sizes_of_calls_with_a_condition_between_them_are_refused():
    program, signature = of_grid(1024)
    with pytest.raises(CaptureError, match=r"(?s)decides by a size.*x\.shape\[0\].*1024.*where: .*test_conditions"):
        fitted(program.conditions, signature, inner((30, 34), (30, 34)))


def test_ranges_with_too_many_sizes_to_look_at_are_cut_alike(monkeypatch):
    monkeypatch.setattr(conditions, "MOST", 100)
    program, signature = of_grid(1009)
    found = fitted(program.conditions, signature, inner((20, 20), (18, 18)))
    assert np.prod([dim.high - dim.low + 1 for dim in found]) in range(80, 101)


def test_steps_are_kept():
    program, signature = of_grid(1024)
    dims = tuple(replace(dim, low=4, step=4) for dim in signature.dims)
    found = fitted(program.conditions, replace(signature, dims=dims), inner((20, 20), (16, 16)))
    assert [(dim.low, dim.high, dim.step) for dim in found] == [(4, 40, 4), (4, 28, 4)]
