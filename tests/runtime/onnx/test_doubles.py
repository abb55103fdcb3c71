"""float64 in ONNX models: computed in float64, or refused."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import tsopt
from tests.runtime.helpers import save
from tests.runtime.onnx.in_a_block import InABlock

X = torch.rand(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 4 - 2
WEIGHTS = torch.rand(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
BAG = torch.tensor([[0, 1, 4], [2, 2, 3]])
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
NARROWED = {
    "celu": F.celu,
    "isinf": torch.isinf,
    "isposinf": torch.isposinf,
    "isneginf": torch.isneginf,
    "nan_to_num": torch.nan_to_num,
    "log10": torch.log10,
    "softplus": lambda x: F.softplus(x, beta=0.3),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "elu": lambda x: F.elu(x, alpha=0.3),
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
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


def norm(x):
    centered = x - x.mean(-1, keepdim=True)
    return centered / torch.sqrt((centered**2).mean(-1, keepdim=True) + 1e-5) * WEIGHTS[0, 0] + WEIGHTS[0, 1]


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x @ (x.t() * 0.1),
        lambda x: (x @ x.t()) / 0.3,
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
        norm,
    ],
)
def test_onnx_runtime_merges_no_number_into_an_attribute(model, tmp_path):
    made = tsopt.compile(tsopt.capture(model, X), "onnxruntime")
    loaded = tsopt.load(save(made, tmp_path / "bundle", model, X))
    for run in (made, loaded):
        torch.testing.assert_close(run(X), model(X), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", NARROWED)
def test_what_is_computed_in_float32_is_refused_by_name_and_place(name):
    model = InABlock(NARROWED[name])
    with pytest.raises(tsopt.BackendError, match="of float64 in float32") as caught:
        compiled(model, X)
    assert "block" in (caught.value.where or "")
    found = compiled(model, X.float())(X.float())
    torch.testing.assert_close(found, model(X.float()), equal_nan=True)


def test_it_is_found_where_the_operands_are_of_other_dtypes():
    with pytest.raises(tsopt.BackendError, match="of float64 in float32"):
        compiled(lambda bag: F.embedding_bag(bag, WEIGHTS), BAG)


def test_it_is_found_in_a_branch():
    def model(x):
        return torch.cond(x.sum() > 0, lambda x: F.celu(x), lambda x: x * 2, (x,))

    with pytest.raises(tsopt.BackendError, match="float64 in float32"):
        compiled(model, X)


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x.float().exp().double(),
        lambda x: F.celu(x.float()).double() * 0.1,
        lambda x: x * torch.tensor(0.1),
        lambda x: x + x.float(),
        lambda x: (x > 0).double() * 0.1,
        lambda x: x.float() * 0.1 + x.mean().float(),
        lambda x: F.linear(x, torch.ones(3, 6, dtype=torch.float64)).softmax(-1),
    ],
)
def test_float32_that_the_program_asks_for_is_taken(model):
    torch.testing.assert_close(compiled(model, X)(X), model(X), rtol=1e-6, atol=1e-7)
