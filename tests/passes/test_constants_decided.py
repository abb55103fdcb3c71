"""Fills and choices whose masks are constant."""

from __future__ import annotations

import math

import pytest
import torch

from tests.passes.examples import FLOATS, N, With
from tests.passes.helpers import check_declines, check_fires, specials
from tsopt.compiler.rewriting.rewrite import NEW_ALIAS
from tsopt.passes import constants

NONE, ALL, SOME = torch.zeros(N).bool(), torch.ones(N).bool(), torch.arange(N) > 3


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("value", [1, -math.inf])
def test_a_fill_of_nothing_goes(value, dtype):
    if math.isinf(value) and not dtype.is_floating_point:
        return
    x = specials(2, N, dtype=dtype) if dtype.is_floating_point else torch.arange(2 * N).reshape(2, N).to(dtype)
    model = With(lambda x, m: x.masked_fill(m, value).logical_not(), NONE)
    check_fires(constants.fill_nothing, model, x, ops=["logical_not"], exact=True)


def test_a_fill_of_nothing_with_a_computed_number_goes():
    model = With(lambda x, m: x.masked_fill(m, x.sum()).neg(), NONE)
    check_fires(constants.fill_nothing, model, specials(N), ops=["neg"], exact=True)


@pytest.mark.parametrize("mask", [SOME, ALL], ids=["some", "all"])
def test_a_fill_of_something_stays(mask):
    check_declines(constants.fill_nothing, With(lambda x, m: x.masked_fill(m, 1.0).neg(), mask), specials(N))


def test_a_fill_of_nothing_that_broadcasts_stays():
    model = With(lambda x, m: x.masked_fill(m, 1.0).neg(), NONE)
    check_declines(constants.fill_nothing, model, torch.ones(1), constants.PROMOTES)


def test_a_fill_of_nothing_that_is_returned_stays():
    check_declines(constants.fill_nothing, With(lambda x, m: x.masked_fill(m, 1.0), NONE), specials(N), NEW_ALIAS)


def test_a_fill_by_a_computed_mask_stays():
    check_declines(constants.fill_nothing, lambda x: x.masked_fill(x > math.inf, 1.0), specials(N))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("function", "mask"),
    [
        (lambda x, m: torch.where(m, x, x.neg()), ALL),
        (lambda x, m: torch.where(m, x.neg(), x), NONE),
        (lambda x, m: torch.where(m, x, 2), ALL),
        (lambda x, m: torch.where(m, 2, x), NONE),
    ],
)
def test_a_decided_where_is_its_branch(function, mask, dtype):
    x = specials(2, N, dtype=dtype) if dtype.is_floating_point else torch.arange(N)
    model = With(lambda x, m: function(x, m).abs(), mask)
    check_fires(constants.where_decided, model, x, ops=["abs"], exact=True)


@pytest.mark.parametrize(
    ("function", "mask"),
    [
        (lambda x, m: torch.where(m, 2.0, x), ALL),
        (lambda x, m: torch.where(m, x, 2.0), NONE),
        (lambda x, m: torch.where(m, x, x.double()).neg(), ALL),
        (lambda x, m: torch.where(m, x.sum(), x).neg(), ALL),
    ],
)
def test_a_decided_where_of_another_type_stays(function, mask):
    check_declines(constants.where_decided, With(function, mask), specials(N), constants.PROMOTES)


@pytest.mark.parametrize("function", [lambda x, m: torch.where(m, 2.0, x), lambda x, m: torch.where(x > 0, x, x.neg())])
def test_an_undecided_where_stays(function):
    check_declines(constants.where_decided, With(lambda x, m: function(x, m).abs(), SOME), specials(N))


def test_an_empty_where_is_a_branch():
    model = With(lambda x, m: torch.where(m, x, x.neg()) + 1, torch.zeros(0).bool())
    check_fires(constants.where_decided, model, torch.ones(0), ops=["add.Tensor"])
