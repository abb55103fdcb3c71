"""The fewest layers to keep in float32, in few trials."""

from __future__ import annotations

import math

import pytest

from tsopt.passes.quantize.selection import ExpectedError, fewest_kept


@pytest.mark.parametrize("count", [1, 2, 7, 54, 100])
@pytest.mark.parametrize("needed", [0, 1, 5, 53, 99, 100])
def test_the_fewest_that_are_accepted_are_found(count, needed):
    tried = []

    def is_accepted(kept):
        tried.append(kept)
        return kept >= needed

    found = fewest_kept(count, 0, is_accepted)
    assert found == min(needed, count)
    assert len(tried) == len(set(tried)) <= math.log2(count) + 2
    assert found == count or found in tried


@pytest.mark.parametrize("count", [1, 2, 54, 100])
@pytest.mark.parametrize("needed", [0, 1, 5, 53, 99, 100])
@pytest.mark.parametrize("guess", [0, 6, 99, 100])
def test_a_guess_saves_trials_where_it_is_near_and_decides_nothing(count, needed, guess):
    tried = []

    def is_accepted(kept):
        tried.append(kept)
        return kept >= needed

    assert fewest_kept(count, 0, is_accepted, lambda: guess) == min(needed, count)
    assert len(tried) == len(set(tried)) <= 2 * math.log2(abs(guess - needed) + 1) + 3
    assert all(0 <= kept < count for kept in tried)


def test_a_guess_below_what_is_kept_in_any_case_is_raised_to_it():
    tried = []
    assert fewest_kept(10, 4, lambda kept: tried.append(kept) or True, lambda: 2) == 4
    assert tried == [4]


@pytest.mark.parametrize("needed", [0, 5, 53, 99, 100])
def test_a_guess_that_learns_is_followed(needed):
    """Far off at first, it is right once something has been tried."""
    tried = []

    def is_accepted(kept):
        tried.append(kept)
        return kept >= needed

    assert fewest_kept(1000, 0, is_accepted, lambda: needed if tried else 900) == needed
    assert tried[:2] == [900, needed]
    assert len(tried) <= 4


@pytest.mark.parametrize("far", [0, 999, -5, 5000])
def test_a_guess_that_stays_wrong_costs_little(far):
    tried = []

    def is_accepted(kept):
        tried.append(kept)
        return kept >= 400

    assert fewest_kept(1000, 0, is_accepted, lambda: far) == 400
    assert len(tried) == len(set(tried)) <= 2 * math.log2(1000) + 3


def test_what_is_kept_in_any_case_is_not_asked_about():
    tried = []
    assert fewest_kept(10, 4, lambda kept: tried.append(kept) or True) == 4
    assert tried == [4]


def test_all_kept_is_not_tried():
    assert fewest_kept(3, 3, lambda kept: pytest.fail("nothing is quantized")) == 3


def test_effects_add_up_to_the_limit():
    effects = [4e-4, 3e-4, 2e-4, 1e-4]  # squares: the last two make 0.0173
    assert [ExpectedError(effects, limit).fewest() for limit in (1.0, 0.0317, 0.025, 0.018, 0.011, 0.009)] == [
        *(0, 0, 1, 2, 3, 4)
    ]


def test_a_measured_error_corrects_what_is_expected():
    expected = ExpectedError([1e-4] * 4, 0.0101)
    assert expected.fewest() == 3
    expected.correct(2, 0.005)  # of the last two, 0.0141 was expected
    assert expected.fewest() == 0
    for unknown in (None, math.inf, math.nan, 0.0):
        expected.correct(1, unknown)
        assert expected.fewest() == 0
    expected.correct(0, 1.0)
    assert expected.fewest() == 4


def test_layers_without_an_effect_say_nothing_of_the_error():
    expected = ExpectedError([0.0, 0.0], 0.01)
    expected.correct(0, 0.5)
    assert expected.fewest() == 0
