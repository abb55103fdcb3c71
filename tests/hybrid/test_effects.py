"""`hybridize`: what calls change besides their results, in the model and outside of it."""

from __future__ import annotations

import contextvars
import threading

import pytest
import torch
from torch import nn

import tsopt
from tests.hybrid.models import QUICK, Net, X, close, eager
from tsopt.hybrid import compiled_of


@pytest.mark.filterwarnings("ignore:tsopt")
def test_what_a_call_of_the_model_counts_is_no_change(always_faster, calls):
    class Counts(Net):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    net = tsopt.hybridize(Counts().eval(), **QUICK)
    with torch.no_grad():
        net(X)
        eager(net)
        net(X)
    assert len(calls) == 1
    assert net.calls == 1, "only the eager call has counted"


def test_a_hook_that_keeps_what_it_sees_is_called_each_time(always_faster):
    seen = {}
    model = Net().eval()
    model.layers[0].register_forward_hook(lambda module, args, output: seen.__setitem__("x", output))
    net = tsopt.hybridize(model, **QUICK)
    found = []

    def calls():
        for x in (X, 2 * X, 3 * X):
            net(x)
            found.append(torch.equal(seen["x"], model.layers[0].forward(x)))

    with torch.no_grad(), pytest.warns(UserWarning, match="a call changes .* outside of the model"):
        calls()
    assert found == [True] * 3


LONG = [0] * 100


def test_a_long_list_outside_of_the_model_grows_in_each_call(always_faster):
    class Records(Net):
        def forward(self, x):
            LONG.append(1)
            return super().forward(x)

    net = tsopt.hybridize(Records().eval(), **QUICK)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="a call changes a list outside of the model"):
            net(X)
        before = len(LONG)
        for _ in range(3):
            net(X)
    assert len(LONG) == before + 3


def test_a_hook_that_only_computes_is_compiled(always_faster):
    model = Net().eval()
    model.layers[0].register_forward_hook(lambda module, args, output: output + 1)
    net = tsopt.hybridize(model, **QUICK)
    with torch.no_grad():
        close(net(X), eager(net))
    assert compiled_of(net).fast.executable is not None


def test_a_cache_that_the_first_call_fills_is_no_reason_for_eager(always_faster):
    kept = {}

    class Cached(nn.Module):
        def forward(self, x):
            if "factor" not in kept:
                kept["factor"] = 3.0
            return x * kept["factor"]

    net = tsopt.hybridize(Cached().eval(), **QUICK)
    with torch.no_grad():
        close(net(X), X * 3)
    assert compiled_of(net).fast.executable is not None


def test_a_callback_is_called_each_time(always_faster):
    class Tells(nn.Module):
        def forward(self, x, callback):
            callback(x.shape)
            return x * 2

    seen = []
    net = tsopt.hybridize(Tells().eval(), **QUICK)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="an input is a function: list.append"):
            net(X, seen.append)
        before = len(seen)
        close(net(X, seen.append), X * 2)
    assert len(seen) == before + 1


SEEN, COUNTED, LOCAL = [], contextvars.ContextVar("counted", default=0), threading.local()


class Logs(nn.Module):
    """Counts in a method that is not `forward`."""

    def seen(self, x):
        SEEN.append(1)
        return x


class OfMethod(nn.Module):
    def __init__(self):
        super().__init__()
        self.logs = Logs()

    def forward(self, x):
        return self.logs.seen(x) * 2


class InContext(nn.Module):
    def forward(self, x):
        COUNTED.set(COUNTED.get() + 1)
        return x * 2


class InThread(nn.Module):
    def forward(self, x):
        LOCAL.calls = getattr(LOCAL, "calls", 0) + 1
        return x * 2


class OfClass(nn.Module):
    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return x * 2


COUNTS = {
    OfClass: lambda: OfClass.calls,
    OfMethod: lambda: len(SEEN),
    InContext: COUNTED.get,
    InThread: lambda: getattr(LOCAL, "calls", 0),
}


@pytest.mark.usefixtures("single_threaded")
@pytest.mark.parametrize("cls", COUNTS)
def test_what_each_call_changes_outside_is_left_to_eager(always_faster, cls):
    before, net = COUNTS[cls](), tsopt.hybridize(cls().eval(), **QUICK)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="a call changes .* outside of the model"):
            net(X)
        for _ in range(3):
            net(X)
    assert COUNTS[cls]() == before + 4


