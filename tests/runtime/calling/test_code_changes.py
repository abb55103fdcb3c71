"""What a watch sees of changes that only the code of a model leads to: factories, bases, classes."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from tests.runtime.calling.watched import is_seen
from tsopt.runtime.calling.model_changes import Watch

FIRST, SECOND, MIXED, STATIC, MADE, OPERATOR = 1.0, 1.0, 1.0, 1.0, 1.0, 1.0


def block(layer):
    def run(x):
        return layer(x) + 1

    return run


def scaled(by):
    def run(x, by=by):
        return x * by[0]

    return run


def passed_on(function):
    @functools.wraps(function)
    def run(*args):
        return function(*args)

    return run


def factories():
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    first, second = map(block, layers)
    return lambda x: second(first(x)), lambda: layers[0].weight.zero_()


def defaults_of_factories():
    held = [[1.0], [2.0]]
    first, second = map(scaled, held)
    return lambda x: second(first(x)), lambda: held[0].__setitem__(0, 3.0)


def hooks_of_a_factory():
    model, gains = nn.Sequential(nn.Tanh(), nn.Tanh()), [[2.0], [3.0]]
    for layer, gain in zip(model, gains, strict=True):
        layer.register_forward_hook(lambda *of, gain=gain: of[2] * gain[0])
    return model, lambda: gains[0].__setitem__(0, 5.0)


class Decorated(nn.Module):
    @torch.no_grad()
    def first(self, x):
        return x * FIRST

    @torch.no_grad()
    def second(self, x):
        return x * SECOND

    def forward(self, x):
        return self.second(self.first(x))


class Wrapped(Decorated):
    @passed_on
    def first(self, x):
        return x * FIRST

    @passed_on
    def second(self, x):
        return x * SECOND


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.hidden = 1.0, [1.0]

    def forward(self, x):
        return x * self.scale

    def features(self, x):
        return x * self.hidden[0]

    @property
    def shift(self):
        return self.hidden[0]


class Sub(Base):
    def forward(self, x):
        return super().forward(x) + 1


class SubSub(Sub):
    def forward(self, x):
        return super().forward(x) + 1


class CallsBelow(nn.Module):
    def __init__(self, below):
        super().__init__()
        self.backbone = below

    def forward(self, x):
        return self.backbone.features(x)


class AsksBelow(CallsBelow):
    def forward(self, x):
        return x + self.backbone.shift


class Mixin:
    def gain(self):
        return MIXED


class Mixes(Mixin, nn.Module):
    def gain(self):
        return super().gain() * 2

    def forward(self, x):
        return x * self.gain()


class Act:
    def __init__(self):
        self.slope = 1.0

    def __call__(self, x):
        return x * self.slope

    def __mul__(self, x):
        return x * OPERATOR


class SubAct(Act):
    pass


ACT = Act()


class Ops:
    factor = 1.0

    @staticmethod
    def scale(x):
        return x * STATIC

    @classmethod
    def by_class(cls, x):
        return x * cls.factor


class OtherOps(Ops):
    factor = 2.0


class Makes:
    def __init__(self, x):
        self.x = x * MADE


class StaticModule(nn.Module):
    factor = 1.0

    @staticmethod
    def scale(x):
        return x * StaticModule.factor


class Descriptor:
    def __get__(self, item, cls):
        return item.kept * MADE


class Described(nn.Module):
    value = Descriptor()

    def __init__(self):
        super().__init__()
        self.kept = 1.0

    def forward(self, x):
        return x * self.value


class Calls(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = 1.0

    def __call__(self, x):
        return super().__call__(x) * self.factor

    def forward(self, x):
        return x


def uses_static(x):
    return Ops.scale(x)


def uses_class(x):
    return Ops.by_class(x)


def makes(x):
    return Makes(x).x


def counted(x):
    return x * counted.factor


counted.factor = 1.0
ACTIVATION = torch.relu


def activated(x):
    return ACTIVATION(-x)


def attribute(model, name, value=2.0):
    return model, lambda: setattr(model, name, value)


CASES = {
    "the first closure of a factory": factories,
    "the first defaults of a factory": defaults_of_factories,
    "the first hook of a factory": hooks_of_a_factory,
    "a method under a decorator of torch": lambda: (Decorated(), "FIRST"),
    "another one under the same": lambda: (Decorated(), "SECOND"),
    "a method under a decorator": lambda: (Wrapped(), "FIRST"),
    "a method under the same decorator": lambda: (Wrapped(), "SECOND"),
    "what super().forward reads": lambda: attribute(Sub(), "scale"),
    "what the one above it reads": lambda: attribute(SubSub(), "scale"),
    "what a method of a submodule reads": lambda: (
        model := CallsBelow(Base()),
        lambda: setattr(model.backbone, "hidden", [2.0]),
    ),
    "what a method of a submodule holds": lambda: (
        model := CallsBelow(Base()),
        lambda: model.backbone.hidden.__setitem__(0, 2.0),
    ),
    "what a property of a submodule holds": lambda: (
        model := AsksBelow(Base()),
        lambda: model.backbone.hidden.__setitem__(0, 2.0),
    ),
    "what a method of a mixin reads": lambda: (Mixes(), "MIXED"),
    "what an inherited call reads": lambda: attribute(SubAct(), "slope"),
    "what an operator reads": lambda: (lambda x: ACT * x, "OPERATOR"),
    "what __call__ of a module reads": lambda: attribute(Calls(), "factor"),
    "what a descriptor reads": lambda: attribute(Described(), "kept"),
    "a global that a descriptor reads": lambda: (Described(), "MADE"),
    "what a static method reads": lambda: (uses_static, "STATIC"),
    "what a constructor reads": lambda: (makes, "MADE"),
    "an attribute of a function": lambda: attribute(counted, "factor"),
}
REPLACED = {
    "a class": (uses_class, "Ops", OtherOps),
    "a function of torch": (activated, "ACTIVATION", torch.tanh),
}
OF_CLASSES = {
    "what a class method reads": (uses_class, Ops, "factor", 2.0),
    "a static method": (uses_static, Ops, "scale", staticmethod(lambda x: -x)),
    "a class method": (uses_class, Ops, "by_class", classmethod(lambda cls, x: -x)),
    "a class of modules": (StaticModule.scale, StaticModule, "factor", 2.0),
    "what super calls": (SubSub(), Base, "forward", lambda self, x: -x),
}


@pytest.mark.parametrize("case", CASES)
def test_what_code_reads_is_watched(monkeypatch, case):
    model, change = CASES[case]()
    monkeypatch.setattr(counted, "factor", 1.0)
    is_seen(model, change if callable(change) else lambda: monkeypatch.setitem(globals(), change, 2.0))


@pytest.mark.parametrize("case", REPLACED)
def test_a_global_may_be_another_class_or_function(monkeypatch, case):
    model, name, value = REPLACED[case]
    is_seen(model, lambda: monkeypatch.setitem(globals(), name, value))


@pytest.mark.parametrize("case", OF_CLASSES)
def test_attributes_of_classes_that_code_names_are_watched(monkeypatch, case):
    model, cls, name, value = OF_CLASSES[case]
    is_seen(model, lambda: monkeypatch.setattr(cls, name, value))


def test_what_nothing_reads_is_no_change():
    model = CallsBelow(Base())
    watch = Watch(model)
    Ops.comment = "new"
    model.backbone.comment = "new"
    assert not watch.changed()
    del Ops.comment
