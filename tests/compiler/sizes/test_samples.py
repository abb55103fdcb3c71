"""The sizes at which passes are tried, and those at which their result is checked."""

from __future__ import annotations

import pytest
import torch

import tsopt
from tsopt.compiler.sizes.samples import held_out, sample_sizes
from tsopt.compiler.sizes.survey import Survey

pytestmark = pytest.mark.filterwarnings("ignore")


def captured(model, *sizes, **dynamic):
    return tsopt.capture(model, tuple(torch.randn(size) for size in sizes), dynamic=dynamic)


def test_samples_are_the_ends_and_no_size_that_the_model_has():
    program = captured(lambda x, y: (x * 2, y), (4, 3), (6, 2), x={0: "n[1..9]"}, y={0: "m[2..20]"})
    chosen = sample_sizes(program)
    numbers = [size for sizes in chosen for size in sizes.values()]
    assert len(set(numbers)) == len(numbers)
    assert not {2, 3} & set(numbers)
    assert max(sizes["m"] for sizes in chosen) == 20


def test_steps_are_kept_by_samples():
    program = captured(lambda x: x.reshape(-1, 4, 3).sum(1), (8, 3), x={0: "n[4..64]"})
    assert all(sizes["n"] % 4 == 0 for sizes in sample_sizes(program))


def test_samples_show_every_number_that_a_call_is_given_on_both_sides_of_each_other():
    program = captured(lambda x: x.clamp(max=x.shape[1] // 8) * (x.shape[1] % 8), (3, 16), x={1: "s[8..40]"})
    sizes = [each["s"] for each in sample_sizes(program)]
    assert {(size % 8 > size // 8) - (size % 8 < size // 8) for size in sizes} >= {-1, 1}
    assert len({size % 8 for size in sizes}) > 1 < len({size // 8 for size in sizes})


def test_samples_are_on_both_sides_of_the_numbers_that_the_model_names():
    def model(x):
        return torch.cat([x, x.new_ones(3, 40)], 1)[:, :21].clamp(max=300)

    program = captured(model, (3, 30), x={1: "s[8..64]"})
    assert Survey(program).bounds() == [0.0, 21.0]
    for near in (False, True):
        assert {each["s"] > 21 for each in sample_sizes(program, near=near)} == {True, False}


def test_samples_reach_beyond_the_bound_of_a_clamp_where_that_of_another_grows():
    def model(x):
        return x.clamp(max=x.shape[1] // 8).clamp(max=300)

    for end in ("", "[8..5000]"):
        program = captured(model, (3, 16), x={1: f"s{end}"})
        assert Survey(program).bounds() == [0.0, 300.0]
        for near in (False, True):
            assert max(each["s"] for each in sample_sizes(program, near=near)) > 2400


def test_samples_show_what_only_shapes_tell():
    """How long the pool's result is, no number says: as long as the slice at some sizes, longer at others."""

    def model(x):
        return torch.nn.functional.avg_pool1d(x, 3, 2) * 2

    program = captured(model, (3, 16), x={1: "s[8..40]"})
    assert len({size["s"] % 2 for size in sample_sizes(program)}) == 2


def test_each_size_is_tried_above_the_other_and_below():
    program = captured(lambda x, y: (x * 2, y * 2), (4, 3), (6, 2), x={0: "n[2..40]"}, y={0: "m[2..40]"})
    assert {sizes["n"] < sizes["m"] for sizes in sample_sizes(program)} == {True, False}


def test_what_is_checked_was_not_tried_and_has_other_remainders():
    program = captured(lambda x: torch.nn.functional.avg_pool1d(x, 4) * 2, (3, 16), x={1: "s[8..72]"})
    samples = sample_sizes(program)
    checked = held_out(program, samples, Survey(program))
    assert not [sizes for sizes in checked if sizes in samples]
    assert {"s": 8} in (*samples, *checked)
    assert {sizes["s"] % 4 for sizes in checked} == {0, 1, 2, 3}


def test_where_sizes_are_plain_few_are_checked():
    program = captured(lambda x: x.flatten() * 2, (4, 3), x={0: "n[1..64]"})
    assert len(held_out(program, sample_sizes(program), Survey(program))) == 3
