"""What a call of `optimize` leaves as it was."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import tsopt


class Restless(nn.Module):
    """Writes buffers and attributes in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0
        self.history: list[int] = []

    def forward(self, x):
        self.calls += 1
        self.history.append(self.calls)
        self.count.add_(1)
        return self.norm(x) + torch.rand_like(x) * 0


def surroundings(model):
    """Modes of torch, and what the model counts."""
    return (
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        random.getstate(),
        model.training,
        model.norm.training,
        model.calls,
        list(model.history),
    )


@pytest.mark.parametrize("options", [{}, {"eval_mode": True}])
def test_the_model_and_the_world_are_as_they_were(options):
    model = Restless()
    if not options:
        model.eval()
    x = torch.randn(8, 4)
    kept = x.clone()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    before = surroundings(model)
    rng, np_rng = torch.get_rng_state(), np.random.get_state()[1].copy()
    tsopt.optimize(model, x, backends=("eager", "torchscript"), seconds=0.01, threads=1, **options)
    assert surroundings(model) == before
    assert torch.equal(x, kept)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in weights.items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert (np.random.get_state()[1] == np_rng).all()
    assert torch.equal(torch.get_rng_state(), rng)
