"""OpenVINO subtracts as it is written where digits would be lost otherwise."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F

import tsopt
from tsopt.runtime.onnx.openvino_sums import with_sums_apart

pytestmark = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="not installed")
OFFSETS, STEPS = torch.tensor([101325.0, 273.25, 1000.0]), torch.tensor([0.1, 0.2, 0.3])


def compiled(model, x, passes):
    program = tsopt.capture(model, x)
    return tsopt.compile(tsopt.transform(program) if passes else program, "openvino")


@pytest.mark.parametrize("passes", [True, False], ids=["transformed", "captured"])
@pytest.mark.parametrize(
    ("model", "center", "scale"),
    [
        (lambda p: (p - 101325.0) / 30.0, 101325.0, 1.0),
        (lambda p: (p - 101325.0) * 1e-5, 101325.0, 1.0),
        (lambda p: 0.3 * -(p + 101325.0).reshape(3, -1), -101325.0, 1.0),
        (lambda p: (273.25 - p) * 0.7, 273.25, 1.0),
        (lambda p: (p - OFFSETS) / torch.tensor([3.0, 0.7, 1.1]), OFFSETS, 1.0),
        (lambda p: (p - 0.5) / 1e-4, 0.5, 1e-3),
        (lambda p: torch.cond(p.sum() < -1e9, lambda p: p * 2, lambda p: (p - 101325.0) / 30.0, (p,)), 101325.0, 1.0),
    ],
)
def test_what_a_difference_leaves_keeps_its_digits(model, center, scale, passes):
    spread = torch.randn(1024, 3, generator=torch.Generator().manual_seed(0))
    p = center + spread * scale
    found = compiled(model, p, passes)(p)
    torch.testing.assert_close(found.double(), model(p.double()), rtol=3e-6, atol=1e-9)


@pytest.mark.parametrize("passes", [True, False], ids=["transformed", "captured"])
@pytest.mark.parametrize(
    ("model", "center", "scale"),
    [
        (lambda p: (p - 101325.0 + 3.0) / 30.0, 101325.0, 1.0),
        (lambda p: (p - 101325.0 - STEPS) / 30.0, 101325.0, 1.0),
        (lambda p: ((p - 101325.0) * 0.5) / 30.0, 101325.0, 1.0),
        (lambda p: ((p - 5.0) * 32.0 + 0.3) * 0.7, 5.0, 1e-3),
        (lambda p: p - 101325.0 + 0.3, 101325.0, 1.0),
        (lambda p: 0.3 - (p - 101325.0), 101325.0, 1.0),
        (lambda p: (p - 101325.0) * 0.5 + 0.3, 101325.0, 1.0),
        (lambda p: torch.add(STEPS, p - 101325.0, alpha=2), 101325.0, 1.0),
    ],
)
def test_so_it_does_before_more_terms_and_factors(model, center, scale, passes):
    """The other terms are of the size of the difference, which therefore may be rounded once more."""
    p = center + torch.randn(1024, 3, generator=torch.Generator().manual_seed(0)) * scale
    found = compiled(model, p, passes)(p)
    torch.testing.assert_close(found.double(), model(p.double()), rtol=0, atol=5e-7)


@pytest.mark.parametrize(
    "model",
    [
        lambda x: (x - 0.485) / 0.229,
        lambda x: (x - 128) / 64,
        lambda x: (x - 1000).relu() * 0.3,
        lambda x: F.linear(x - 1000, torch.ones(3, 3)),
        lambda x: ((torch.ones(3) - 1000) * 0.3) + x,
        lambda x: (x - 1000) * 0.5,
        lambda x: x + 5.0 + 0.3,
        lambda x: (x - 1000) * x + 0.3,
        lambda x: (x - 1000) + x,
        lambda x: torch.div(x - 1000, 3, rounding_mode="floor"),
    ],
)
def test_other_sums_stay_as_they_are(model):
    program = tsopt.capture(model, torch.ones(3))
    assert with_sums_apart(program).text == program.text


def test_a_sum_of_integers_stays_one():
    program = tsopt.capture(lambda ids: (ids - 100000).float() / 300, torch.randint(0, 3000, (4, 16)))
    assert with_sums_apart(program).text == program.text
