"""A block runs, and everything is as it was."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from tsopt.compiler.protect import protected, training_flags


@pytest.mark.parametrize("fails", [False, True])
def test_the_world_is_put_back(fails):
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    threads, filters = torch.get_num_threads(), list(warnings.filters)
    try:
        with protected(None):
            torch.rand(3), np.random.rand(3), random.random()
            torch.set_num_threads(threads + 1)
            torch.set_default_dtype(torch.float64)
            warnings.simplefilter("error")
            torch.set_grad_enabled(True)
            if fails:
                raise ValueError
    except ValueError:
        assert fails
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()
    assert random.getstate() == python_state
    assert torch.get_num_threads() == threads
    assert torch.get_default_dtype() == torch.float32
    assert list(warnings.filters) == filters
    assert torch.is_grad_enabled()


def test_the_model_is_put_back():
    model = nn.Sequential(nn.BatchNorm1d(2))
    model.known, model.items, model.unique = {"a": 1}, [1], {1}
    held = model.items
    with protected(model):
        model.new = 1
        model.known["b"] = 2
        model.items.append(2)
        model.unique = None
        model[0].running_mean.fill_(7)
        model[0].num_batches_tracked = torch.tensor(3)
        model.register_buffer("more", torch.ones(1))
        model.training = False
        del model._modules["0"]
    assert not hasattr(model, "new")
    assert (model.known, model.items, model.unique) == ({"a": 1}, [1], {1})
    assert model.items is held
    assert model[0].running_mean.tolist() == [0, 0]
    assert model[0].num_batches_tracked == 0
    assert "more" not in dict(model.named_buffers())
    assert model.training


def test_an_untouched_buffer_is_not_written():
    """NaN included: its version counter would rise, and autograd would complain."""
    model = nn.Module()
    model.register_buffer("b", torch.tensor([1.0, float("nan"), float("inf")]))
    version = model.b._version
    with protected(model):
        pass
    assert model.b._version == version


@pytest.mark.parametrize(
    ("old", "new"), [(0.0, -0.0), (float("inf"), 3.4028234663852886e38), (1.0, float("nan")), (float("nan"), 0.0)]
)
def test_a_buffer_is_put_back_to_the_bit(old, new):
    model = nn.Module()
    model.register_buffer("b", torch.tensor([old, float("nan")]))
    with protected(model):
        model.b[0] = new
    assert repr(model.b[0].item()) == repr(old)


def test_written_parameters_are_put_back_when_named():
    weight = nn.Parameter(torch.zeros(2))
    with protected(None, written=[weight]):
        weight.add_(1)
    assert weight.tolist() == [0, 0]


def test_gradients_are_off_inside_unless_asked_for():
    with protected(None):
        assert not torch.is_grad_enabled()
    with protected(None, inference=False):
        assert torch.is_grad_enabled()


def test_training_flags_come_back_one_by_one():
    model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU()))
    model[0].eval()
    model.train = None  # models override it with effects of their own
    try:
        with training_flags(model, False):
            assert not any(module.training for module in model.modules())
            raise ValueError
    except ValueError:
        pass
    assert [module.training for module in model.modules()] == [True, False, True, True]
