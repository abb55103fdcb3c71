"""float64 in ONNX models: literals."""

from __future__ import annotations

import pytest
import torch

import tsopt

X = torch.rand(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 4 - 2
EXACT = {
    "clamp": lambda x: x.clamp(-0.3, 0.1),
    "clamp, mixed": lambda x: x.clamp(0.1, 1),
    "clamp min": lambda x: x.clamp(min=0.1),
    "clamp max": lambda x: x.clamp(max=-0.1),
    "deg2rad": torch.deg2rad,
    "rad2deg": torch.rad2deg,
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.1),
    "where": lambda x: torch.where(x > 0, x, 0.1),
    "add": lambda x: torch.add(x, x, alpha=0.1),
    "sub": lambda x: torch.sub(x, x.flip(0), alpha=0.1),
    "pow": lambda x: x.abs() ** 0.3,
    "base": lambda x: 0.3**x,
    "mul": lambda x: x * 0.1,
    "compare": lambda x: (x.clamp(0.1, 0.1) > 0.1).double(),
    "full": lambda x: x + torch.full_like(x, 0.1),
    "new_full": lambda x: torch.cat([x, x.new_full((1, 6), 0.1)]),
    "round": lambda x: torch.round(x, decimals=2),
}


def compiled(model, *example):
    return tsopt.compile(tsopt.transform(tsopt.capture(model, example)), "onnxruntime")


@pytest.mark.parametrize("name", EXACT)
def test_literals_keep_all_their_digits(name):
    model = EXACT[name]
    torch.testing.assert_close(compiled(model, X)(X), model(X), rtol=1e-14, atol=1e-15)


def test_the_largest_integers_are_not_exceeded():
    def to_pcm(x):
        return (x * 2147483648.0).clamp(-2147483648.0, 2147483647.0).to(torch.int32)

    assert torch.equal(compiled(to_pcm, X)(torch.ones_like(X)), to_pcm(torch.ones_like(X)))
