"""Quantization in a user's model: OpenVINO takes the step that PyTorch takes, in the middle between two as well."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # it registers the ops

import tsopt
from tsopt.runtime.checking.accuracy import verify

pytestmark = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="not installed")
quantized = torch.ops.quantized_decomposed
X = (torch.arange(64.0) / 16 - 2).reshape(1, 2, 4, 8)
SCALES, ZEROS = torch.tensor([0.25, 0.5]), torch.tensor([3, 2], dtype=torch.int32)


def there_and_back(zero, low, high, dtype):
    def model(x):
        steps = quantized.quantize_per_tensor.default(x, 0.25, zero, low, high, dtype)
        return quantized.dequantize_per_tensor.default(steps, 0.25, zero, low, high, dtype)

    return model


MODELS = {
    "odd": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.25, 3, 0, 255),
    "below zero": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.25, -3, -128, 127),
    "even": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.25, 128, 0, 255),
    "computed": lambda x: torch.fake_quantize_per_tensor_affine(x, SCALES[0], ZEROS[0], 0, 255),
    "by channel": lambda x: torch.fake_quantize_per_channel_affine(x, SCALES, ZEROS, 1, 0, 255),
    "int8": there_and_back(3, -128, 127, torch.int8),
    "uint8": there_and_back(3, 0, 255, torch.uint8),
    "in a branch": lambda x: torch.cond(x.sum() > 9, lambda x: x + 0, there_and_back(3, 0, 255, torch.uint8), (x,)),
}


def compiled(model):
    return tsopt.compile(tsopt.transform(tsopt.capture(model, X)), "openvino")


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_halves_go_to_the_neighbor_that_pytorch_takes(model):
    torch.testing.assert_close(compiled(model)(X), model(X), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("zero", [3, 4])
def test_only_odd_zero_points_cost_the_kernel_of_openvino(zero):
    from tsopt.runtime.onnx.openvino_rounding import with_exact_halves

    program = tsopt.capture(there_and_back(zero, 0, 255, torch.uint8), X)
    targets = [node.target for node in with_exact_halves(program).calls()]
    assert (quantized.quantize_per_tensor.default in targets) == (zero == 4)


def test_verification_finds_halves_that_go_elsewhere():
    def candidate(x):
        return (torch.clamp(torch.round(x / 0.25 + 3), 0, 255) - 3) * 0.25

    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    assert verify(MODELS["odd"], MODELS["odd"], x).ok
    with pytest.raises(tsopt.AccuracyError, match="halves"):
        verify(MODELS["odd"], candidate, x)
