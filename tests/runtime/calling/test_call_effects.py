"""What a call of the model changes, found without undoing what other threads do meanwhile."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import tsopt
from tsopt.runtime.calling.call_effects import call_effects
from tsopt.runtime.calling.model_changes import Watch

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Counts(nn.Module):
    """Counts its calls, while another thread does something."""

    def __init__(self):
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(8), 0

    def forward(self, x):
        self.calls += 1
        thread = threading.Thread(target=self.meanwhile)
        thread.start()
        thread.join()
        return self.norm(x)

    def meanwhile(self):
        pass


@pytest.mark.usefixtures("another_thread")
def test_what_another_thread_loads_meanwhile_stays_and_is_noticed():
    model = Counts().eval()
    watch = Watch(model)
    model.meanwhile = lambda: model.norm.running_mean.fill_(3.0)
    with torch.no_grad():
        assert call_effects(model, Watch(model), tsopt.example(X)) == ([], ["'calls'"])
        assert (model.calls, float(model.norm.running_mean[0])) == (0, 3.0)
        watch = Watch(model)
        call_effects(model, watch, tsopt.example(X))
    assert watch.changed()


def test_what_calls_change_is_no_change_from_then_on():
    model = Counts().eval()
    watch = Watch(model)
    with torch.no_grad():
        assert call_effects(model, watch, tsopt.example(X)) == ([], ["'calls'"])
        model(X)
    assert not watch.changed()