def test_what_a_context_has_only_during_a_call_is_no_change(always_faster):
    class Sets(nn.Module):
        def forward(self, x):
            reset = COUNTED.set(3)
            try:
                return x * COUNTED.get()
            finally:
                COUNTED.reset(reset)

    net = tsopt.hybridize(Sets().eval(), **QUICK)
    with torch.no_grad():
        for _ in range(3):
            close(net(X), X * 3)
    assert (tsopt.report(net).in_eager, compiled_of(net).fast.executable is None) == ({}, False)


class Keeps(nn.Module):
    """Keeps intermediate values as attributes, for its caller to read."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.calls, self.all = None, 0, []

    def forward(self, x):
        self.last, self.calls = x * 2, self.calls + 1
        self.all.append(x)
        self.attention = x + 1
        return x * 2


class Fills(nn.Module):
    """Fills a cache at the first call, keeps a table as an attribute from then on, and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {}
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if "factor" not in self.kept:
            self.kept["factor"] = torch.ones(())
        if not hasattr(self, "table"):
            self.table = torch.ones(())
        self.calls += 1
        return x * self.kept["factor"] * self.table


def test_attributes_that_each_call_changes_are_told(always_faster):
    net = tsopt.hybridize(Keeps().eval(), **QUICK)
    with torch.no_grad(), pytest.warns(UserWarning, match="compiled calls do not change its attributes") as caught:
        net(X)
    (warning,) = caught
    assert all(name in str(warning.message) for name in ("'last'", "'calls'", "'attention'", "a list"))


def test_a_cache_and_a_buffer_are_no_such_attributes(always_faster):
    net = tsopt.hybridize(Fills().eval(), **QUICK)
    with torch.no_grad():
        for _ in range(3):
            close(net(X), X)
    assert (net.calls, tsopt.report(net).in_eager) == (3, {})


class Asked(nn.Module):
    """Leaves something behind if it is asked to."""

    def __init__(self, outside):
        super().__init__()
        self.layer, self.outside, self.last = nn.Linear(8, 8), outside, None

    def forward(self, x, keep=False):
        y = self.layer(x)
        if keep and self.outside:
            SEEN.append(len(y))
        elif keep:
            self.last = y
        return y


@pytest.mark.usefixtures("single_threaded")
@pytest.mark.parametrize("warmup", [0, 1])
def test_a_call_of_another_form_that_changes_what_is_outside_of_the_model(always_faster, warmup):
    net = tsopt.hybridize(Asked(outside=True).eval(), warmup=warmup, **QUICK)
    with torch.no_grad():
        net(X)
        assert compiled_of(net).fast.executable is not None
        before = len(SEEN)
        with pytest.warns(UserWarning, match="a call changes a list outside of the model"):
            answers = [net(X, keep=True) for _ in range(4)]
        for answer in answers:
            close(answer, eager(net))
    assert len(SEEN) == before + 4
    assert tsopt.report(net).calls == 5


def test_a_call_of_another_form_that_changes_an_attribute_is_told_of(always_faster):
    net = tsopt.hybridize(Asked(outside=False).eval(), warmup=0, **QUICK)
    with torch.no_grad():
        net(X)
        with pytest.warns(UserWarning, match="compiled calls do not change its attribute 'last'") as caught:
            _ = [net(X[:rows], keep=True) for rows in (4, 3, 2)]
    assert [warning.filename for warning in caught] == [__file__]
    assert net.last is None


@pytest.mark.parametrize("compiled", [False, True], ids=["before", "after"])
def test_a_global_hook_that_keeps_what_it_sees_is_called_each_time(compiled, always_faster):
    seen = []
    net = tsopt.hybridize(Net().eval(), **QUICK)
    with torch.no_grad():
        if compiled:
            net(X)
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(output))
        try:
            with pytest.warns(UserWarning, match="a call changes .* outside of the model"):
                net(X)
            count = len(seen)
            net(X)
        finally:
            handle.remove()
    assert count == len([*net.modules()])
    assert len(seen) == 2 * count


class State:
    def __init__(self, names, calls=0):
        self.names, self.calls = names, calls


class OfProcess:
    def __init__(self):
        self.state = State({"torch": torch})

    def look(self, counts):
        self.state = State(dict(self.state.names), self.state.calls + counts)


REGISTRY = OfProcess()


@pytest.mark.filterwarnings("ignore:tsopt")
@pytest.mark.parametrize("counts", [False, True])
def test_an_object_outside_that_is_made_anew_as_it_was_is_no_effect(counts, always_faster):
    class Looks(Net):
        def forward(self, x):
            REGISTRY.look(counts)
            return super().forward(x)

    net = tsopt.hybridize(Looks().eval(), **QUICK)
    with torch.no_grad():
        for _ in range(3):
            net(X)
    assert bool(tsopt.report(net).in_eager) is counts
