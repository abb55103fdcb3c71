"""Probabilities beside boxes in pixels: an error in the small parts of an output is not hidden by the large ones."""

from __future__ import annotations

import math

import pytest
import torch

from tsopt.runtime.checking.agreement import relative_error
from tsopt.runtime.checking.compare import compare
from tsopt.runtime.checking.scales import error_of_small_parts

LIMIT = 0.044


def detections(axis=-1):
    """Boxes and the probabilities of classes, side by side."""
    generator = torch.Generator().manual_seed(0)
    boxes, classes = torch.full((2, 50, 4), 320.0), torch.rand(2, 50, 20, generator=generator) * 0.05
    return torch.cat([boxes, classes], -1).movedim(-1, axis).contiguous()


def without_classes(whole, axis):
    return torch.cat([whole.narrow(axis, 0, 4), torch.zeros_like(whole.narrow(axis, 4, 20))], axis)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("axis", [-1, 1])
def test_small_parts_have_an_error_of_their_own(axis, dtype):
    whole = detections(axis).to(dtype)
    spoilt = without_classes(whole, axis)
    found = compare(spoilt, whole, limit=LIMIT)
    assert not found.ok
    assert found.reason.startswith("relative error 100.00% where the output is over 100 times smaller than elsewhere")
    assert relative_error([[spoilt]], [[whole]]) == pytest.approx(1)
    near = whole * 1.01
    assert compare(near, whole, limit=LIMIT).ok
    assert relative_error([[near]], [[whole]]) == pytest.approx(0.01, rel=0.5)


def test_without_a_limit_they_may_be_what_they_like():
    assert compare(without_classes(detections(), -1), detections(), limit=math.inf).ok


def test_what_is_small_by_accident_is_no_part():
    logits = torch.linspace(-3, 3, 601)[None]  # the middle one is 0, and its neighbours are close to that
    assert error_of_small_parts([(logits + 0.01, logits)]) == 0
    assert error_of_small_parts([(logits + 0.01, logits)] * 7) == 0
    assert error_of_small_parts([(logits + 0.01, logits)] * 8) > 0.1, "the same in eight calls"


def test_what_is_rounding_beside_the_rest_is_no_part():
    x = torch.cat([torch.full((20, 1), 1e3), torch.full((20, 1), 1e-4)], 1)
    assert error_of_small_parts([(x * 2, x)]) == 0


def test_nor_is_it_where_the_whole_is_small_beside_what_it_usually_is():
    x = torch.cat([torch.full((20, 1), 1.0), torch.full((20, 1), 1e-3)], 1)
    assert error_of_small_parts([(x * 1.1, x)]) == pytest.approx(0.1)
    assert error_of_small_parts([(x * 1.1, x)], size=100.0) < 1e-3


def test_vectors_numbers_and_nothing_have_no_parts():
    for shape in ((), (9,), (0, 3), (9, 0), (9, 1)):
        assert error_of_small_parts([(torch.ones(shape), torch.zeros(shape))]) == 0


def test_infinities_do_not_count():
    whole = detections()
    whole[0, 0, 0] = whole[0, 0, 9] = math.inf
    whole[1, 0, 1] = math.nan
    assert error_of_small_parts([(whole * 1.01, whole)]) == pytest.approx(0.01, rel=0.1)
