"""Scales, shifts and paddings folded into the layer beside them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.passes.fused_layers import image, layer_then, net, then, warm
from tests.passes.helpers import aten, check, check_declines, check_fires
from tsopt.compiler.rewriting.rewrite import USED_ELSEWHERE
from tsopt.passes import FUSE, fuse
from tsopt.passes.constants import ABSORBS

# ---- scales and shifts ------------------------------------------------------------------------------------

LAYERS = {
    "conv1d": (nn.Conv1d(4, 6, 3, groups=2), (2, 4, 5), (6, 1)),
    "conv2d": (nn.Conv2d(4, 6, 3, bias=False), (2, 4, 5, 5), (6, 1, 1)),
    "conv3d": (nn.Conv3d(4, 6, 1, padding="same"), (2, 4, 3, 3, 3), (1, 6, 1, 1, 1)),
    "unbatched": (nn.Conv2d(4, 6, 3), (4, 6, 6), (6, 1, 1)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, groups=2), (2, 4, 5, 5), (6, 1, 1)),
    "transposed-unbatched": (nn.ConvTranspose1d(4, 6, 3), (4, 5), (6, 1)),
    "linear": (nn.Linear(4, 6), (2, 4), (6,)),
    "linear-3d": (nn.Linear(4, 6, bias=False), (2, 6, 4), (1, 6)),
    "linear-1d": (nn.Linear(4, 6), (4,), (6,)),
}
MAGIC = 1.5 * 2**23  # adding and subtracting it rounds to an integer
OPS = {"conv_mul": lambda y, k: y * k, "conv_add": lambda y, k: y + k}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("rule", OPS)
def test_a_constant_for_each_channel_folds(rule, layer):
    module, shape, k = LAYERS[layer]
    model = layer_then(module, torch.rand(k) + 0.5, OPS[rule])
    found = check_fires(getattr(fuse, rule), model, torch.randn(shape))
    assert len(found.ops) == 1


@pytest.mark.parametrize("layer", ["conv2d", "transposed", "linear"])
@pytest.mark.parametrize("k", [3, 0.25, -1.5])
@pytest.mark.parametrize("rule", OPS)
def test_a_literal_folds(rule, k, layer):
    module, shape, _ = LAYERS[layer]
    check_fires(getattr(fuse, rule), then(module, lambda y: OPS[rule](y, k)), torch.randn(shape))


@pytest.mark.parametrize("k", [torch.tensor(2.0), torch.tensor([2.0]), torch.tensor(3), torch.ones(1, 1, 1, 1) * 2])
def test_one_constant_for_all_channels_folds(k):
    check_fires(fuse.conv_mul, layer_then(nn.Conv2d(4, 6, 3), k, OPS["conv_mul"]), torch.randn(2, 4, 5, 5))


@pytest.mark.parametrize(
    "shape", [(3, 3), (3,), (6, 3, 3), (2, 1, 1, 1), (1, 1, 1, 3)], ids=lambda s: "x".join(map(str, s))
)
@pytest.mark.parametrize("rule", OPS)
def test_a_constant_along_another_axis_stays(rule, shape):
    model = layer_then(nn.Conv2d(4, 6, 3), torch.rand(shape), OPS[rule])
    check_declines(getattr(fuse, rule), model, torch.randn(2, 4, 5, 5))


def test_a_constant_along_the_rows_of_a_linear_layer_stays():
    """[6, 1] broadcasts over rows although there are six features too."""
    check_declines(fuse.conv_mul, layer_then(nn.Linear(4, 6), torch.rand(6, 1), OPS["conv_mul"]), torch.randn(6, 4))


def test_a_constant_that_widens_the_result_stays():
    model = layer_then(nn.Conv2d(4, 1, 3), torch.rand(6, 1, 1), OPS["conv_mul"])
    check_declines(fuse.conv_mul, model, torch.randn(2, 4, 5, 5))


def test_a_constant_that_promotes_stays():
    model = layer_then(nn.Linear(4, 6), torch.rand(6, dtype=torch.float64), OPS["conv_mul"])
    check_declines(fuse.conv_mul, model, torch.randn(2, 4))


def test_a_boolean_literal_stays():
    check_declines(fuse.conv_mul, then(nn.Linear(4, 6), lambda y: aten.mul.Tensor(y, True)), torch.randn(2, 4))


def test_a_computed_factor_stays():
    check_declines(fuse.conv_mul, then(nn.Linear(4, 6), lambda y: y * y.mean()), torch.randn(2, 4))


def test_an_added_tensor_with_alpha_stays():
    model = layer_then(nn.Linear(4, 6), torch.rand(6), lambda y, k: torch.add(y, k, alpha=2))
    check_declines(fuse.conv_add, model, torch.randn(2, 4))


@pytest.mark.parametrize("rule", OPS)
def test_a_scaled_value_used_elsewhere_stays(rule):
    def function(y):
        return OPS[rule](y, 2.0), y.relu()

    check_declines(getattr(fuse, rule), then(nn.Linear(4, 6), function), torch.randn(2, 4), USED_ELSEWHERE)


@pytest.mark.parametrize("k", [MAGIC, torch.tensor([1.0, 2.0, MAGIC, 0.0, 0.0, 0.0])], ids=["literal", "constant"])
@pytest.mark.parametrize("layer", ["conv2d", "transposed", "linear"])
def test_a_term_that_rounds_on_purpose_stays(layer, k):
    """In the bias, it would round the bias, and what the layer adds to it one by one."""
    module, shape, sizes = LAYERS[layer]
    k = k.reshape(sizes) if isinstance(k, torch.Tensor) else k
    check_declines(fuse.conv_add, then(module, lambda y: (y + k) - k), torch.randn(shape), ABSORBS)


@pytest.mark.parametrize(("dtype", "least"), [(torch.float16, 256.0), (torch.bfloat16, 32.0)], ids=str)
def test_in_half_precision_an_ordinary_term_folds_and_one_that_leaves_two_digits_stays(dtype, least):
    x = torch.randn(2, 4, dtype=dtype)
    check_fires(fuse.conv_add, then(nn.Linear(4, 6).to(dtype), lambda y: y + (least - 1)), x)
    check_declines(fuse.conv_add, then(nn.Linear(4, 6).to(dtype), lambda y: y + least), x, ABSORBS)


@pytest.mark.parametrize("rule", OPS)
def test_a_bias_that_rounds_on_purpose_stays(rule):
    layer = nn.Linear(4, 6)
    layer.bias.data.fill_(MAGIC)
    check_declines(getattr(fuse, rule), then(layer, lambda y: OPS[rule](y, -0.5)), torch.randn(2, 4), ABSORBS)


def test_an_infinite_factor_stays():
    check_declines(fuse.conv_mul, then(nn.Linear(4, 6), lambda y: y * float("inf")), torch.randn(2, 4), fuse.NOT_FINITE)


@pytest.mark.parametrize(("dtype", "k"), [(torch.float16, 1e-5), (torch.float32, 1e-39)], ids=str)
def test_a_factor_that_leaves_no_digits_to_the_weights_stays(dtype, k):
    model = then(nn.Linear(4, 6).to(dtype), lambda y: y * k)
    check_declines(fuse.conv_mul, model, torch.ones(2, 4, dtype=dtype), fuse.TOO_SMALL)


def test_a_factor_that_makes_one_channel_small_folds():
    k = torch.ones(6).index_fill(0, torch.tensor([2]), 1e-40)
    check_fires(fuse.conv_mul, layer_then(nn.Linear(4, 6), k, OPS["conv_mul"]), torch.randn(2, 4))


@pytest.mark.parametrize("layer", ["linear-3d", "transposed"])
def test_a_factor_that_leaves_no_digits_to_one_channel_of_float16_stays(layer):
    """1e-5 is an ordinary number there, and what another channel holds does not help this one."""
    module, shape, sizes = LAYERS[layer]
    k = torch.ones(6).index_fill(0, torch.tensor([4]), 1e-5).reshape(sizes)
    model = layer_then(copy.deepcopy(module), k, OPS["conv_mul"]).half()
    check_declines(fuse.conv_mul, model, torch.ones(shape, dtype=torch.float16), fuse.TOO_SMALL)


@pytest.mark.parametrize(("bias", "folds"), [(10.0, False), (0.0, False), (200.0, True)])
def test_a_bias_hides_the_digits_of_a_channel_only_where_it_is_larger_by_all_of_its_own(bias, folds):
    """k * 10 is just above the smallest normal of float16, beside weights that lose their digits."""
    layer = nn.Linear(64, 6)
    layer.weight.data.fill_(0.1)
    layer.bias.data.fill_(bias)
    k = torch.ones(6).index_fill(0, torch.tensor([4]), 1e-5)
    model, x = layer_then(layer, k, OPS["conv_mul"]).half(), torch.ones(2, 64).half()
    if folds:
        check_fires(fuse.conv_mul, model, x)
    else:
        check_declines(fuse.conv_mul, model, x, fuse.TOO_SMALL)


def test_a_factor_of_zero_for_one_channel_of_float16_folds():
    k = torch.ones(6).index_fill(0, torch.tensor([4]), 0.0)
    check_fires(fuse.conv_mul, layer_then(nn.Linear(4, 6), k, OPS["conv_mul"]).half(), torch.ones(2, 4).half())


def test_computed_weights_stay():
    check_declines(
        fuse.conv_mul, lambda x, w: F.linear(x, w) * 2.0, (torch.randn(2, 4), torch.randn(6, 4)), fuse.COMPUTED
    )


def test_a_linear_layer_with_a_vector_for_weight_does_not_stop_the_pass():
    class Dot(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x):
            return F.linear(x, self.w) * 2.0

    check(fuse.conv_mul, Dot().eval(), torch.randn(3))
    check(fuse.conv_mul, Dot().eval(), torch.randn(3, 3))


@pytest.mark.parametrize("k", [2.0, torch.tensor([1j, 2.0, 1 + 1j])], ids=["literal", "constant"])
@pytest.mark.parametrize("rule", OPS)
def test_a_complex_layer_keeps_its_imaginary_bias(rule, k):
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 4, dtype=torch.complex64))
            self.b = nn.Parameter(torch.randn(3, dtype=torch.complex64))

        def forward(self, x):
            return F.linear(x, self.w, self.b)

    model = then(Complex(), lambda y: OPS[rule](y, k)) if isinstance(k, float) else layer_then(Complex(), k, OPS[rule])
    check(getattr(fuse, rule), model, torch.randn(2, 4, dtype=torch.complex64))


def test_an_integer_layer_keeps_its_large_weights():
    """2**24 + 1 has no float32, so the scale must not be multiplied there."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.full((3, 4), 2**24 + 1))

        def forward(self, x):
            return F.linear(x, self.w) * 3

    check(fuse.conv_mul, Whole().eval(), torch.ones(2, 4, dtype=torch.int64))


