"""`hybridize`: values that a model reaches through objects, classes, defaults and partial functions."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import tsopt
from tests.hybrid.models import QUICK, Holding, X, assert_follows, close, eager
from tsopt.runtime.calling import watched_places


class Holds:
    """Has what a model computes with, and methods that read it."""

    def __init__(self) -> None:
        self.w, self.k = torch.ones(8), 2.0

    def __call__(self, x):
        return x * self.w + self.k

    def method(self, x):
        return x * self.w + self.k

    @property
    def double(self):
        return self.k * 2

    @staticmethod
    def shared(x):
        return x * 2


class Config:
    scale = 2.0


CONFIG, OBJECT = Config(), Holds()


@dataclass(slots=True)
class Slotted:
    scale: float = 2.0


class Attributes(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Named(nn.Parameter):
    """A class of its own, as quantization libraries have, and no more than that."""


def by_default(weight):
    def function(x, w=weight):
        return x * w

    return function, weight


def through_object(attribute):
    held = Holds()
    return Holding(held, lambda self, x: x * getattr(self.held, attribute)), held


def of_partial():
    w = torch.ones(8)
    return functools.partial(lambda x, w: x * w, w=w), w


def of_object():
    held = Holds()
    return held, held


def of_bound_method():
    held = Holds()
    return held.method, held


def in_a_module():
    held = Holds()
    return Holding(held, lambda self, x: self.held.method(x)), held


def by_property():
    held = Holds()
    return Holding(held, lambda self, x: x * self.held.double), held


def with_slots():
    held = Slotted()
    return Holding(held, lambda self, x: x * self.held.scale), held


def with_attributes():
    held = Attributes(scale=2.0)
    return Holding(held, lambda self, x: x * self.held.scale), held


def of_a_global_class():
    return lambda x: x * Config.scale, Config


def of_a_global_object():
    return lambda x: OBJECT.method(x), OBJECT


def of_a_named_parameter():
    model = Holding(None, lambda self, x: x * self.w)
    model.w = Named(torch.ones(8), requires_grad=False)
    return model, model.w


def of_keys():
    held = {"relu": True}
    return Holding(held, lambda self, x: x.relu() if self.held.get("relu") else x + 1), held


def of_lists():
    held = [[1.0, 2.0], [3.0]]
    return Holding(held, lambda self, x: x * len(self.held[0]) + sum(self.held[1])), held


def other_key(held):
    held.pop("relu")
    held["gelu"] = True


def scaled(value):
    value.mul_(2)


CASES = {
    "a partial function's tensor": (of_partial, scaled),
    "a callable object's tensor": (of_object, lambda held: held.w.mul_(2)),
    "a callable object's value": (of_object, lambda held: setattr(held, "k", 5.0)),
    "a bound method's object": (of_bound_method, lambda held: setattr(held, "k", 5.0)),
    "a default": (lambda: by_default(torch.ones(8)), scaled),
    "an object's tensor": (in_a_module, lambda held: held.w.mul_(2)),
    "an object's other tensor": (in_a_module, lambda held: setattr(held, "w", torch.full((8,), 3.0))),
    "an object's value": (in_a_module, lambda held: setattr(held, "k", 5.0)),
    "a property": (by_property, lambda held: setattr(held, "k", 5.0)),
    "an object with slots": (with_slots, lambda held: setattr(held, "scale", 3.0)),
    "a dict with attributes": (with_attributes, lambda held: setattr(held, "scale", 3.0)),
    "a global class": (of_a_global_class, lambda held: setattr(held, "scale", held.scale + 1)),
    "a global object": (of_a_global_object, lambda held: setattr(held, "k", held.k + 1)),
    "a parameter of another class": (of_a_named_parameter, scaled),
    "another key with the same value": (of_keys, other_key),
    "a value in another list": (of_lists, lambda held: held[1].insert(0, held[0].pop())),
}


@pytest.mark.parametrize("case", CASES)
def test_what_it_reaches_may_change_between_calls(always_faster, case):
    make, change = CASES[case]
    model, held = make()
    assert_follows(model, lambda: change(held))


@pytest.mark.parametrize("make", [of_partial, of_object, in_a_module, of_a_named_parameter])
@pytest.mark.filterwarnings("ignore:tsopt")
def test_gradients_of_what_it_reaches_are_not_lost(always_faster, make):
    model, held = make()
    net = tsopt.hybridize(model, **QUICK)
    with torch.no_grad():
        net(X)
    (held if isinstance(held, torch.Tensor) else held.w).requires_grad_()
    assert net(X).requires_grad


def test_a_model_of_many_modules_is_watched_too(always_faster):
    model = Holding(2.0, lambda self, x: self.body(x) * self.held)
    model.body = nn.Sequential(*(nn.Identity() for _ in range(500))).eval()
    net = tsopt.hybridize(model, audit=0, **QUICK)
    with torch.no_grad():
        close(net(X), model(X))
        model.held = 3.0
        close(net(X), model(X))


@pytest.mark.parametrize("made", [torch.jit.script, lambda part: torch.jit.freeze(torch.jit.script(part))])
def test_a_part_that_torchscript_holds_is_called(always_faster, tmp_path, made):
    made(nn.Linear(8, 8).eval()).save(tmp_path / "part.ts")
    model = nn.Sequential(nn.Identity(), nn.ReLU()).eval()
    model[0] = torch.jit.load(tmp_path / "part.ts")  # a frozen one has no `training` flag
    net = tsopt.hybridize(model, **QUICK)
    with torch.no_grad():
        for _ in range(2):
            close(net(X), model[1](model[0](X)))


class Defaults:
    """A configuration whose values are those of its class until somebody sets them."""

    scale = 2.0


class WithDefaults(nn.Module):
    def __init__(self):
        super().__init__()
        self.config, self.layer = Defaults(), nn.Linear(8, 8)

    def forward(self, x):
        x = self.layer(x) * self.config.scale
        return x + 1 if getattr(self.config, "shifted", False) else x


@pytest.mark.parametrize(("name", "value"), [("scale", 3.0), ("shifted", True)])
def test_an_attribute_that_an_object_gains_is_used(always_faster, calls, name, value):
    net = tsopt.hybridize(WithDefaults().eval(), **QUICK)
    with torch.no_grad():
        net(X)
        net.config.note = "nothing reads it"
        net(X)
        assert len(calls) == 1
        setattr(net.config, name, value)
        close(net(X), eager(net))
        assert len(calls) == 2


class Gaining:
    """Counts its calls in an attribute that is not there before the first one."""

    def seen(self):
        self.count = getattr(self, "count", 0) + 1
        return self.count


GAINING = Gaining()


@pytest.mark.filterwarnings("ignore:tsopt. .* runs in eager mode:UserWarning")
def test_a_global_object_that_gains_an_attribute_in_each_call_is_outside_of_the_model(always_faster):
    net = tsopt.hybridize(lambda x: x * GAINING.seen(), **QUICK)
    for number in range(1, 6):
        close(net(X), X * number)


class InList(nn.Module):
    """Reads a value of its own from a list."""

    def __init__(self):
        super().__init__()
        self.gain = [1.0]

    def forward(self, x):
        return x * self.gain[0]


def test_each_module_is_looked_at_however_many_there_are(always_faster, calls, monkeypatch):
    monkeypatch.setattr(watched_places, "MOST", 4)
    net = tsopt.hybridize(nn.Sequential(*(InList() for _ in range(20))).eval(), **QUICK, audit=0)
    with torch.no_grad():
        net(X)
        net[19].gain[0] = 2.0
        close(net(X), X * 2)


MANY = [torch.eye(8) for _ in range(80)]


def through_many(x):
    for weight in MANY:
        x = x @ weight
    return x


def test_tensors_in_a_long_list_are_watched(always_faster, calls):
    net = tsopt.hybridize(through_many, **QUICK, audit=0)
    with torch.no_grad():
        net(X)
        MANY[79].mul_(2)
        try:
            close(net(X), X * 2)
        finally:
            MANY[79].div_(2)
    assert len(calls) == 2


@pytest.mark.filterwarnings("ignore:tsopt. .* runs in eager mode:UserWarning")
def test_gradients_reach_tensors_in_a_long_list(always_faster):
    net = tsopt.hybridize(through_many, **QUICK)
    with torch.no_grad():
        net(X)
    MANY[70].requires_grad_()
    try:
        net(X).sum().backward()
        assert MANY[70].grad is not None
    finally:
        MANY[70] = MANY[70].detach().requires_grad_(False)


def test_modules_in_a_long_list_are_followed(always_faster, calls):
    layers = [InList() for _ in range(80)]

    def run(x):
        for layer in layers:
            x = layer(x)
        return x

    net = tsopt.hybridize(run, **QUICK, audit=0)
    net(X)
    layers[79].gain[0] = 2.0
    close(net(X), X * 2)
    assert len(calls) == 2


class Encoder(nn.Module):
    """One of whose methods is a hybrid."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    @tsopt.hybridize(**QUICK)
    def forward(self, x):
        return self.layer(x).relu()


