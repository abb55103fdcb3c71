"""What a watch sees of a model that changes, and what it takes for no change."""

from __future__ import annotations

import sys
import types
from collections import OrderedDict

import pytest
import torch
from torch import nn

from tsopt.runtime.calling.model_changes import Watch
from tsopt.runtime.calling.weights import Weights

FACTOR = 1.0
TABLE = {"gain": 1.0}
OFFSET = torch.zeros(4)
UNREAD = 1.0
MANY = dict.fromkeys(map(str, range(100)), 1.0)


def helper(x):
    return x * FACTOR


class Act:
    def __init__(self):
        self.slope = 0.1

    def __call__(self, x):
        return x * self.slope


class OtherAct(Act):
    """Another class with the same attributes."""


def identity(module, args, output):
    return output


class Net(nn.Module):
    temperature = 1.0

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.drop, self.more = nn.Dropout(), nn.ModuleList([nn.Tanh()])
        self.register_buffer("shift", torch.zeros(4))
        self.scale, self.gains, self.extras = 1.0, [1.0], OrderedDict(plus=0.0)
        self.nothing, self.pair, self.plain = [], (torch.ones(4), 1), torch.ones(4)
        self.config = types.SimpleNamespace(gain=1.0, inner=types.SimpleNamespace(bias=0.0))
        self.act, self.calls, self.log, self.many = Act(), 0, [], [1.0] * 100
        self.drop.register_forward_hook(identity)

    @property
    def doubled(self):
        return 2 * self.scale

    def step(self, x, plus=0.0):
        return x + plus

    def forward(self, x):
        self.calls += 1
        self.log.append(x)
        x = self.step(self.drop(self.norm(self.layer(x)))) * self.doubled / self.temperature + self.shift
        x = x * self.gains[0] + self.extras["plus"] + self.pair[0] + self.plain + sum(self.nothing)
        x = helper(self.act(x)) * self.config.gain + self.config.inner.bias
        for layer in self.more:
            x = layer(x)
        return x * TABLE["gain"] + OFFSET + len(self.many) + len(MANY) + ("torch" in sys.modules)


@pytest.fixture
def net():
    return Net().eval().requires_grad_(False)