def test_chains_fold_into_one_layer():
    layers = nn.Conv2d(3, 4, 3, bias=False), warm(nn.BatchNorm2d(4)), warm(nn.BatchNorm2d(4))
    check(FUSE, then(net(*layers), lambda y: (y * 2 + 1) * 0.5), image(3, 2), ["conv2d"])


def test_a_zero_factor_keeps_the_places_of_nan():
    found = check(FUSE, then(nn.Linear(2, 2), lambda y: y * 0.0), torch.tensor([[1.0, float("inf")]]))
    assert found.ops == ["linear"]


# ---- padding ----------------------------------------------------------------------------------------------


def padded(pad, conv, mode="constant", value=0.0):
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = conv

        def forward(self, x):
            return self.conv(aten.pad.default(x, pad, mode, value))

    return Padded().eval()


@pytest.mark.parametrize(
    ("pad", "conv", "dims"),
    [
        ([2, 2], nn.Conv1d(3, 4, 3), 1),
        ([1, 1, 2, 2], nn.Conv2d(3, 4, 3, padding=(3, 0)), 2),
        ([1, 1], nn.Conv2d(3, 4, 3, padding=1, stride=2), 2),
        ([1, 1, 0, 0, 2, 2], nn.Conv3d(3, 4, 3, dilation=2), 3),
    ],
)
def test_a_zero_padding_goes_into_the_convolution(pad, conv, dims):
    check_fires(fuse.pad_conv, padded(pad, conv), image(3, dims), ops=[f"conv{dims}d"])


