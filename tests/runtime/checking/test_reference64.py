from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tsopt.runtime.checking import eager_answers
from tsopt.runtime.checking.accuracy import Oracle


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
