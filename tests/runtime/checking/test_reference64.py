from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tsopt.runtime.checking import eager_answers
from tsopt.runtime.checking.accuracy import Oracle
from tsopt.runtime.checking.reference64 import rounded_from_float64


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


def seen_as(called, *args):
    """What it returns as it is, and rounded from float64."""
    torch.manual_seed(0)
    plain = called(*args)
    torch.manual_seed(0)
    return plain, rounded_from_float64(called, args, 60.0)


X = torch.rand(64, generator=torch.Generator().manual_seed(0))


def test_results_are_rounded_from_float64_where_these_are_near():
    plain, found = seen_as(lambda x: ((x + 100) - 100, x * 2, x > 0.5), X)
    assert not torch.equal(plain[0], X)
    assert torch.equal(found[0], X), "in float64 the sum loses nothing"
    assert all(map(torch.equal, plain[1:], found[1:]))


def far(x):
    return (x + 1e7) - 1e7


def drawn(x):
    return x * torch.rand(64) + (x + 100) - 100


def refused(x):
    if x.dtype == torch.float64:
        raise TypeError("no float64")
    return (x + 100) - 100


@pytest.mark.parametrize("called", [far, drawn, refused])
def test_results_stay_that_float64_says_nothing_about(called):
    assert torch.equal(*seen_as(called, X))


def test_float64_has_its_time():
    scale = torch.ones(64)
    assert torch.equal(rounded_from_float64(without_end, (X, scale), 0.05), exactly(X, scale))


def test_a_result_that_is_a_view_of_another_stays_one():
    def called(x):
        y = (x + 100) - 100
        return y, y[:8]

    whole, part = rounded_from_float64(called, (X,), 60.0)
    assert torch.equal(whole, X)
    assert part.data_ptr() == whole.data_ptr()


def test_weights_that_are_returned_are_not_written():
    weight = nn.Parameter(torch.ones(64))
    with torch.no_grad():
        rounded_from_float64(lambda x, w: (x * w, w, w.view(8, 8)), (X, weight), 60.0)
    assert weight._version == 0


def test_what_a_call_writes_to_whole_numbers_is_written_once():
    count, weight = torch.zeros(1, dtype=torch.long), nn.Parameter(torch.ones(64))
    seen = []

    def counted(x, n, w):
        n += 1
        seen.append(w)
        return (x + 100) - 100

    with torch.no_grad():
        found = rounded_from_float64(counted, (X, count, weight), 60.0)
    assert torch.equal(found, X)
    assert int(count) == 1
    assert all(w is weight for w in seen), "no copy of the weights, which are large"
