"""Multiples of a divisor have whole quotients, which no engine rounds to another number."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsopt

pytestmark = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="not installed")
DIVISORS = torch.tensor([7.0, 41.0, 60.0, 0.1])
MULTIPLES = torch.arange(-100, 101.0)[:, None] * DIVISORS


def compiled(model, *args, passes=True):
    program = tsopt.capture(model, args)
    return tsopt.compile(tsopt.transform(program) if passes else program, "openvino")


class Weeks(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("days", DIVISORS.clone())

    def forward(self, x):
        return (x / self.days).ceil()


def in_a_branch(x):
    return torch.cond(x.sum() > 1e6, lambda x: x * 2, lambda x: (x / 7).ceil(), (x,))


@pytest.mark.parametrize("passes", [True, False], ids=["transformed", "captured"])
@pytest.mark.parametrize(
    "model",
    [
        lambda x: torch.ceil(x / 7),
        lambda x: torch.floor(x / 60),
        lambda x: (x / 41).clamp(-1000, 1000).int(),
        lambda x: (x / 7) == torch.tensor(3.0),
        lambda x: x / 0.1 >= 5,
        lambda x: (1 - (x / -7).reshape(-1)).trunc(),
        lambda x: torch.addcdiv(x, x, DIVISORS).frac(),
        lambda x: torch.where(x > 7, x / 7, x).amax(1).floor(),
        lambda x: (x / 60 / 60).floor(),
        lambda x: (x * 24 / 7).ceil(),
        lambda x: F.interpolate((x / 7)[None], scale_factor=2).ceil(),
        lambda x: (x[:, :1].expand(-1, 3) / 7).mean(1).ceil(),
        lambda x: F.avg_pool1d(x[:, :1].expand(-1, 4) / 7, 2).ceil(),
        lambda x: (x[:, :1].expand(-1, 4) / 7).prod(1).ceil(),
        lambda x: F.pixel_shuffle((x / 7).reshape(1, 4, -1, 1), 2).ceil(),
        lambda x: ((x / 7) - 3).tanh().ceil(),
        in_a_branch,
        Weeks(),
    ],
)
def test_multiples_of_a_divisor_make_whole_quotients(model, passes):
    assert torch.equal(compiled(model, MULTIPLES, passes=passes)(MULTIPLES), model(MULTIPLES))


def test_of_whole_numbers_too():
    lengths = torch.arange(-300, 300)
    assert torch.equal(compiled(lambda x: (x / 60).ceil(), lengths)(lengths), (lengths / 60).ceil())


def test_infinities_and_nan_are_divided_as_well():
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0, 3e38, 1e-45])
    found, wanted = compiled(lambda x: ((x / 7).ceil(), x / 7), x)(x), ((x / 7).ceil(), x / 7)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0, equal_nan=True)


def test_a_divisor_may_differ_from_call_to_call():
    run = compiled(lambda x, y: (x / y).ceil(), torch.randn(201, 4), torch.rand(4) + 1)
    assert torch.equal(run(MULTIPLES, DIVISORS), (MULTIPLES / DIVISORS).ceil())


@pytest.mark.parametrize("engine", ["onnxruntime", "torchscript", "eager"])
def test_other_engines_divide(engine):
    program = tsopt.transform(tsopt.capture(Weeks(), MULTIPLES))
    assert torch.equal(tsopt.compile(program, engine)(MULTIPLES), Weeks()(MULTIPLES))


@pytest.mark.parametrize("passes", [True, False], ids=["transformed", "captured"])
def test_the_nearest_pixel_is_that_of_the_quotient(passes):
    def model(x, grid):
        return F.grid_sample(x, (grid / 7).expand(1, 2, 41, 2), mode="nearest", align_corners=True)

    image, grid = torch.arange(1.0, 10).reshape(1, 1, 3, 3), torch.arange(-20, 21.0)[:, None] * 3.5
    assert torch.equal(compiled(model, image, grid, passes=passes)(image, grid), model(image, grid))


@pytest.mark.parametrize(
    ("then", "kept"),
    [("ceil", True), ("softmax", False), ("matmul", False), ("relu", False), ("less", True), ("mean", True)],
)
def test_only_quotients_that_are_rounded_or_compared_cost_a_division(then, kept):
    import numpy as np
    from openvino import Model, opset13

    from tsopt.runtime.onnx.openvino_quotients import KEPT, keep_divisions

    x, y = (opset13.parameter([4], np.float32, name=name) for name in "xy")
    quotient = opset13.divide(x, y)
    moved = opset13.reshape(opset13.add(quotient, y), [2, 2], special_zero=False)
    ends = {
        "ceil": lambda: opset13.ceiling(moved),
        "softmax": lambda: opset13.ceiling(opset13.softmax(moved, 1)),
        "matmul": lambda: opset13.ceiling(opset13.matmul(moved, moved, False, False)),
        "mean": lambda: opset13.ceiling(opset13.reduce_mean(moved, np.array([1]))),
        "relu": lambda: opset13.relu(moved),
        "less": lambda: opset13.less(moved, opset13.reshape(x, [2, 2], special_zero=False)),
    }
    keep_divisions(Model([ends[then]()], [x, y], "model"))
    assert (KEPT in quotient.get_rt_info()) == kept
