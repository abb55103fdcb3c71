"""Layers in int8 as OpenVINO is given them: fused where it can be, and apart where it would compute something else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compiler.helpers import Net
from tests.passes.quantize.models import (
    Residual,
    images,
    seeded,
)
from tests.passes.quantize.test_static import calibrated
from tsopt.runtime.backends.backend import compile as compile_by
from tsopt.runtime.onnx.openvino_int8 import with_fused_activations, with_layers_apart


def quantizations(program):
    return sum("quantize_per_tensor" in str(node.target) for node in program.calls())


KERNEL = torch.randn(3, 3, 3, 3, generator=seeded(0))


@pytest.mark.parametrize(
    ("model", "fewer"),
    [
        (lambda self, x: F.silu(F.conv2d(x, KERNEL)), 2),
        (lambda self, x: F.silu(F.conv2d(x, KERNEL).relu()), 0),
        (lambda self, x: F.silu(y := F.conv2d(x, KERNEL)) + y, 0),
        (lambda self, x: F.avg_pool2d(F.conv2d(x, KERNEL), 2), 0),
    ],
    ids=["activation", "bounded before", "read by another", "no activation"],
)
def test_openvino_computes_an_activation_with_the_convolution(model, fewer):
    x = images(1)[0]
    made, _ = calibrated(model, x)
    lowered = with_fused_activations(made)
    assert quantizations(made) - quantizations(lowered) == fewer
    with torch.no_grad():
        wanted, found = Net(model)(x), compile_by(made, "openvino")(x)
    assert float((found - wanted).norm() / wanted.norm()) < 0.03


VECTOR = torch.rand(64, generator=seeded(3)) / 2 + 0.5


BETWEEN = {
    "times": lambda y, x: y.relu() * VECTOR,
    "divided": lambda y, x: y / VECTOR,
    "plus": lambda y, x: y.relu() + VECTOR,
    "cut off": lambda y, x: F.relu6(y) * VECTOR,
    "and a sum": lambda y, x: (y.relu() + x) * VECTOR,
}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN.keys())
def test_a_vector_between_two_linear_layers(between, rows):
    """OpenVINO makes one kernel of both, whose results would be whatever is in memory."""
    first, second = (torch.randn(64, 64, generator=seeded(seed)) / 8 for seed in (1, 2))
    calls = [torch.randn(rows, 64, generator=seeded(seed)) for seed in range(4)]
    made, _ = calibrated(lambda self, x: F.linear(between(F.linear(x, first), x), second), *calls)
    assert "aten.leaky_relu" in with_layers_apart(made).text
    run_it = compile_by(made, "openvino")
    for x in calls:
        (wanted,) = made.module()(x)
        assert float((run_it(x) - wanted).norm()) < 0.02 * float(wanted.norm())


class Patches(nn.Module):
    """A class token before patches, as vision transformers have it, with a convolution for the queries."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.patches, self.queries = nn.Conv2d(3, 8, 2, stride=2), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.query, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        grid = self.patches(x)
        rows = self.queries(grid).flatten(2).transpose(1, 2)
        joined = torch.cat([self.token.expand(len(x), -1, -1), rows], dim=1)
        return self.out(self.query(joined).relu())


def test_rows_that_are_joined_are_rounded_together():
    calls = [torch.randn(2, 3, 4, 4, generator=seeded(seed)) for seed in range(4)]
    model = Patches().eval()
    made, _ = calibrated(lambda self, x: model(x), *calls)
    assert "aten.leaky_relu" in with_layers_apart(made).text
    run_it = compile_by(made, "openvino")
    for x in calls:
        (wanted,) = made.module()(x)
        assert float((run_it(x) - wanted).norm()) < 0.02 * float(wanted.norm())


@pytest.mark.parametrize(
    "pooled",
    [lambda x: x.mean(1), lambda x: x.sum(-2), lambda x: x.amax(1), lambda x: x.norm(dim=1), lambda x: x.mean([1])],
    ids=["mean", "sum", "amax", "norm", "list"],
)
@pytest.mark.parametrize("between", [lambda y: y * VECTOR, lambda y: (y + VECTOR) / 2], ids=["times", "plus"])
def test_a_vector_behind_the_mean_of_rows(pooled, between):
    """OpenVINO would multiply by other elements of it."""
    weight = torch.randn(10, 64, generator=seeded(1)) / 8
    calls = [torch.randn(2, 5, 64, generator=seeded(seed)) for seed in range(4)]
    made, _ = calibrated(lambda self, x: F.linear(between(pooled(x)), weight), *calls)
    run_it = compile_by(made, "openvino")
    for x in calls:
        (wanted,) = made.module()(x)
        assert float((run_it(x) - wanted).norm()) < 0.02 * float(wanted.norm())


def test_layers_without_a_vector_between_them_stay_together():
    weight = torch.randn(64, 64, generator=seeded(1)) / 8
    for model in (lambda self, x: F.linear(F.linear(x, weight).relu() * 0.7, weight), Residual().eval()):
        x = images(1)[0] if isinstance(model, Residual) else torch.randn(4, 64, generator=seeded(0))
        made, _ = calibrated(model, x)
        assert with_layers_apart(made).text == made.text
