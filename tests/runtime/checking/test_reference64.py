from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tsopt.runtime.checking import eager_answers
from tsopt.runtime.checking.accuracy import Oracle
from tsopt.runtime.checking.reference64 import called_in_float64


class Twofold(nn.Module):
    """Has kernels of its own in eager mode, as fused attention has; the captured program is x * scale."""

    def __init__(self, eager, scale=1.0):
        super().__init__()
        self.eager, self.scale = eager, nn.Parameter(torch.full((64,), scale))

    def forward(self, x):
        return x * self.scale if torch.compiler.is_compiling() else self.eager(x, self.scale)


def exactly(x, scale):
    return (x + 1000) * scale - 1000 * scale


def shifted(x, scale):
    return x * scale + 3e-5


def in_place(x, scale):
    with torch.no_grad():
        scale.mul_(1.0)
    return exactly(x, scale)


def in_place_of_a_view(x, scale):
    with torch.no_grad():
        scale.view(8, 8)[0].mul_(1.0)
    return exactly(x, scale)


def in_place_of_many(x, scale):
    with torch.no_grad():
        torch._foreach_mul_([scale], 1.0)
    return exactly(x, scale)


def without_end(x, scale):
    while x.dtype == torch.float64:
        x = x + 0
    return exactly(x, scale)


def in_new_memory(x, scale):
    made = torch.zeros(64)
    made[:32] = exactly(x, scale)[:32]
    made.view(8, 8)[4:] = exactly(x, scale).view(8, 8)[4:]
    return made


@pytest.mark.parametrize(
    ("eager", "is_right"),
    [
        (exactly, True),
        (in_new_memory, True),
        (shifted, False),
        (in_place, False),
        (in_place_of_a_view, False),
        (in_place_of_many, False),
        (without_end, False),
    ],
)
def test_rounding_of_kernels_that_only_eager_has_is_told_from_another_function(monkeypatch, eager, is_right):
    monkeypatch.setattr(eager_answers, "PATIENCE", 0.2)
    model, x = Twofold(eager).eval(), torch.linspace(-1, 1, 64)
    program = tsopt.capture(model, x)
    assert not torch.allclose(tsopt.compile(program, "eager")(x), model(x))
    verdict = Oracle(model, tsopt.example(x), program).judge(tsopt.compile(program, "eager"))
    assert verdict.ok is is_right
    assert "float64" in (verdict.test if is_right else verdict.reason)
    assert model.scale.dtype == torch.float32


class Convolved(nn.Module):
    """Functions of torch that refuse operands of several types before any op is called."""

    def __init__(self, then=lambda x, weight: x):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.attention = nn.Conv1d(4, 6, 3), nn.MultiheadAttention(6, 2, batch_first=True)
        self.then = then

    def forward(self, x):
        y = self.conv(x).transpose(1, 2)
        return self.then(self.attention(y, y, y)[0], self.conv.bias)


@torch.no_grad()
def test_functions_that_refuse_weights_of_another_type_compute_in_float64():
    model, x = Convolved().eval(), torch.randn(2, 4, 16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (found,) = called_in_float64(model, lambda: tsopt.example(x.clone()))
    torch.testing.assert_close(found, model.double()(x.double()), rtol=1e-12, atol=1e-12)
    assert all(torch.equal(value, before[name].double()) for name, value in model.state_dict().items())


def added(x, weight):
    return x + weight.add_(x.sum())


def put(x, weight):
    torch.add(weight, x.sum(), out=weight)
    return x


@torch.no_grad()
@pytest.mark.parametrize("then", [added, put])
def test_a_write_to_a_weight_beside_such_functions_is_refused(then):
    model, x = Convolved(then).eval(), torch.randn(2, 4, 16)
    before = model.conv.bias.clone()
    assert called_in_float64(model, lambda: tsopt.example(x.clone())) is None
    assert torch.equal(model.conv.bias, before)
