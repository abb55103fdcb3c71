"""Random numbers of the user's code are those that it would have drawn without tsopt."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import tsopt
from tsopt.compiler.protect import kept, protected
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


@pytest.mark.usefixtures("another_thread")
@pytest.mark.parametrize("keeping", [partial(protected, None), partial(kept, (), ())])
def test_what_another_thread_draws_is_not_drawn_again_where_the_block_draws_nothing(keeping, in_a_thread):
    drawn = []

    def draw():
        drawn.append((torch.rand(1).item(), random.random(), np.random.rand()))

    with keeping(draws=False):
        in_a_thread(draw)
    draw()
    assert not set(drawn[0]) & set(drawn[1])


@pytest.mark.usefixtures("single_threaded")
@pytest.mark.parametrize("keeping", [partial(protected, None), partial(kept, (), ())])
def test_alone_what_is_drawn_after_all_is_put_back(keeping):
    with keeping(draws=False):
        first = torch.rand(1), random.random(), np.random.rand()
    assert (torch.rand(1), random.random(), np.random.rand()) == first
