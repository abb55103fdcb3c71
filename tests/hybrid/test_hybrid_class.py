"""Other objects of a hybrid's class: they have weights, slots and copies of their own."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch

import tsopt
from tests.hybrid.models import QUICK, Net, Slotted, X, close, relu
from tsopt.compiler.model_reads import reads_of
from tsopt.hybrid import compiled_of


class Makes(Net):
    @classmethod
    def with_shift(cls, value):
        made = cls().eval()
        made.shift.fill_(value)
        return made


@pytest.fixture
def net_and_others(always_faster):
    """A hybrid, and other objects of its class, which shift by 5 instead of 1."""
    net = tsopt.hybridize(Makes().eval(), **QUICK)
    replica = net._replicate_for_data_parallel()
    replica._buffers["shift"] = torch.full((3,), 5.0)
    with torch.no_grad():
        net(X)
        return net, (type(net).with_shift(5.0), net.with_shift(5.0), replica)


def test_other_objects_of_its_class_have_weights_of_their_own(net_and_others):
    net, others = net_and_others
    with torch.no_grad():
        for other in others:
            assert isinstance(other, Makes)
            assert compiled_of(other) is None
            close(other(X), net(X) + 4)
            close(other.forward(X), net(X) + 4)


def test_copies_of_other_objects_of_its_class_are_of_the_models(net_and_others):
    net, (other, *_) = net_and_others
    with torch.no_grad():
        for twin in (copy.copy(other), copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
            assert type(twin) is Makes
            close(twin(X), net(X) + 4)


def test_another_object_of_its_class_can_be_hybridized(net_and_others):
    net, (other, *_) = net_and_others
    again = tsopt.hybridize(other, **QUICK)
    with torch.no_grad():
        close(again(X), net(X) + 4)
        other.shift.fill_(6.0)
        close(again(X), net(X) + 5)
    assert compiled_of(again).fast is not None
    assert compiled_of(net).model.shift is not other.shift


def test_a_class_derived_from_its_class_is_as_one_of_the_models(net_and_others):
    net, _ = net_and_others

    class More(type(net)):
        def forward(self, x):
            return super().forward(x) + 1

    more = More.with_shift(5.0)
    with torch.no_grad():
        for made in (more, copy.deepcopy(more), tsopt.hybridize(more, **QUICK)):
            close(made(X), net(X) + 5)
    assert compiled_of(made).fast is not None


def test_other_objects_of_its_class_have_slots_of_their_own():
    net = tsopt.hybridize(Slotted().eval(), **QUICK)
    other = type(net)().eval()
    other.factor = 5.0
    assert (net.factor, other.factor, tsopt.hybridize(other, active=False).factor) == (3.0, 5.0, 5.0)
    del other.factor
    assert net.factor == 3.0


def test_a_function_around_a_hybrid_is_not_the_hybrid():
    net = tsopt.hybridize(relu, **QUICK)

    @functools.wraps(net)
    def more(x):
        return net(x) + 1

    assert compiled_of(more) is None
    assert tsopt.hybridize(more, active=False) is more


class Reduced(Net):
    """Says itself how it is made again."""

    def __init__(self, made=0):
        super().__init__()
        self.made = made

    def __reduce__(self):
        return type(self), (self.made + 1,)


class Single(Net):
    def __reduce_ex__(self, protocol):
        return "SINGLE"


def test_copies_of_other_objects_of_its_class_are_made_as_the_models_class_says():
    other = type(tsopt.hybridize(Reduced().eval(), **QUICK))()
    for twin in (copy.copy(other), copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        assert (type(twin), twin.made) == (Reduced, 1)
    other = type(tsopt.hybridize(Single().eval(), **QUICK))()
    assert copy.copy(other) is copy.deepcopy(other) is other
    assert other.__reduce_ex__(2) == "SINGLE"


class Predictor:
    """A callable object with a state and a method."""

    def __init__(self):
        self.k = 2.0

    def __call__(self, x):
        return x * self.k

    def half(self, x):
        return self(x) / 2


def test_a_callable_object_keeps_its_attributes_and_methods(always_faster, calls):
    original = Predictor()
    net = tsopt.hybridize(original, **QUICK, audit=0)
    close(net(X), X * 2)
    net.k = 5.0
    assert original.k == net.k == 5.0
    close(net(X), X * 5)
    close(net.half(X), X * 2.5)
    assert len(calls) == 2
    assert "half" in dir(net)
    del net.k
    assert not hasattr(original, "k")
    assert tsopt.hybridize(net, active=False) is original
    assert tsopt.report(net) is not None


@pytest.mark.parametrize(
    ("again", "is_hybrid"),
    [(copy.copy, True), (copy.deepcopy, True), (lambda net: pickle.loads(pickle.dumps(net)), False)],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_callable_object_is_copied_like_a_module(always_faster, again, is_hybrid):
    net = tsopt.hybridize(Predictor(), **QUICK)
    net(X)
    other = again(net)
    other.k = 3.0
    close(other(X), X * 3)
    assert net.k == 2.0
    assert hasattr(other, "_tsopt_compiled") == is_hybrid


def test_a_hybrid_of_an_object_is_read_as_the_object(always_faster, calls):
    inner = tsopt.hybridize(Predictor(), **QUICK)
    inner(X)
    outer = tsopt.hybridize(lambda x: inner(x).relu() + 1, **QUICK, audit=0)
    close(outer(X), (X * 2).relu() + 1)
    assert tsopt.report(outer).in_eager == {}
    assert len(reads_of(lambda x: inner(x)).objects) == 1
    inner.k = 3.0
    close(outer(X), (X * 3).relu() + 1)


@pytest.mark.filterwarnings("ignore:tsopt. .* runs in eager mode:UserWarning")
def test_a_hybrid_of_an_object_is_an_argument_like_a_function(always_faster):
    inner = tsopt.hybridize(Predictor(), **QUICK)
    outer = tsopt.hybridize(lambda x, call: call(x), **QUICK)
    close(outer(X, inner), X * 2)
    (reason,) = tsopt.report(outer).in_eager
    assert "an input is a function: _Callable" in reason


class Cached:
    double = tsopt.hybridize(functools.lru_cache(lambda self, x: x * 2), **QUICK)


def test_what_binds_as_a_method_still_does(always_faster):
    close(Cached().double(X), X * 2)
