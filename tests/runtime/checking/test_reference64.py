from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tsopt.compiler.calls.example import Example
from tsopt.runtime.checking import eager_answers
from tsopt.runtime.checking.accuracy import Oracle, verify


def test_an_argmax_that_breaks_a_tie_within_rounding_passes():
    tied = torch.tensor([[1.0, 1.0 + 1e-7, 0.0]])
    model, other = (lambda x: x.argmax(1)), (lambda x: (x.double() + torch.tensor([1e-6, 0, 0])).argmax(1))
    verdict = Oracle(model, Example((tied,)), tsopt.capture(model, tied)).judge(other)
    assert verdict.ok
    assert verdict.test == "decision"
    assert "ties" in str(verdict)


def test_an_argmax_beyond_rounding_is_refused():
    clear = torch.tensor([[1.0, 1.1, 0.0]])
    with pytest.raises(tsopt.AccuracyError, match="1 of 1"):
        verify(lambda x: x.argmax(1), lambda x: torch.zeros(1, dtype=torch.int64), clear)


def test_a_comparison_within_rounding_passes_and_beyond_is_refused():
    near = torch.tensor([1.0, 2.0, 3.0 - 2e-7])
    model = lambda x: x >= 3.0  # noqa: E731
    assert verify(model, lambda x: x >= 3.0 - 1e-6, near).ok
    with pytest.raises(tsopt.AccuracyError):
        verify(model, lambda x: x >= 1.5, near)


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
    verdict = Oracle(model, Example((x,)), program).judge(tsopt.compile(program, "eager"))
    assert verdict.ok is is_right
    assert "float64" in (verdict.test if is_right else verdict.reason)
    assert model.scale.dtype == torch.float32
