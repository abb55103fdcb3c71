"""Writes that no version counter shows are told to those who watch the weights."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch
from torch import nn

from tsopt.runtime.calling import unseen_writes
from tsopt.runtime.calling.graph_weights import GraphWeights
from tsopt.runtime.calling.model_changes import Watch
from tsopt.runtime.calling.weights import Weights


class ThroughData(torch.optim.Optimizer):
    """As many optimizers outside of torch are written."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-group["lr"])


def fused(kind, **options):
    return lambda params: kind(params, lr=0.1, fused=True, **options)


OPTIMIZERS = {
    "Adam": fused(torch.optim.Adam),
    "amsgrad": fused(torch.optim.AdamW, amsgrad=True),
    "SGD": fused(torch.optim.SGD, momentum=0.9),
    "Adagrad": fused(torch.optim.Adagrad),
    "through .data": lambda params: ThroughData(params, 0.1),
}


def trained(layer, make):
    """One step; returns whether torch counts the write."""
    optimizer, version = make(layer.parameters()), layer.weight._version
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return layer.weight._version != version


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_of_an_optimizer_is_seen_by_all_who_watch(name):
    layer, other = nn.Linear(4, 4), nn.Linear(4, 4)
    watches, weights = [Watch(layer), Watch(other)], [Weights(layer), Weights(other)]
    graphs = [GraphWeights({0: item.weight}) for item in (layer, other)]
    counted = trained(layer, OPTIMIZERS[name])
    assert not counted, "or this test tests nothing"
    assert [watch.changed() for watch in watches] == [True, False]
    assert [item.touched() for item in weights] == [True, False]
    assert [item.changed() for item in weights] == [True, False]
    assert [item.are([held.weight]) for item, held in zip(graphs, (layer, other), strict=True)] == [False, True]


def test_a_view_of_a_parameter_is_written_with_it():
    layer = nn.Linear(4, 4)
    view = layer.weight.detach()[1:]
    watched = GraphWeights({0: view})
    assert watched.are([view])
    trained(layer, OPTIMIZERS["SGD"])
    assert not watched.are([view])


def test_parameters_without_gradients_are_not_written():
    layer = nn.Linear(4, 4)
    layer.weight.requires_grad_(False)
    weight, bias = GraphWeights({0: layer.weight}), GraphWeights({0: layer.bias})
    trained(layer, OPTIMIZERS["SGD"])
    assert weight.are([layer.weight])
    assert not bias.are([layer.bias])


def test_weights_that_were_written_with_the_values_that_they_had_are_the_same():
    layer = nn.Linear(4, 4)
    weights = Weights(layer)
    trained(layer, lambda params: torch.optim.SGD(params, lr=0.0, fused=True))
    assert weights.touched()
    assert not weights.changed()
    assert not weights.touched()


def test_there_is_one_hook_and_it_keeps_nobody_alive():
    Watch(nn.Linear(2, 2))
    gc.collect()
    before = len(unseen_writes._watchers)
    kept = Watch(nn.Linear(2, 2))
    assert len(unseen_writes._watchers) == before + 1
    assert len(unseen_writes._hooks) == 1
    del kept
    gc.collect()
    assert len(unseen_writes._watchers) == before


def test_memory_that_cannot_be_told_is_the_tensor_itself():
    for tensor in (torch.eye(2).to_sparse(), nn.parameter.UninitializedParameter(), torch.empty(0)):
        assert unseen_writes.place_of(tensor) == id(tensor)


@pytest.mark.sliced(1)
def test_who_is_told_does_not_wait_for_torchs_compiler():
    code = "import sys, torch; from tsopt.runtime.calling.model_changes import Watch; Watch(torch.nn.Linear(2, 2)); "
    code += "sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
