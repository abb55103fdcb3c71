"""Random numbers of the user's code are those that it would have drawn without tsopt."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import tsopt
from tsopt.compiler.random_state import RandomState, seed_all


def drawn():
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]


def test_a_state_is_restored():
    state = RandomState.now()
    first = drawn()
    seed_all(7)
    assert drawn() != first
    state.restore()
    assert drawn() == first


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), np.random.rand, random.random])
def test_a_state_is_current_until_something_is_drawn(draw):
    state = RandomState.now()
    assert state.is_current()
    draw()
    assert not state.is_current()
    state.restore()
    assert state.is_current()


def test_a_seed_decides_what_is_drawn():
    seed_all(7)
    first = drawn()
    seed_all(7)
    assert drawn() == first


def test_no_seed_is_left_for_a_device_that_is_not_in_use_yet():
    """`torch.manual_seed` leaves one: the GPU would then draw what tsopt has seeded, not what the user has."""
    torch.manual_seed(42)
    left = torch.cuda._lazy_seed_tracker.get_calls()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    tsopt.optimize(model, torch.randn(2, 4), backends=("torchscript",), seconds=0.05)
    assert torch.cuda._lazy_seed_tracker.get_calls() == left
