"""Candidates as metrics call them: batches of other sizes, and what they read of a module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tests.compiler.helpers import Net
from tsopt.compiler.protect import as_eval
from tsopt.errors import SignatureError
from tsopt.runtime.checking.in_pieces import InPieces

ROWS = torch.randn(12, 8, generator=torch.Generator().manual_seed(3))
torch.manual_seed(0)
MODEL = nn.Linear(8, 3).eval()


def in_pieces(model=MODEL, example=ROWS[:4], **options):
    captured = tsopt.capture(model, example, **options)
    return InPieces(tsopt.compile(captured, "eager"), captured.signature, model)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("count", [4, 12, 6, 1, 5])
def test_batches_of_any_size(count):
    assert torch.allclose(in_pieces()(ROWS[:count]), MODEL(ROWS[:count]), atol=1e-6)


def test_all_outputs_are_put_together():
    class Both(nn.Module):
        def forward(self, x, scale):
            return {"sum": (x * scale).sum(1), "first": (x[:, :1], x > 0)}

    found = in_pieces(Both(), tsopt.example(ROWS[:4], scale=ROWS[:4, :1]))(ROWS[:6], scale=ROWS[:6, :1])
    wanted = Both()(ROWS[:6], ROWS[:6, :1])
    assert torch.equal(found["sum"], wanted["sum"])
    assert all(map(torch.equal, found["first"], wanted["first"]))


@pytest.mark.parametrize("count", [8, 3])
def test_an_output_that_is_not_rows_is_named(count):
    model = Net(lambda self, x: {"logits": x, "loss": x.square().mean()})
    with pytest.raises(
        SignatureError, match=rf"a batch of {count} rows cannot be cut.*\n  why: output 'loss' has shape"
    ):
        in_pieces(model)(ROWS[:count])


@pytest.mark.parametrize("x", [torch.zeros(0, 8), torch.zeros(4, 7), torch.zeros(4, 8).double(), torch.tensor(1.0)])
def test_what_is_not_rows_like_the_examples_is_refused(x):
    with pytest.raises(SignatureError, match="input"):
        in_pieces()(x)


def test_it_has_what_a_metric_needs_of_a_module():
    called = in_pieces()
    assert called.eval() is called.train() is called.to("cpu") is called
    assert not called.training
    assert torch.equal(called.forward(ROWS[:4]), called(ROWS[:4]))
    assert next(called.parameters()) is MODEL.weight
    assert list(called.state_dict()) == ["weight", "bias"]
    assert called.out_features == 3
    assert InPieces(MODEL, None, as_eval(nn.Linear(8, 2).train(), True)).out_features == 2


def test_what_would_run_the_model_is_refused():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 3)

        def forward(self, x):
            return self.inner(x)

        def generate(self, x):
            return self(x)

    called = in_pieces(Pair().eval())
    for name in ("generate", "inner"):
        with pytest.raises(AttributeError, match=f"'{name}' would run the model itself"):
            getattr(called, name)
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = called.missing


def test_it_sees_nan():
    called = InPieces(lambda x: {"y": x / x}, None, MODEL)
    called(torch.ones(1))
    assert not called.has_nan
    called(torch.zeros(1))
    called(torch.ones(1))
    assert called.has_nan