@pytest.mark.filterwarnings("ignore:tsopt. .* runs in eager mode:UserWarning")
@pytest.mark.parametrize("first", [True, False])
def test_gradients_reach_a_module_that_a_call_is_given(always_faster, first):
    model = nn.Sequential(Encoder(), nn.Linear(8, 1))
    if first:
        with torch.no_grad():
            model(X)
    model(X).sum().backward()
    assert model[0].layer.weight.grad is not None


@pytest.mark.filterwarnings("ignore:tsopt. .* runs in eager mode:UserWarning")
def test_gradients_reach_a_module_of_an_object_that_a_call_is_given(always_faster):
    class Agent:
        def __init__(self):
            self.known = {nn.Linear(8, 8)}

    agent = Agent()

    @tsopt.hybridize(**QUICK)
    def act(agent, x):
        (layer,) = agent.known
        return layer(x)

    act(agent, X).sum().backward()
    (layer,) = agent.known
    assert layer.weight.grad is not None


def test_an_attribute_of_a_hybrid_function_is_read(always_faster, calls):
    @tsopt.hybridize(**QUICK, audit=0)
    def scaled(x):
        return x * scaled.scale

    scaled.scale = 2.0
    close(scaled(X), X * 2)
    scaled.scale = 3.0
    close(scaled(X), X * 3)
    assert len(calls) == 2


def test_an_attribute_that_nothing_reads_may_come_and_go(always_faster, calls):
    net = tsopt.hybridize(WithDefaults().eval(), **QUICK)
    with torch.no_grad():
        for number in range(4):
            net.config.note = number
            net(X)
            del net.config.note
            net(X)
    assert len(calls) == 1
