"""Batch norms folded into the layer before them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.passes.fused_layers import image, net, then, warm
from tests.passes.helpers import aten, capture, check, check_declines, check_fires, find, ops_of, run
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.rewriting.rewrite import USED_ELSEWHERE
from tsopt.passes import FUSE, fuse
from tsopt.passes.constants import ABSORBS

NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("groups", [1, 2])
def test_batch_norm_folds_into_a_convolution(dims, bias, groups):
    model = net(CONVS[dims](4, 6, 3, groups=groups, bias=bias, stride=2, padding=1), warm(NORMS[dims](6)))
    ops = [f"conv{dims}d"]
    found = check_fires(fuse.conv_batch_norm, model, image(4, dims), ops=ops, also=[100 * image(4, dims)])
    assert found.after.numerics == Numerics.ROUNDING


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
def test_batch_norm_folds_into_a_transposed_convolution(dims, groups):
    """Its weight is [in, out / groups, ...]: the scale goes along another axis, group by group."""
    model = net(
        TRANSPOSED[dims](4, 6, 3, groups=groups, stride=2, output_padding=1, dilation=2, bias=groups == 1),
        warm(NORMS[dims](6)),
    )
    check_fires(fuse.conv_batch_norm, model, image(4, dims))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_batch_norm_folds_into_a_convolution_with_named_padding(dims, padding):
    model = net(CONVS[dims](4, 6, 2 if dims == 1 else 3, padding=padding), warm(NORMS[dims](6)))
    check_fires(fuse.conv_batch_norm, model, image(4, dims))


def test_batch_norm_folds_into_a_depthwise_convolution():
    check_fires(fuse.conv_batch_norm, net(nn.Conv2d(4, 4, 3, groups=4), warm(nn.BatchNorm2d(4))), image(4, 2))


def test_batch_norm_without_affine_folds():
    model = net(nn.Conv2d(3, 4, 3), warm(nn.BatchNorm2d(4, affine=False)))
    check_fires(fuse.conv_batch_norm, model, image(3, 2), ops=["conv2d"])


def test_batch_norm_that_rounds_on_purpose_stays():
    norm = warm(nn.BatchNorm1d(4))
    norm.bias.data[1] = 1.5 * 2**23
    check_declines(fuse.conv_batch_norm, net(nn.Linear(3, 4), norm), torch.randn(2, 3), ABSORBS)


def test_a_dead_channel_of_float16_folds_beside_its_shift():
    """Its scale leaves the weights no digits, and the shift leaves the weights none of the result."""
    norm = warm(nn.BatchNorm1d(4))
    norm.weight.data[1], norm.bias.data[1] = 1e-6, 0.5
    check_fires(fuse.conv_batch_norm, net(nn.Linear(3, 4), norm).half(), torch.randn(2, 3).half())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_batch_norm_of_products_with_a_vector_stays(dtype):
    """`linear` without output features: its only axes are those of x."""

    class Dot(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4))

        def forward(self, x):
            return F.linear(x, self.w)

    found = check(fuse.conv_batch_norm, net(Dot(), warm(nn.BatchNorm1d(4))).to(dtype), torch.randn(3, 4, 4).to(dtype))
    assert found.ops == ["linear", "batch_norm"]


def test_batch_norm_keeps_its_eps():
    norm = warm(nn.BatchNorm2d(4, eps=0.5))
    norm.running_var.fill_(1e-3)
    check_fires(fuse.conv_batch_norm, net(nn.Conv2d(3, 4, 1), norm), image(3, 2))


@pytest.mark.parametrize("bias", [True, False])
def test_batch_norm_folds_into_a_linear_layer(bias):
    check_fires(
        fuse.conv_batch_norm,
        net(nn.Linear(4, 6, bias=bias), warm(nn.BatchNorm1d(6))),
        torch.randn(3, 4),
        ops=["linear"],
    )


def test_batch_norm_over_a_sequence_is_not_over_the_features_of_a_linear_layer():
    """[N, C, L]: the norm's channels are axis 1, the features axis 2; here both are 6."""
    check_declines(
        fuse.conv_batch_norm,
        net(nn.Linear(4, 6), warm(nn.BatchNorm1d(6))),
        torch.randn(2, 6, 4),
        "the channels of the norm are not the output features of the linear layer",
    )


@pytest.mark.parametrize("length", [4, 5])
def test_batch_norm_over_a_convolution_without_batch_is_not_over_its_channels(length):
    """[C, L] out of a convolution: the norm takes L for its channels, whether or not it equals C."""
    check(fuse.conv_batch_norm, net(nn.Conv1d(3, 4, 1), warm(nn.BatchNorm1d(length))), torch.randn(3, length))


