"""Sums of int8 products in ONNX Runtime and OpenVINO that 32 bits might not hold, and biases that are added there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tsopt
from tests.compiler.helpers import Net
from tests.passes.quantize.models import images, own, seeded
from tests.passes.quantize.test_static import calibrated
from tsopt.runtime.backends.backend import compile as compiled
from tsopt.runtime.backends.backend import get_backend
from tsopt.runtime.backends.candidate import Candidate

ENGINES = ("onnxruntime", "openvino")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_bias_that_32_bits_cannot_hold_is_added_in_float(engine):
    """In steps of the sums, a bias of 1e7 over tiny products is more than 2^31."""
    rows = torch.randn(4, 16, generator=seeded(0)) * 1e-3
    kernel, bias = rows[:, :, None, None], torch.tensor([1e7, -1e7, 1.0, 0.0])
    x = torch.rand(1, 16, 3, 3, generator=seeded(1)) * 1e-3
    made, _ = calibrated(lambda self, x: F.conv2d(x, kernel, bias).relu(), x)
    found, wanted = compiled(made, engine)(x), F.conv2d(x, kernel, bias).relu()
    assert torch.allclose(found[:, 0], wanted[:, 0], rtol=0.01)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_channel_with_a_bias_and_hardly_any_weight(engine):
    """As a norm leaves it that has been folded into a convolution."""
    kernel, bias = torch.randn(4, 3, 3, 3, generator=seeded(0)), torch.ones(4)
    kernel[0], kernel[1] = 0.0, kernel[1] * 1e-7
    second = torch.randn(4, 4, 1, 1, generator=seeded(1))

    def forward(self, x):
        return F.conv2d(F.conv2d(x, kernel, bias).relu(), second)

    made, _ = calibrated(forward, images(1)[0])
    found, wanted = compiled(made, engine)(images(1)[0]), forward(None, images(1)[0])
    assert float((found - wanted).norm() / wanted.norm()) < 0.02


@pytest.mark.parametrize("engine", ENGINES)
def test_sums_of_the_models_own_integers_that_do_not_fit_are_refused(engine):
    def forward(self, x):
        kind = (0.01, 0, 0, 255, torch.uint8)
        x = own.dequantize_per_tensor.default(own.quantize_per_tensor.default(x, *kind), *kind)
        return x @ x.mT

    refused = get_backend(engine).unsupported(tsopt.capture(Net(forward), torch.rand(2, 40_000)))
    assert [item.why for item in refused] == [
        f"{Candidate(engine).title} adds up 40,000 products of 8-bit integers in 32 bits, which might not hold the sum"
    ]
    assert not get_backend(engine).unsupported(tsopt.capture(Net(forward), torch.rand(2, 400)))
