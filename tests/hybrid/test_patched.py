"""`hybridize`: models that are patched as libraries do it, with another `forward` or another class."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from torch import nn

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