class Statistics(nn.Module):
    """The overload itself, so that each condition can be set on its own."""

    def __init__(self, *, running: bool = True, training: bool = False, computed: str = "") -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.running, self.training_flag, self.computed = running, training, computed
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("var", torch.rand(4) + 0.5)
        self.gamma = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x):
        mean, var = (self.mean, self.var) if self.running else (None, None)
        gamma = self.gamma
        if self.computed == "gamma":
            gamma = x.mean() * gamma
        if self.computed == "mean":
            mean = x.mean() * mean
        if self.computed == "var":
            var = x.mean() * var
        weight = x.mean() * self.conv.weight if self.computed == "weight" else self.conv.weight
        bias = x.mean() * self.conv.bias if self.computed == "bias" else self.conv.bias
        y = F.conv2d(x, weight, bias)
        return aten.batch_norm.default(y, gamma, None, mean, var, self.training_flag, 0.1, 1e-5, False)


def test_batch_norm_in_training_stays():
    program = capture(Statistics().eval(), image(3, 2))
    norm = find(program, "batch_norm")
    norm.args = (*norm.args[:5], True, *norm.args[6:])
    after, records = run(program, (FUSE,))
    assert ops_of(after) == ops_of(program)
    assert ("conv_batch_norm", fuse.TRAINING) in {(item.rule, item.reason) for item in records[0].declined}


def test_batch_norm_without_running_statistics_stays():
    """In eval mode too it is called with training=True: the user is told of the statistics, not of the mode."""
    model = net(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False))
    check_declines(fuse.conv_batch_norm, model, image(3, 2), fuse.NO_STATISTICS)


@pytest.mark.parametrize("which", ["gamma", "mean", "var", "weight", "bias"])
def test_batch_norm_with_a_computed_weight_stays(which):
    check_declines(fuse.conv_batch_norm, Statistics(computed=which).eval(), image(3, 2), fuse.COMPUTED)


def test_batch_norm_over_a_convolution_used_elsewhere_stays():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 1), warm(nn.BatchNorm2d(4))

        def forward(self, x):
            y = self.conv(x)
            return self.norm(y) + y

    check_declines(fuse.conv_batch_norm, Net().eval(), image(3, 2), USED_ELSEWHERE)


def test_a_weight_shared_by_two_convolutions_is_changed_for_one_alone():
    """D03: the folded weight is a new one; the user's stays as it was."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), warm(nn.BatchNorm2d(4))
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.norm(self.a(x)), self.b(x)

    model = Net().eval()
    before = model.a.weight.detach().clone()
    check_fires(fuse.conv_batch_norm, model, image(3, 2), ops=["conv2d", "conv2d"])
    assert torch.equal(model.a.weight, before)


def test_a_fold_that_would_overflow_stays():
    norm = warm(nn.BatchNorm2d(4, affine=False))
    norm.running_var.fill_(1e-30)
    conv = nn.Conv2d(3, 4, 1)
    conv.weight.data.fill_(3e38)
    check_declines(fuse.conv_batch_norm, net(conv, norm), torch.zeros(1, 3, 2, 2), fuse.NOT_FINITE)


def test_a_large_sum_of_finite_weights_folds():
    """Guards against taking the overflow of the probe's own sum for one of a weight."""
    conv = nn.Conv2d(3, 4, 1)
    conv.weight.data.fill_(2e38)
    check_fires(fuse.conv_mul, then(conv, lambda y: y * 0.5), torch.zeros(1, 3, 2, 2))


def test_an_infinite_weight_does_not_stop_the_fold_of_the_others():
    conv = nn.Conv2d(3, 4, 1)
    conv.weight.data[0, 0] = float("inf")
    check_fires(fuse.conv_mul, then(conv, lambda y: y * 2.0), torch.ones(1, 3, 2, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_batch_norm_folds_in_other_precisions(dtype):
    model = net(nn.Conv2d(3, 4, 3), warm(nn.BatchNorm2d(4))).to(dtype)
    check_fires(fuse.conv_batch_norm, model, image(3, 2).to(dtype), ops=["conv2d"])


def test_a_norm_over_another_axis_declines_with_the_reason():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv1d(3, 4, 1), warm(nn.BatchNorm1d(5))

        def forward(self, x):
            return self.norm(self.conv(x))

    check_declines(fuse.conv_batch_norm, Net().eval(), torch.randn(3, 5), fuse.NO_BATCH)
