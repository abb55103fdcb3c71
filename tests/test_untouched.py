"""That the comparison which says "left as it was" sees what may change."""

from __future__ import annotations

import random
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import tsopt
from bench.untouched import changed, state_of


class Config:
    def __init__(self):
        self.sizes = {"window": [7, 7]}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(2))
        self.config, self.scale, self.array = Config(), 1.0, np.zeros(2)
        self.seen = {1}

    def forward(self, x):
        return self.layer(x)


def forward(self, x):
    return x


OF_THE_MODEL = {
    "model.scale": lambda m: setattr(m, "scale", -0.0),
    "model.config": lambda m: m.config.sizes["window"].append(7),
    "model.array": lambda m: m.array.fill(1),
    "model.seen": lambda m: m.seen.add(2),
    "model.left": lambda m: setattr(m, "left", None),
    "model._buffers": lambda m: m.count.neg_(),
    "layer._parameters": lambda m: m.layer.weight.requires_grad_(False),
    "layer._forward_hooks": lambda m: m.layer.register_forward_hook(lambda *_: None),
    "layer.training": lambda m: m.layer.eval(),
    "model: class": lambda m: setattr(type(m), "forward", forward),
}
OF_THE_PROCESS = {
    "random state": lambda patch: random.seed(0) or np.random.seed(0) or torch.manual_seed(0),
    "environment": lambda patch: patch.setenv("TSOPT_TEST", "1"),
    "directory": lambda patch: patch.chdir("/"),
    "warning filters": lambda patch: warnings.simplefilter("ignore"),
    "default dtype": lambda patch: torch.set_default_dtype(torch.float64),
    "threads": lambda patch: torch.set_num_threads(torch.get_num_threads() + 1),
    "grad mode": lambda patch: torch.set_grad_enabled(False),
    "determinism": lambda patch: torch.use_deterministic_algorithms(True),
    "streams": lambda patch: patch.setattr(sys, "stdout", sys.__stderr__),
    "import path": lambda patch: patch.syspath_prepend("somewhere"),
    "recursion limit": lambda patch: sys.setrecursionlimit(sys.getrecursionlimit() + 1),
}


@pytest.fixture
def switches():
    dtype, threads, limit = torch.get_default_dtype(), torch.get_num_threads(), sys.getrecursionlimit()
    kept, grad = Model.forward, torch.is_grad_enabled()
    with warnings.catch_warnings():
        yield
    Model.forward = kept
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(grad)
    torch.use_deterministic_algorithms(False)
    sys.setrecursionlimit(limit)


@pytest.mark.usefixtures("switches")
@pytest.mark.parametrize("name", OF_THE_MODEL)
def test_a_change_of_the_model_is_seen(name):
    model, call = Model(), tsopt.example(torch.ones(1, 2))
    before = state_of(model, call)
    assert not changed(before, state_of(model, call))
    OF_THE_MODEL[name](model)
    assert changed(before, state_of(model, call)) == [name]


@pytest.mark.usefixtures("switches")
@pytest.mark.parametrize("name", OF_THE_PROCESS)
def test_a_change_of_the_process_is_seen(name, monkeypatch):
    model, call = Model(), tsopt.example(torch.ones(1, 2))
    before = state_of(model, call)
    OF_THE_PROCESS[name](monkeypatch)
    assert changed(before, state_of(model, call)) == [name]


def test_a_change_of_the_inputs_is_seen():
    call = tsopt.example({"x": [torch.ones(2)]})
    before = state_of(torch.relu, call)
    call.args[0]["x"][0].mul_(2)
    assert changed(before, state_of(torch.relu, call)) == ["inputs"]
