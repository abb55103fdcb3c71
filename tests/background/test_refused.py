"""What a job has made nothing for, is begun again when the model has changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tests.background.helpers import QUICK, Net, X, reports

pytestmark = pytest.mark.filterwarnings("ignore:tsopt. .* runs in eager mode:UserWarning")


def settled(net):
    found = net(X)
    tsopt.wait(net)
    return found


def test_a_hook_that_collects_keeps_it_in_eager_only_while_it_is_there():
    net, seen = tsopt.hybridize(Net().eval(), **QUICK), {}
    hook = net.layers[0].register_forward_hook(lambda module, args, output: seen.__setitem__("x", output))
    settled(net)
    assert reports(net)[0].winner_key != "model"
    settled(net)
    assert "outside of the model" in str(tsopt.report(net))
    hook.remove()
    settled(net)
    before = sum(tsopt.report(net).in_eager.values())
    torch.testing.assert_close(net(X), net.layers(X))
    assert sum(tsopt.report(net).in_eager.values()) == before


def test_a_lazy_module_is_compiled_once_it_has_weights():
    net = tsopt.hybridize(nn.Sequential(nn.LazyLinear(16), nn.GELU()).eval(), **QUICK)
    for _ in range(2):
        settled(net)
    assert [report.winner for report in reports(net)] == ["TorchScript"]


class Decides(Net):
    """Is no graph, and counts its calls in a buffer and in Python."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) if float(x.sum()) < 1e9 else x


def test_what_a_refused_model_changes_in_its_own_calls_is_no_change():
    net = tsopt.hybridize(Decides().eval(), **QUICK)
    settled(net)
    first = tsopt.report(net).compile_seconds
    for _ in range(3):
        settled(net)
    found = tsopt.report(net)
    assert found.compile_seconds == first, "it is not tried again"
    assert found.in_eager.total() == found.calls == 4
    assert any("data-dependent" in reason for reason in found.in_eager)
