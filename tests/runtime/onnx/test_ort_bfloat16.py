"""bfloat16 inside a model, through ONNX Runtime on a CPU: the values are those of PyTorch's kernels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tsopt.runtime.onnx.ort_bfloat16 import widened

X = torch.randn(6, 16, generator=torch.Generator().manual_seed(0)) * 3
LINEAR = nn.Linear(16, 16).eval().requires_grad_(False)
MODELS = {
    "mul": lambda x: x * x.flip(0),
    "scalar": lambda x: 1 - x / 3,
    "chain": lambda x: (x * 1.1 + 0.3).tanh().exp(),
    "compare": lambda x: torch.where(x > x.flip(0), x, -x),
    "mixed": lambda x: x * torch.arange(16.0),
    "sum": lambda x: x.sum(-1),
    "softmax": lambda x: x.softmax(-1),
    "views": lambda x: torch.cat([x.t(), x.t()])[2:9].reshape(-1),
    "results": lambda x: x.max(-1).values,
    "matmul": lambda x: x @ x.t(),
    "norm": lambda x: torch.nn.functional.layer_norm(x, (16,)),
    "argmax": lambda x: x.argmax(-1),
    "whole": lambda x: x.long() + 1,
    "made": lambda x: torch.zeros_like(x) + torch.ones(16, dtype=torch.bfloat16),
}


@pytest.mark.sliced(4)
@pytest.mark.parametrize("name", MODELS)
def test_values_are_those_of_torch(name):
    def model(x):
        found = MODELS[name](x.bfloat16())
        return found.float() if found.is_floating_point() else found

    program = tsopt.capture(model, X)
    assert "bf16" in program.text
    found, wanted = tsopt.compile(program, "onnxruntime")(X), model(X)
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-7)


def test_each_call_is_rounded():
    def model(x):
        return ((x.bfloat16() * 257) * 1.015625).float()

    x = torch.linspace(0.1, 3, 1000)
    found = tsopt.compile(tsopt.capture(model, x), "onnxruntime", fused=False)(x)
    assert torch.equal(found, model(x))
    assert not torch.equal(found, (x.bfloat16().float() * 257 * 1.015625).bfloat16().float())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 0.1,
        lambda x: x - 0.1,
        lambda x: 0.1 - x,
        lambda x: torch.add(x, x.flip(0), alpha=0.1),
        lambda x: x.abs() ** 0.1,
        lambda x: torch.fmod(x, 0.1),
        lambda x: x * 0.1,
        lambda x: x / 0.1,
    ],
)
def test_literals_are_rounded_where_torch_rounds_them(function):
    def model(x):
        return function(x.bfloat16()).float()

    x = torch.linspace(-3, 3, 1000)
    torch.testing.assert_close(
        tsopt.compile(tsopt.capture(model, x), "onnxruntime")(x), model(x), rtol=2**-8, atol=2e-7
    )
    number = torch.full((8,), 0.1)
    found = tsopt.compile(tsopt.capture(model, number), "onnxruntime")(number)
    assert torch.equal(found, model(number))


def test_branches_are_widened_too():
    def model(x):
        y = x.bfloat16()
        return torch.cond(x.sum() > 0, lambda y: y * 3, lambda y: y * 5, (y,)).float()

    run = tsopt.compile(tsopt.capture(model, X), "onnxruntime")
    for x in (X.abs(), -X.abs()):
        assert torch.equal(run(x), model(x))


def test_nothing_else_is_changed():
    program = tsopt.capture(lambda x: LINEAR(x).relu(), X)
    assert widened(program).text == program.text
