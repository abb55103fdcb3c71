"""Races of a small model with made-up times, for the tests of the cache."""

from __future__ import annotations

import math

import torch
from torch import nn

import tsopt
from tests.runtime.helpers import ENTRY, KEY, candidates
from tsopt.runtime.racing import cache
from tsopt.runtime.racing import race as race_module
from tsopt.runtime.racing.row import EAGER
from tsopt.runtime.racing.speedup import Timing

X = torch.linspace(-1, 1, 8).reshape(2, 4)
TITLE = "eager + passes"


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()


RACING = candidates("eager", "onnxruntime")
PACES = {EAGER: 4.0, TITLE: 1.0, "TorchScript": 2.0}  # milliseconds; who is not here is as slow as eager


def set_paces(monkeypatch):
    """Who is how fast is what the test says."""

    def measured(calls, inputs, **_):
        for call in calls.values():
            call(*inputs[0].args, **inputs[0].kwargs)
        return {name: Timing((PACES.get(name, 4.0),) * 7) for name in calls}

    monkeypatch.setattr(race_module, "measure", measured)


def optimize(model=None, **options):
    given = {"backends": ("eager", "torchscript"), "seconds": 0.02} | options
    return tsopt.optimize(make() if model is None else model, X, **given)


def kept():
    cache.keep(KEY, ENTRY)
    return cache.directory() / f"{KEY}.json"


def entry() -> cache.Entry:
    (path,) = cache.entries()
    return cache.find(path.stem, candidates("eager", "torchscript"), 0.0, math.inf)