CHANGES = {
    "in place": lambda net, patch: net.layer.weight.add_(1),
    "other memory": lambda net, patch: setattr(net.layer.weight, "data", torch.ones(4, 4)),
    "turned": lambda net, patch: setattr(net.layer.weight, "data", net.layer.weight.data.t()),
    "cut": lambda net, patch: setattr(net.layer.weight, "data", net.layer.weight.data[:2]),
    "cut, of one dimension": lambda net, patch: setattr(net.shift, "data", net.shift.data[:2]),
    "a dimension more": lambda net, patch: setattr(net.plain, "data", net.plain.data[:, None]),
    "a new parameter": lambda net, patch: setattr(net.layer, "weight", nn.Parameter(torch.ones(4, 4))),
    "a buffer removed": lambda net, patch: delattr(net, "shift"),
    "training below": lambda net, patch: net.norm.train(),
    "a module more": lambda net, patch: net.more.append(nn.Tanh()),
    "a module less": lambda net, patch: net.more.__delitem__(0),
    "a hook": lambda net, patch: net.norm.register_forward_hook(lambda *_: None),
    "a pre-hook": lambda net, patch: net.register_forward_pre_hook(lambda *_: None),
    "all hooks": lambda net, patch: setattr(net.drop, "_forward_hooks", OrderedDict()),
    "a table": lambda net, patch: setattr(net.layer, "_parameters", dict(nn.Linear(4, 4)._parameters)),
    "all attributes": lambda net, patch: net.layer.__dict__.update(nn.Linear(4, 4).eval().__dict__),
    "the order of modules": lambda net, patch: setattr(net, "_modules", dict(reversed(net._modules.items()))),
    "a class": lambda net, patch: setattr(net.more[0], "__class__", nn.Sigmoid),
    "the class of a plain object": lambda net, patch: setattr(net.act, "__class__", OtherAct),
    "forward": lambda net, patch: setattr(net.drop, "forward", lambda x: x),
    "forward of the class": lambda net, patch: patch.setattr(Net, "forward", lambda self, x: x),
    "forward of a class of torch": lambda net, patch: patch.setattr(nn.BatchNorm1d, "forward", None, raising=False),
    "a method of the class": lambda net, patch: patch.setattr(Net, "step", lambda self, x: x),
    "defaults": lambda net, patch: patch.setattr(Net.step, "__defaults__", (1.0,)),
    "an attribute of the class": lambda net, patch: patch.setattr(Net, "temperature", 2.0),
    "an attribute that shadows": lambda net, patch: setattr(net, "temperature", 2.0),
    "a float by way of a property": lambda net, patch: setattr(net, "scale", 2.0),
    "an attribute that is gone": lambda net, patch: delattr(net, "scale"),
    "eps": lambda net, patch: setattr(net.norm, "eps", 1.0),
    "an item of a list": lambda net, patch: net.gains.__setitem__(0, 2.0),
    "an empty list": lambda net, patch: net.nothing.append(2.0),
    "an item of a dict": lambda net, patch: net.extras.update(plus=1.0),
    "a tensor in a tuple": lambda net, patch: net.pair[0].add_(1),
    "a tensor attribute": lambda net, patch: setattr(net, "plain", torch.zeros(4)),
    "a tensor attribute in place": lambda net, patch: net.plain.add_(1),
    "a value more in a long list": lambda net, patch: net.many.append(1.0),
    "a value more in a long global dict": lambda net, patch: patch.setitem(MANY, "more", 1.0),
    "a configuration": lambda net, patch: setattr(net.config, "gain", 2.0),
    "an object below": lambda net, patch: setattr(net.config.inner, "bias", 2.0),
    "a callable object": lambda net, patch: setattr(net.act, "slope", 2.0),
    "a global": lambda net, patch: patch.setitem(globals(), "FACTOR", 2.0),
    "a global function": lambda net, patch: patch.setitem(globals(), "helper", lambda x: x),
    "a global dict": lambda net, patch: patch.setitem(TABLE, "gain", 2.0),
    "a global tensor": lambda net, patch: OFFSET.add_(1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(net, monkeypatch, name):
    watch = Watch(net)
    assert not watch.changed()
    with torch.no_grad():
        CHANGES[name](net, monkeypatch)
    assert watch.changed()
    assert watch.changed(), "and stays one"


@pytest.mark.parametrize("pre", [False, True])
def test_global_hooks_are_seen(net, pre):
    watch = Watch(net)
    register = nn.modules.module.register_module_forward_pre_hook if pre else None
    handle = (register or nn.modules.module.register_module_forward_hook)(lambda *_: None)
    try:
        assert watch.changed()
    finally:
        handle.remove()
    assert not watch.changed()


NO_CHANGES = {
    "nothing": lambda net: None,
    "an attribute that nothing reads": lambda net: setattr(net, "comment", "new"),
    "gradients": lambda net: setattr(net.layer.weight, "grad", torch.ones(4, 4)),
    "the same value again": lambda net: setattr(net, "scale", 1.0),
    "a global that nothing reads": lambda net: globals().__setitem__("UNREAD", 2.0),
    "eval mode again": lambda net: net.eval(),
    "an equal table": lambda net: setattr(net.layer, "_parameters", dict(net.layer._parameters)),
}


@pytest.mark.parametrize("name", NO_CHANGES)
def test_what_is_no_change(net, name):
    watch = Watch(net)
    NO_CHANGES[name](net)
    assert not watch.changed()


@pytest.mark.parametrize("table", ["_forward_hooks", "_parameters", "_modules"])
def test_an_equal_table_is_the_one_that_is_looked_at_from_then_on(net, table):
    watch = Watch(net)
    setattr(net.more, table, getattr(net.more, table).copy())
    assert not watch.changed()
    getattr(net.more, table)["new"] = nn.Tanh() if table == "_modules" else None
    assert watch.changed()


def test_what_grows_whatever_the_model_does_is_no_change(net, monkeypatch):
    watch = Watch(net)
    monkeypatch.setitem(sys.modules, "another_module", types.ModuleType("another_module"))
    assert not watch.changed()


def test_an_attribute_that_nothing_reads_hides_none_that_comes_later(net):
    watch = Watch(net)
    net.comment = "new"
    assert not watch.changed()
    net.temperature = 2.0
    assert watch.changed()


def test_what_the_model_writes_itself_does_not_count(net):
    watch = Watch(net, [net.shift])
    net.shift.add_(1)
    assert not watch.changed()
    net.norm.running_mean.add_(1)
    assert watch.changed()
    watch.leave_out([net.norm.running_mean])
    assert not watch.changed()
    net.plain.add_(1)
    assert watch.changed()


def test_what_a_call_of_the_model_changes_is_left_out_and_the_rest_is_not(net):
    watch = Watch(net)
    net(torch.ones(2, 4))
    assert watch.changed()
    watch.leave_out_changes()
    watch.renew()
    net(torch.ones(2, 4))
    assert not watch.changed()
    assert net.calls == 2
    net.scale = 2.0
    assert watch.changed()


def test_training_is_told_from_other_changes(net):
    watch = Watch(net)
    net.scale = 2.0
    assert not watch.training_changed()
    net.norm.train()
    assert watch.training_changed()


def around(net):
    gain = 1.0

    def called(x):
        return net(x) * gain

    def change(value):
        nonlocal gain
        gain = value

    return called, change


def test_a_function_is_watched_through_its_closure(net):
    called, change = around(net)
    watch = Watch(called)
    assert [*watch.modules] == [*net.modules()]
    change(2.0)
    assert watch.changed()
    watch = Watch(called)
    net.layer.weight.add_(1)
    assert watch.changed()


def test_inference_tensors_are_known_by_their_place():
    with torch.inference_mode():
        net = nn.Linear(2, 2)
    watch = Watch(net)
    assert not watch.changed()
    net.weight = nn.Parameter(torch.ones(2, 2))
    assert watch.changed()


def test_large_containers_are_not_walked_through_at_every_call():
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = list(range(100_000))

        def forward(self, x):
            return x + self.words[0]

    net = Holds()
    watch = Watch(net)
    assert len(watch._held) < 1000
    net.words[7] = 0
    assert not watch.changed()


def test_whether_gradients_are_wanted_counts_where_code_asks():
    class Frozen(nn.Linear):
        def forward(self, x):
            return super().forward(x) if self.weight.requires_grad else x

    for net, asks in ((Frozen(4, 4), True), (nn.Linear(4, 4), False)):
        watch = Watch(net)
        assert not watch.changed()
        net.requires_grad_(False)
        assert watch.changed() is asks


# Weights: known again by their values.


def test_weights_are_known_again_by_their_values_whoever_has_written(net):
    weights = Weights(net)
    assert not weights.touched()
    assert not weights.changed()
    net.layer.weight.detach().numpy()[0] += 1
    assert not weights.touched()
    assert weights.changed()


def test_weights_that_were_written_with_what_they_held_have_not_changed(net):
    weights = Weights(net)
    net.layer.weight.copy_(net.layer.weight.clone())
    assert weights.touched()
    assert not weights.changed()
    assert not weights.touched(), "that is known now"


def test_a_permutation_is_a_change_and_so_is_another_dtype(net):
    weights = Weights(net)
    net.layer.weight.data = net.layer.weight.data.t().contiguous()
    assert weights.changed()
    weights = Weights(net)
    net.double()
    assert weights.changed()


def test_constants_count_and_what_calls_write_does_not(net):
    weights = Weights(net, [net.plain], [net.shift])
    net.shift.add_(1)
    assert not weights.touched()
    assert not weights.changed()
    net.plain.add_(1)
    assert weights.touched()
    assert weights.changed()


def test_without_values_only_writes_of_torch_are_noticed(net):
    weights = Weights(net, exact=False)
    net.layer.weight.detach().numpy()[0] += 1
    assert not weights.changed()
    net.layer.weight.add_(1)
    assert weights.changed()


def test_statistics_in_doubt_are_compared_by_value(net):
    watch = Watch(net)
    for changes in (False, True):
        watch.doubt()
        statistics = net.norm.running_mean, net.norm.running_var
        nn.functional.batch_norm(torch.randn(3, 4), *statistics, training=True, momentum=float(changes))
        assert watch.changed() is changes


def test_statistics_that_hold_nan_have_not_changed(net):
    net.norm.running_mean[1] = float("nan")
    watch = Watch(net)
    watch.doubt()
    assert not watch.changed()
    watch.doubt()
    net.norm.running_mean.data[2] = 1.0
    assert watch.changed()


@pytest.mark.parametrize("what", ["a weight", "what the model writes itself", "another dtype"])
def test_while_statistics_are_in_doubt_all_else_counts_as_ever(net, what):
    watch = Watch(net)
    watch.doubt()
    if what == "a weight":
        net.layer.weight.add_(1)
    elif what == "another dtype":
        net.shift.data = net.shift.double()
    else:
        watch.leave_out([net.shift])
        net.shift.add_(1)
    watch.doubt()
    assert watch.changed() is (what != "what the model writes itself")
