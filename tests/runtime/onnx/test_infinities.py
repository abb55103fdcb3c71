"""Where all that is compared, or attended to, is infinite: engines answer as PyTorch does."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
import torch.nn.functional as F

import tsopt

ENGINES = [
    "onnxruntime",
    pytest.param(
        "openvino",
        marks=pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="not installed"),
    ),
]
X = torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(0))
HIDDEN = torch.stack([torch.full((8, 8), -math.inf), X[0, 1]])[None]
EXTREMES = {
    "amax": lambda x: x.amax(-1),
    "amax, kept": lambda x: x.amax((1, 3), keepdim=True),
    "amin": lambda x: (-x).amin(-1),
    "max": lambda x: x[:, :1].max(),
    "min": lambda x: (-x[:, :1]).min(),
    "max of an axis": lambda x: x.max(-1).values,
    "min of an axis": lambda x: (-x).min(1).values,
    "aminmax": lambda x: x.aminmax(dim=-1),
    "max_pool1d": lambda x: F.max_pool1d(x[0], 4),
    "max_pool1d, padded": lambda x: F.max_pool1d(x[0], 3, 2, 1),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "max_pool2d, padded": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max_pool3d": lambda x: F.max_pool3d(x[None], (1, 2, 2)),
    "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x[0], 1),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 4),
    "in half": lambda x: x.half().amax(-1).float(),
}


def compiled(model, args, engine):
    return tsopt.compile(tsopt.transform(tsopt.capture(model, args)), engine)


@pytest.mark.sliced(4)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", EXTREMES.values(), ids=EXTREMES.keys())
def test_the_extreme_of_infinities_is_infinite(model, engine):
    run = compiled(model, (X,), engine)
    for x in (X, HIDDEN, torch.full_like(X, torch.finfo(torch.float32).min)):
        torch.testing.assert_close(run(x), model(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_mask_that_the_model_writes_is_known_and_a_branch_is_mended_too(engine):
    def model(x, keep):
        hidden = x.tanh().masked_fill(~keep, -math.inf)
        return torch.cond(x.sum() > 0, lambda y: y.amax(-1), lambda y: y.amax(-1) + 1, (hidden,))

    keep = torch.ones(2, 4, dtype=torch.bool)
    x, none = torch.ones(2, 4), keep.clone().index_fill(0, torch.tensor([1]), False)
    torch.testing.assert_close(compiled(model, (x, keep), engine)(x, none), model(x, none))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("given", ["as an input", "made of booleans", "constant"])
def test_attention_to_nothing_is_zero_where_the_mask_is_added(given, engine):
    def added(keep):
        return torch.where(keep, 0.0, -math.inf)[:, None, None]

    keep = torch.ones(2, 8, dtype=torch.bool)
    none = keep.clone().index_fill(0, torch.tensor([1]), False)
    hides_all = added(none)

    def model(x, mask):
        if given == "made of booleans":
            mask = added(mask)
        elif given == "constant":
            mask = hides_all
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    x = torch.randn(2, 2, 8, 16, generator=torch.Generator().manual_seed(0))
    usual, empty = (keep, none) if given == "made of booleans" else (added(keep), added(none))
    expected = model(x, empty)
    assert not expected[1].any()
    torch.testing.assert_close(compiled(model, (x, usual), engine)(x, empty), expected)
