"""`hybridize`: hybrids inside other models, and threads that compile both at once."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import tsopt
from tests.hybrid.models import QUICK, Net, X, close
from tsopt import hybrid_state

CALLED = threading.Event()


class Head(nn.Module):
    """Tells when it is called, and then calls what it holds."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.layer = inner, nn.Linear(3, 2)

    def forward(self, x):
        CALLED.set()
        return self.layer(self.inner(x))


@pytest.fixture
def meanwhile(monkeypatch):
    """Has a thread begin to optimize a hybrid, which goes on only once a model around it is called."""
    CALLED.clear()
    begun, real, first = threading.Event(), hybrid_state.optimize, []

    def optimize(model, example, **options):
        if not first:
            first.append(model)
            begun.set()
            CALLED.wait(60)
        return real(model, example, **options)

    monkeypatch.setattr(hybrid_state, "optimize", optimize)

    def start(inner):
        thread = in_a_thread(lambda: inner(X))
        assert begun.wait(60)
        return thread

    return start


def in_a_thread(call):
    def quietly():
        with torch.no_grad():
            call()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    return thread


AROUND = {
    "hybrid": lambda model: tsopt.hybridize(model, **QUICK)(X),
    "optimize": lambda model: tsopt.optimize(model, X, **QUICK)(X),
    "capture": lambda model: tsopt.capture(model, X),
}


@pytest.mark.parametrize("how", AROUND)
def test_a_model_is_compiled_while_another_thread_compiles_a_hybrid_inside_it(always_faster, meanwhile, how):
    inner = tsopt.hybridize(Net().eval(), **QUICK)
    model = Head(inner).eval()
    threads = [meanwhile(inner), in_a_thread(lambda: AROUND[how](model))]
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "each waits for the other one"
    with torch.no_grad():
        close(inner(X), Net().eval()(X))


def test_two_hybrids_that_call_each_other_are_compiled_in_two_threads(always_faster, monkeypatch):
    together, real = threading.Barrier(2), hybrid_state.optimize
    starts = {"even", "odd"}

    def optimize(model, example, **options):
        if model.__name__ in starts:
            starts.remove(model.__name__)
            together.wait(60)  # both are being compiled
        model(*example.args)
        return real(model, example, **options)

    @tsopt.hybridize(**QUICK)
    def even(x, depth):
        return odd(x * 2, depth - 1) if depth else x

    @tsopt.hybridize(**QUICK)
    def odd(x, depth):
        return even(x * 2, depth - 1) if depth else x

    monkeypatch.setattr(hybrid_state, "optimize", optimize)
    found = {}
    threads = [in_a_thread(lambda f=f: found.__setitem__(f.__name__, f(torch.ones(2), 3))) for f in (even, odd)]
    for thread in threads:
        thread.join(60)
    assert {name: value.tolist() for name, value in found.items()} == {"even": [8, 8], "odd": [8, 8]}


def test_calls_that_do_not_wait_are_counted(always_faster, meanwhile):
    inner = tsopt.hybridize(Net().eval(), **QUICK)
    threads = [meanwhile(inner), in_a_thread(lambda: tsopt.hybridize(Head(inner).eval(), **QUICK)(X))]
    for thread in threads:
        thread.join(60)
    found = tsopt.report(inner)
    assert found.in_eager["another thread compiles it"] >= 1
    assert found.calls > sum(found.in_eager.values())
