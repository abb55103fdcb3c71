"""What calibration finds of values, and the parameters that it chooses."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import tsopt
from tests.compiler.helpers import Net
from tests.passes.quantize.models import Residual, images, seeded
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.quantized import SMALLEST, QParams
from tsopt.passes.quantize.layers import layers_of, readers_of_integers
from tsopt.passes.quantize.observe import BINS, Observed, observe, qparams_of

ROWS, FIRST, SECOND = torch.ones(2, 4), torch.ones(2, 3, 1, 1), torch.ones(1, 2, 1, 1)


def seen(*values):
    found = Observed()
    for value in values:
        found.widen(value)
    for value in values:
        found.count(value)
    return found


def error(value, by):
    near = torch.fake_quantize_per_tensor_affine(value, by.scale, by.zero, 0, 255)
    return float((near - value).square().mean())


def test_ends_are_those_of_all_calls():
    found = seen(torch.tensor([1.0, 2.0]), torch.tensor([-3.0, 0.5]))
    assert (found.low, found.high) == (-3.0, 2.0)
    assert float(found.counts.sum()) == 4


def test_zeros_do_not_count_for_they_are_exact():
    assert float(seen(torch.tensor([0.0, 1.0, 0.0, -1.0])).counts.sum()) == 2


@pytest.mark.parametrize(("low", "high"), [(-1.0, 3.0), (0.5, 2.0), (-2.0, -1.0), (0.0, 0.0)])
def test_zero_is_exact(low, high):
    by = QParams.of_range(low, high)
    assert 0 <= by.zero <= 255
    near = torch.fake_quantize_per_tensor_affine(torch.zeros(1), by.scale, by.zero, 0, 255)
    assert float(near) == 0.0


@pytest.mark.parametrize(("low", "high"), [(-1.0, 3.0), (-3.0, 1.0), (0.5, 2.0), (-2.0, -1.0)])
def test_symmetric_parameters_reach_the_larger_end(low, high):
    by = seen(torch.linspace(low, high, 1000)).qparams(symmetric=True)
    assert by.scale == pytest.approx(max(-low, high) / 127, rel=0.03)
    assert by.is_symmetric


def test_a_value_that_is_always_zero_gets_the_smallest_scale():
    assert seen(torch.zeros(5)).qparams().scale == SMALLEST


def test_a_constant_value_is_exact_within_a_step():
    by = seen(torch.full((5,), 3.0)).qparams()
    assert error(torch.full((5,), 3.0), by) < 1e-9


def test_the_range_of_ordinary_values_is_kept():
    value = torch.rand(10_000, generator=seeded(0)) * 4 - 1
    by = seen(value).qparams()
    assert by.scale == pytest.approx(4 / 255, rel=0.03)


def test_a_few_outliers_are_cut_where_that_is_the_smaller_error():
    value = torch.randn(100_000, generator=seeded(0))
    value[0] = 40.0
    whole, chosen = QParams.of_range(float(value.min()), 40.0), seen(value).qparams()
    shares = torch.linspace(0.05, 1, 60).tolist()
    best = min(error(value, QParams.of_range(float(value.min()) * share, 40 * share)) for share in shares)
    assert error(value, chosen) < 1.02 * best < error(value, whole)


def test_a_channel_of_outliers_is_not_cut():
    value = torch.randn(16, 1000, generator=seeded(0))
    value[3] *= 1000
    by = seen(value).qparams()
    near = torch.fake_quantize_per_tensor_affine(value, by.scale, by.zero, 0, 255)
    assert float((near[3] - value[3]).norm() / value[3].norm()) < 0.02


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_has_no_parameters(bad):
    program = tsopt.capture(Net(lambda self, x: F.linear(x.relu(), ROWS)), torch.ones(1, 4))
    values = readers_of_integers(layers_of(program))
    assert values
    calls = [(torch.ones(1, 4),), (torch.full((1, 4), abs(bad)),)]
    found = observe(program, calls, values, lambda text: None)
    assert not any(item.is_finite for item in found.values())
    assert qparams_of(values, found) == {}


def test_nan_in_an_early_call_is_not_forgotten():
    found = Observed()
    for value in (torch.tensor([math.nan]), torch.ones(1)):
        found.widen(value)
    assert not found.is_finite


def test_what_is_moved_keeps_the_parameters_of_its_source():
    program = tsopt.capture(
        Net(lambda self, x: F.conv2d(F.max_pool2d(F.conv2d(x, FIRST), 2), SECOND)),
        images(1)[0],
    )
    values = readers_of_integers(layers_of(program))
    ordered = [node for node in program.graph.nodes if node in values]
    found = qparams_of(ordered, observe(program, [(x,) for x in images(2)], ordered, lambda text: None))
    pooled = next(node for node in ordered if node.target is aten.max_pool2d.default)
    assert found[pooled.name] is found[pooled.args[0].name]


def test_progress_counts_the_calls_of_both_rounds():
    program = tsopt.capture(Residual().eval(), images(1)[0])
    said: list[str] = []
    observe(program, [(x,) for x in images(3)], list(readers_of_integers(layers_of(program))), said.append)
    assert said == [f"{number} of 6" for number in range(1, 7)]
    assert BINS == 2048


@pytest.mark.parametrize("end", [1e36, torch.finfo(torch.float32).max])
def test_values_near_the_end_of_float32_are_counted(end):
    value = torch.tensor([-end, -1.0, 2.0, end / 2, end])
    found = seen(value)
    assert [float(found.counts[place]) for place in (0, BINS // 2, -BINS // 4, -1)] == [1, 2, 1, 1]
    assert all(torch.tensor(found.qparams(symmetric=odd).range).isfinite().all() for odd in (False, True))


def test_a_call_without_rows_says_nothing():
    rows = torch.randn(4, 8, generator=seeded(0))
    with_empty, without = seen(rows, rows[:0]), seen(rows)
    assert (with_empty.low, with_empty.high) == (without.low, without.high)
    assert torch.equal(with_empty.counts, without.counts)
    assert not seen(rows[:0]).is_finite
