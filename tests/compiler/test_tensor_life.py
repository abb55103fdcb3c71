"""When a tensor ends, as told without a weak reference to it."""

from __future__ import annotations

import copy
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

from tsopt.compiler.capture.shadow import Shadow
from tsopt.compiler.tensor_life import life_of

MADE = [lambda: nn.Parameter(torch.ones(3)), lambda: torch.ones(3)]


@pytest.mark.parametrize("make", MADE)
def test_it_ends_with_the_tensor(make):
    tensor = make()
    life = weakref.ref(life_of(tensor))
    assert life() is life_of(tensor)
    assert not weakref.getweakrefs(tensor)
    del tensor
    assert life() is None


def saved(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize("again", [copy.deepcopy, saved, lambda tensor: pickle.loads(pickle.dumps(tensor))])
def test_a_copy_has_its_own(make, again):
    tensor = make()
    life = weakref.ref(life_of(tensor))
    made = again(tensor)
    assert torch.equal(made, tensor)
    assert life_of(made) is not life()
    del tensor
    assert life() is None


def test_a_shadow_copy_has_its_own():
    layer = nn.BatchNorm1d(3).eval()
    life = weakref.ref(life_of(layer.running_mean))
    shadow = Shadow(layer).called
    layer.running_mean = None
    assert life() is None
    assert shadow.running_mean is not None


def test_it_ends_when_the_tensor_is_swapped():
    tensor, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
    life = weakref.ref(life_of(tensor))
    torch.utils.swap_tensors(tensor, other)
    del other
    assert life() is None
