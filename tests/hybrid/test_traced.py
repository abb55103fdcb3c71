"""`hybridize`: torch's tracers, and what they leave behind in a hybrid or in the model."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn

import tsopt
from tests.hybrid.models import QUICK, Net, X, close, eager


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.layer = inner, nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(self.inner(x))


@pytest.mark.filterwarnings("ignore:.*it is in training mode")
@pytest.mark.usefixtures("always_faster")
def test_it_serves_calls_as_before_after_an_export_in_training_mode():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    net = tsopt.hybridize(model.eval(), **QUICK)
    with torch.no_grad():
        wanted = net(X)
        net.train()
        torch.export.export(net, (X,))
        net.eval()
        close(net(X), wanted)
        assert [*tsopt.report(net).in_eager] == ["it is in training mode: call model.eval() first"]


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("how", [torch.fx.symbolic_trace, torch.jit.script])
@pytest.mark.parametrize("make", [lambda: nn.Linear(8, 3), lambda: Net().layers], ids=["a layer", "layers"])
def test_what_contains_it_can_be_traced_and_scripted(make, how, called, always_faster):
    net = tsopt.hybridize(make().eval(), **QUICK)
    model = Around(net).eval()
    with torch.no_grad():
        if called:
            net(X)
        wanted = model(X)
        close(how(model)(X), wanted)
        close(how(net)(X), eager(net))


@pytest.mark.parametrize("dynamic", [None, {"x": {0: "rows"}}])
def test_tensors_of_a_model_can_be_swapped_after_it_was_captured_and_compiled(dynamic, always_faster):
    model = Net().eval()
    program = tsopt.transform(tsopt.capture(model, X, dynamic=dynamic))
    executable = tsopt.compile(program, "onnxruntime", share_weights=True)
    net = tsopt.hybridize(copy.deepcopy(model), **QUICK | {"backends": ("torchscript",)})
    with torch.no_grad():
        close(executable(X), net(X))
    for held in (model, net):
        assert not any(map(weakref.getweakrefs, (*held.parameters(), *held.buffers())))
        torch.utils.swap_tensors(held.layers[0].bias, nn.Parameter(torch.ones(16)))
    with torch.no_grad():
        close(net(X), model(X))
