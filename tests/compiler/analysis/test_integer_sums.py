"""Whether sums of products of 8-bit integers fit in 32 bits: of layers that tsopt rounds, and the model's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tsopt
from tests.compiler.helpers import Net
from tests.passes.quantize.models import own, seeded
from tsopt.compiler.analysis.integer_sums import MOST, least_scales, length_of_unsafe_sum, scores_fit, sums_fit
from tsopt.compiler.graph.quantized import quantized_weight

LONG = 70_000


def test_no_sum_of_the_longest_row_wraps():
    weight = torch.ones(1, MOST // 127)
    assert sums_fit(weight, 127)
    integers, _ = quantized_weight(weight, 127)
    assert int(integers.sum(dtype=torch.int64)) * 255 + 2**24 < 2**31
    assert not sums_fit(torch.ones(1, MOST // 127 + 1), 127)
    assert sums_fit(torch.ones(1, MOST // 127 + 1), 64), "smaller integers leave room for more of them"


def test_the_integers_of_each_row_decide():
    rows = torch.randn(3, LONG, generator=seeded(0))
    assert sums_fit(rows, 127), "few weights of a row are as large as the largest"
    rows[1] = torch.where(rows[1] > 0, 1.0, -1.0)
    assert not sums_fit(rows, 127), "the signs of the input may be those of the weight"


def test_each_group_of_a_convolution_has_sums_of_its_own():
    assert sums_fit(torch.ones(8, LONG // 16, 1, 8), 127)
    assert not sums_fit(torch.ones(8, LONG // 8, 1, 8), 127)


def test_scores():
    assert scores_fit(512)
    assert not scores_fit(LONG)


def test_a_bias_fits_in_steps_of_the_least_scale():
    least = least_scales(torch.tensor([3.0, -0.5, 0.0]), 1e-3)
    assert (torch.tensor([3.0, 0.5]) / (least[:2] * 1e-3)).round().tolist() == [2.0**24] * 2
    assert least[2] == 0


def rounded(x, low=0):
    kind = (0.01, 0, low, low + 255, torch.uint8 if low == 0 else torch.int8)
    return own.dequantize_per_tensor.default(own.quantize_per_tensor.default(x, *kind), *kind)


def lengths(forward, *example, **tensors):
    program = tsopt.capture(Net(forward, **tensors), example)
    return [length for node in program.calls() if (length := length_of_unsafe_sum(program, node))]


@pytest.mark.parametrize(
    ("forward", "is_unsafe"),
    [
        (lambda self, x, y: rounded(x) @ rounded(y, -128).mT, True),
        (lambda self, x, y: F.scaled_dot_product_attention(*(rounded(v[None], -128) for v in (x, y)), x[None]), True),
        (lambda self, x, y: F.linear(torch.fake_quantize_per_tensor_affine(x, 0.1, 3, 0, 255), rounded(y)), True),
        (lambda self, x, y: F.conv1d(rounded(x)[None].mT, rounded(y)[:, :, None]), True),
        (lambda self, x, y: F.conv_transpose1d(rounded(x)[None].mT, rounded(y).mT[:, :, None]), True),
        (lambda self, x, y: rounded(x) @ y.mT, False),
        (lambda self, x, y: rounded(x[:, :512]) @ rounded(y[:, :512]).mT, False),
        (lambda self, x, y: rounded(x) * rounded(y), False),
    ],
)
def test_long_products_of_what_the_model_rounds(forward, is_unsafe):
    x = torch.rand(2, LONG, generator=seeded(0))
    assert lengths(forward, x, x.clone()) == [LONG] * is_unsafe


@pytest.mark.parametrize(("value", "zero", "is_unsafe"), [(127, 0, True), (20, 0, False), (20, 5, True)])
def test_a_constant_weight_is_known(value, zero, is_unsafe):
    def forward(self, x):
        kind = (0, -127, 127, torch.int8)
        held = own.dequantize_per_channel.default(self.integers, self.scales, self.zeros, *kind)
        return F.linear(rounded(x), held)

    tensors = {
        "integers": torch.full((2, LONG), value, dtype=torch.int8),
        "scales": torch.full((2,), 1e-6),
        "zeros": torch.full((2,), zero),
    }
    assert lengths(forward, torch.rand(1, LONG), **tensors) == [LONG] * is_unsafe
