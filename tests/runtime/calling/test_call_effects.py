"""What a call of the model changes, found without undoing what other threads do meanwhile."""

from __future__ import annotations

import threading
from collections import deque

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import tsopt
from tsopt.compiler.outside import kept_outside
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


class Keeps(nn.Module):
    """Keeps something of each call, or of the first."""

    def __init__(self, keep):
        super().__init__()
        self.layer, self.keep, self.held, self.seen = nn.Linear(8, 8), keep, {}, []
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("last", None)
        self.by_size = {}

    def forward(self, x):
        y = self.layer(x)
        self.keep(self, y)
        return y


KEPT = {
    "a dict": (lambda model, y: model.held.update(y=y), ["a dict"]),
    "a list": (lambda model, y: model.seen.__setitem__(slice(None), [y]), ["a list"]),
    "a buffer": (lambda model, y: setattr(model, "mean", y.mean(0)), ["'mean'"]),
    "a buffer that was none": (lambda model, y: setattr(model, "last", y), ["'last'"]),
    "a parameter": (lambda model, y: setattr(model.layer, "bias", nn.Parameter(y.mean(0))), ["'bias'"]),
    "what is written to a buffer": (lambda model, y: model.mean.copy_(y.mean(0)), []),
    "the first of its size": (lambda model, y: model.by_size.setdefault(len(y), torch.zeros(3)), []),
}


@pytest.mark.usefixtures("single_threaded")
@pytest.mark.parametrize("name", KEPT)
def test_what_the_model_keeps_of_each_call_is_told(name):
    keep, told = KEPT[name]
    model = Keeps(keep).eval()
    watch = Watch(model, [model.mean])
    with torch.no_grad():
        assert call_effects(model, watch, tsopt.example(X)) == ([], told)


SEEN = []


class Logs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls, self.held = nn.Linear(8, 8), 0, {}

    def forward(self, x):
        y = self.layer(x).relu()
        self.calls, self.held["y"] = self.calls + 1, y
        SEEN.append(1)
        return y


@pytest.mark.usefixtures("single_threaded")
@pytest.mark.parametrize("watched", [True, False])
def test_optimize_tells_what_compiled_calls_do_not_change(watched, always_faster, recwarn):
    model = Logs().eval()
    options = {"seconds": 0.05, "isolate": False, "cache": False, "backends": ("torchscript",)}
    with kept_outside(model):
        fast = tsopt.optimize(model, X, **options, audit=0.01 if watched else 0)
    assert fast.report.winner == "TorchScript"
    assert (model.calls, model.held, SEEN) == (0, {}, [])
    told = [str(item.message) for item in recwarn if "compiled calls" in str(item.message)]
    assert told == watched * [
        "tsopt: Logs: compiled calls do not change its attribute 'calls' and a dict that it holds and a list outside "
        "of it, which each call of the model itself does: call the model itself where that matters"
    ]


@pytest.mark.usefixtures("single_threaded")
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_what_is_computed_of_weights_alone_is_no_effect():
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8)), prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5))
    with torch.no_grad():
        assert call_effects(model.eval(), Watch(model), tsopt.example(X)) == ([], [])
