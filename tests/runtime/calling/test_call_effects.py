"""What a call of the model changes, found without undoing what other threads do meanwhile."""

from __future__ import annotations

import threading
from collections import deque

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


LIST, TABLE, LATEST = [0] * 100, dict.fromkeys(range(100), 0), deque([0] * 100, maxlen=100)


class Records(nn.Module):
    """Records something in its calls, where more is recorded than a call of a hybrid looks at."""

    def __init__(self, record):
        super().__init__()
        self.record, self.own = record, [0] * 100

    def forward(self, x):
        self.record(self)
        return x * 2


RECORDS = {
    "a list": lambda model: LIST.append(1),
    "a dict": lambda model: TABLE.__setitem__(7, TABLE[7] + 1),
    "a deque": lambda model: LATEST.append(1),
}


@pytest.mark.usefixtures("single_threaded")
@pytest.mark.parametrize("name", RECORDS)
def test_what_calls_change_in_long_containers_outside_is_told_and_undone(name):
    before = [*LIST], dict(TABLE), [*LATEST]
    model = Records(RECORDS[name]).eval()
    assert call_effects(model, Watch(model), tsopt.example(X)) == ([name], [])
    assert (LIST, TABLE, [*LATEST]) == before


def test_what_calls_change_in_long_containers_of_the_model_is_told_and_left_out():
    model = Records(lambda model: model.own.append(1)).eval()
    watch = Watch(model)
    assert call_effects(model, watch, tsopt.example(X)) == ([], ["a list"])
    model(X)
    assert not watch.changed()


def test_what_calls_only_read_in_long_containers_is_no_effect():
    model = Records(lambda model: LIST[0] + TABLE[0] + LATEST[0] + model.own[0]).eval()
    watch = Watch(model)
    assert call_effects(model, watch, tsopt.example(X)) == ([], [])
    assert not watch.changed()
