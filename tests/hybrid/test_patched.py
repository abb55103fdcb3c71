"""`hybridize`: models that are patched as libraries do it, with another `forward` or another class."""

from __future__ import annotations

import copy
import functools
import types

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import tsopt
from tests.hybrid.models import QUICK, Net, X, close
from tsopt.hybrid import compiled_of


def by_closure(net):
    old = net.forward
    net.forward = lambda x: old(x) * 2


def by_partial(net):
    def doubled(old, x):
        return old(x) * 2

    net.forward = functools.partial(doubled, net.forward)


def by_method(net):
    old = net.forward
    net.forward = types.MethodType(lambda self, x: old(x) * 2, net)


def by_class(net):
    net.forward = types.MethodType(lambda self, x: type(self).forward(self, x) * 2, net)


def by_attribute(net):
    net.old_forward = net.forward
    net.forward = functools.update_wrapper(functools.partial(lambda self, x: self.old_forward(x) * 2, net), net.forward)


@pytest.mark.parametrize("patch", [by_closure, by_partial, by_method, by_class, by_attribute])
@pytest.mark.parametrize("make", [Net, lambda: nn.Linear(8, 3)], ids=["own class", "class of torch"])
@pytest.mark.parametrize("when", ["before the first call", "after it"])
def test_a_forward_that_wraps_the_models_own_is_compiled_with_it(always_faster, calls, patch, make, when):
    net = tsopt.hybridize(make().eval(), **QUICK)
    with torch.no_grad():
        plain = type(tsopt.hybridize(net, active=False)).forward(net, X)
        if when == "after it":
            net(X)
        patch(net)
        for _ in range(5):
            close(net(X), plain * 2)
        assert compiled_of(net).fast.executable is not None
        assert len(calls) == (2 if when == "after it" else 1), "what is behind the hybrid is not part of the model"
        del net.forward
        close(net(X), plain)


def test_a_wrapped_forward_may_be_given_back_and_wrapped_again(always_faster):
    net = tsopt.hybridize(Net().eval(), **QUICK)
    with torch.no_grad():
        plain, first = net(X), net.forward
        by_closure(net)
        by_closure(net)
        close(net(X), plain * 4)
        net.forward = first
        close(net(X), plain)


@pytest.mark.filterwarnings("ignore:tsopt. .* runs in eager mode:UserWarning")
def test_a_wrapped_forward_has_gradients_in_training_mode():
    net = tsopt.hybridize(nn.Linear(8, 3), **QUICK)
    by_closure(net)
    net(X).sum().backward()
    close(net.bias.grad, torch.full((3,), 2.0 * len(X)))


@pytest.mark.parametrize("make", [lambda: Net().eval(), lambda: lambda x: x * 2], ids=["module", "function"])
def test_what_an_inner_hybrid_counts_is_no_effect_of_a_function_around_it(always_faster, make):
    inner = tsopt.hybridize(make(), **QUICK)
    outer = tsopt.hybridize(lambda x: inner(x) + 1, **QUICK)
    with torch.no_grad():
        for _ in range(3):
            close(outer(X), tsopt.hybridize(inner, active=False)(X) + 1)
    assert compiled_of(outer).fast.executable is not None
    assert tsopt.report(outer).in_eager == {}


def test_what_an_inner_hybrid_counts_is_no_effect_of_a_module_around_it(always_faster):
    outer = tsopt.hybridize(nn.Sequential(tsopt.hybridize(Net(), **QUICK), nn.ReLU()).eval(), **QUICK)
    with torch.no_grad():
        for _ in range(3):
            close(outer(X), outer[1](Net().eval()(X)))
    assert compiled_of(outer).fast.executable is not None
    assert tsopt.report(outer).in_eager == {}


class Double(nn.Module):
    def forward(self, weight):
        return weight * 2


class Tripled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 3


def linear(x, weight, bias):
    return nn.functional.linear(x, weight, bias)


@pytest.mark.filterwarnings("ignore:tsopt. .* change between calls:UserWarning")
@pytest.mark.parametrize("when", ["before the first call", "after it"])
def test_a_parametrization_of_the_root(always_faster, when):
    model = nn.Linear(8, 3).eval()
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    net = tsopt.hybridize(model, **QUICK)
    with torch.no_grad():
        if when == "after it":
            net(X)
        parametrize.register_parametrization(net, "weight", Double())
        close(net(X), linear(X, weight * 2, bias))
        close(net.weight, weight * 2)
        parametrize.register_parametrization(net, "bias", Double())
        close(net(X), linear(X, weight * 2, bias * 2))
        net.parametrizations.weight.original.mul_(3)
        close(net(X), linear(X, weight * 6, bias * 2))
        for twin in (copy.deepcopy(net), tsopt.hybridize(net, active=False)):
            close(twin(X), net(X))
        parametrize.remove_parametrizations(net, "weight")
        close(net(X), linear(X, weight * 6, bias * 2))
        parametrize.remove_parametrizations(net, "bias", leave_parametrized=False)
        close(net(X), linear(X, weight * 6, bias))
    assert compiled_of(net) is not None
    assert type(model) is nn.Linear


def test_a_parametrization_that_the_root_had_before_is_removed(always_faster):
    model = nn.Linear(8, 3).eval()
    parametrize.register_parametrization(model, "weight", Double())
    net = tsopt.hybridize(model, **QUICK)
    with torch.no_grad():
        wanted = net(X)
        parametrize.remove_parametrizations(net, "weight")
        close(net(X), wanted)
        net.weight.mul_(2)
        close(net(X) - net.bias, 2 * (wanted - net.bias))
    assert compiled_of(net).fast.executable is not None


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
@pytest.mark.filterwarnings("ignore:tsopt. .* runs in eager mode:UserWarning")
def test_a_norm_of_the_roots_weight(always_faster, norm):
    net = tsopt.hybridize(nn.Linear(8, 3), **QUICK)
    norm(net)
    net(X).sum().backward()
    net.eval()
    with torch.no_grad():
        close(net(X), linear(X, net.weight, net.bias))


@pytest.mark.parametrize("of", ["hybrid", "model"])
def test_another_class_of_the_root(always_faster, of):
    model = nn.Linear(8, 3).eval()
    net = tsopt.hybridize(model, **QUICK)
    assert net.__class__ is nn.Linear
    (net if of == "hybrid" else model).__class__ = Tripled
    with torch.no_grad():
        for _ in range(2):
            close(net(X), nn.Linear.forward(model, X) * 3)
    assert compiled_of(net).model.__class__ is net.__class__ is Tripled
    assert isinstance(net, Tripled) or of == "model"


def test_the_class_of_another_object_of_its_class(always_faster):
    net = tsopt.hybridize(nn.Linear(8, 3).eval(), **QUICK)
    other = type(net)(8, 3)
    assert other.__class__ is nn.Linear
    other.__class__ = Tripled
    assert type(other) is Tripled
    net.__class__ = type(net)
    assert type(tsopt.hybridize(net, active=False)) is nn.Linear
