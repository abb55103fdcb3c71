"""Calling `train()` on the model changes neither the outputs of an Optimized nor what it saves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tests.runtime.racing.helpers import fast_timings
from tsopt.cli.verify import against_record
from tsopt.runtime.calling.optimized import NOW_AND_THEN

X = torch.randn(4, 50, generator=torch.Generator().manual_seed(5))
WINNERS = {"eager": False, "eager + passes": True}
QUICK = {"backends": ("eager",), "seconds": 0.01, "isolate": False, "cache": False, "audit": 0.0}


@pytest.fixture(params=WINNERS)
def optimized(request, monkeypatch):
    fast_timings(monkeypatch, wins=request.param)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 50), nn.BatchNorm1d(50), nn.Dropout(0.5)).eval()
    fast = tsopt.optimize(model, X, **QUICK)
    assert (fast.executable is not None) == WINNERS[request.param]
    return model, fast


@pytest.mark.parametrize("gradients", [False, True])
def test_it_answers_as_it_was_optimized(optimized, gradients):
    model, fast = optimized
    model.requires_grad_(False)
    wanted, more = model(X), model(X[:3])
    statistics = model[1].running_mean.clone()
    model.train()
    with torch.set_grad_enabled(gradients):
        for _ in range(3):
            torch.testing.assert_close(fast(X), wanted)
            torch.testing.assert_close(fast(X[:3]), more)
    assert all(module.training for module in model.modules()), "the flags are the user's"
    assert torch.equal(model[1].running_mean, statistics)
    model.eval()
    torch.testing.assert_close(fast(X), wanted)


def test_a_module_inside_is_noticed_now_and_then(optimized):
    model, fast = optimized
    wanted = model(X)
    model[2].train()
    with torch.no_grad():
        for _ in range(NOW_AND_THEN + 1):
            found = fast(X)
    torch.testing.assert_close(found, wanted)


def test_what_is_saved_are_the_answers_in_eval_mode(optimized, tmp_path):
    model, fast = optimized
    model.train()
    place = fast.save(tmp_path / "m.tsopt")
    assert all(module.training for module in model.modules())
    assert "outputs match" in against_record(place, trust=False).verdict