def test_a_padding_goes_into_a_convolution_without_batch():
    check_fires(fuse.pad_conv, padded([1, 1, 2, 2], nn.Conv2d(3, 4, 3)), torch.randn(3, 5, 5))


def test_a_padding_without_a_value_goes_into_the_convolution():
    check_fires(fuse.pad_conv, padded([1, 1], nn.Conv1d(3, 4, 3), value=None), image(3, 1))


@pytest.mark.parametrize(
    ("mode", "value"), [("reflect", None), ("replicate", None), ("circular", None), ("constant", 1.0)]
)
def test_a_padding_with_other_values_stays(mode, value):
    model = padded([1, 1, 1, 1], nn.Conv2d(3, 4, 3), mode, value)
    found = check(fuse.pad_conv, model, image(3, 2))
    assert found.done == set()
    if "pad" in found.ops:
        assert ("pad_conv", "the padding is not zero padding") in found.declined


def test_a_padding_with_ones_says_why_it_stays():
    model = padded([1, 1, 1, 1], nn.Conv2d(3, 4, 3), value=1.0)
    check_declines(fuse.pad_conv, model, image(3, 2), "the padding is not zero padding")


@pytest.mark.parametrize("pad", [[0, 1], [1, 1, 0, 2], [-1, -1], [1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1]])
def test_a_padding_of_another_form_stays(pad):
    conv = nn.Conv2d(5 if pad[-2:] == [1, 1] and len(pad) == 6 else 3, 4, 2)
    check_declines(
        fuse.pad_conv,
        padded(pad, conv),
        image(3, 2),
        "the padding is asymmetric, negative or not only on spatial axes",
    )


def test_a_padded_value_used_elsewhere_stays():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            y = aten.pad.default(x, [1, 1, 1, 1], "constant", 0.0)
            return self.conv(y), y.relu()

    check_declines(fuse.pad_conv, Net().eval(), image(3, 2), USED_ELSEWHERE)


def test_integer_weights_decline_with_the_reason():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.arange(6).reshape(2, 3))

        def forward(self, x):
            return F.linear(x, self.w) * 3

    check_declines(fuse.conv_mul, Net().eval(), torch.arange(3).reshape(1, 3), fuse.NOT_REAL)
