"""The estimate against what torch really keeps alive when the program is run call by call."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.passes.helpers import capture
from tests.passes.programs import Builder, measured, random_program
from tsopt.compiler.analysis.liveness import Lives, peak_bytes
from tsopt.compiler.graph.ops import aten


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (part.view(2, 5, 4, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        weights = (q @ k.transpose(-2, -1)).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).reshape(2, 5, 16))


MODELS = {
    "chain": lambda x: x.sin().cos().tanh() + 1,
    "branches": lambda x: x.sin() + x.cos() * x.tanh(),
    "views": lambda x: (x + 1).t().reshape(-1)[4:].view(2, -1).sin(),
    "a view is returned": lambda x: ((x + 1).t(), (x * 2).sin()),
    "the input is returned": lambda x: (x, x.t(), x.sin().sum()),
    "several results": lambda x: torch.topk(x.sin(), 2)[0].sum() + x.max(1)[1].sum(),
    "one of several results": lambda x: F.relu(torch.std_mean(x.exp())[0]) + x,
    "split and cat": lambda x: torch.cat([p.sin() for p in (x * 2).split(1, 0)], 1).sum(),
    "a value nobody uses": lambda x: (x.exp(), x + 1)[1].sin(),
    "a wide value between": lambda x: (x[:, None, :] * x[None]).sum(1).sin().sum(),
    "expanded": lambda x: x.sin().sum(0, keepdim=True).expand(50, -1).relu() + 1,
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_peak_is_what_an_interpreter_keeps_alive(name):
    x = torch.randn(4, 6)
    program = capture(MODELS[name], x)
    assert peak_bytes(program) == measured(program, x) > 0


def test_the_peak_of_an_attention_block():
    x = torch.randn(2, 5, 16)
    program = capture(Attention().eval(), x)
    assert peak_bytes(program) == measured(program, x) > 0


def test_inputs_and_weights_are_not_counted():
    b = Builder()
    x, w = b.input(torch.randn(8)), b.weight(torch.randn(1000))
    assert peak_bytes(b.program(b.call(aten.slice.Tensor, w, 0, 0, 8), x)) == 0


def test_a_view_keeps_alive_what_it_looks_at():
    b = Builder()
    x = b.input(torch.randn(1000))
    part = b.call(aten.slice.Tensor, b.call(aten.sin.default, x), 0, 0, 10)
    other = b.call(aten.sin.default, x)
    program = b.program(b.call(aten.sum.default, other), part)
    assert peak_bytes(program) == 4000 + 4000 + 4


def test_what_is_returned_lives_to_the_end():
    b = Builder()
    x = b.input(torch.randn(1000))
    first, last = b.call(aten.sin.default, x), b.call(aten.sum.default, b.call(aten.cos.default, x))
    assert peak_bytes(b.program(first, last)) == 4000 + 4000 + 4
    b = Builder()
    x = b.input(torch.randn(1000))
    first, last = b.call(aten.sin.default, x), b.call(aten.sum.default, b.call(aten.cos.default, x))
    assert peak_bytes(b.program(last)) == 4000 + 4


def test_a_program_without_calls_needs_nothing():
    b = Builder()
    assert peak_bytes(b.program(b.input(torch.randn(3)))) == 0


def test_empty_and_scalar_values_have_their_size():
    b = Builder()
    x = b.input(torch.randn(0, 3))
    assert peak_bytes(b.program(b.call(aten.sum.default, b.call(aten.sin.default, x)))) == 4


@pytest.mark.parametrize("seed", range(30))
def test_the_peak_of_random_graphs(seed):
    program = random_program(seed, 25)
    assert peak_bytes(program) == measured(program, torch.randn(4, 4))


def test_any_order_of_the_same_calls_is_measured_by_the_same_lives():
    program = capture(MODELS["branches"], torch.randn(4, 6))
    lives, calls = Lives.of(program), list(program.calls())
    sin, cos, tanh, mul, add = calls
    assert lives.peak(calls) == 4 * 4 * 6 * 4  # the sine waits while the product is made
    assert lives.peak([cos, tanh, mul, sin, add]) == 3 * 4 * 6 * 4
