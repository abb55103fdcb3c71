"""`hybridize`: what cannot be compiled, a call or a model for a while, says nothing of what comes then."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import tsopt
from tests.hybrid.models import QUICK, Net, X, close, eager
from tsopt import hybrid_state
from tsopt.hybrid import compiled_of
from tsopt.runtime.calling import refused
from tsopt.runtime.calling.optimized import Optimized

pytestmark = pytest.mark.filterwarnings("ignore:tsopt. .* runs in eager mode:UserWarning")


def is_compiled(net):
    fast = compiled_of(net).fast
    return isinstance(fast, Optimized) and fast.executable is not None


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def first_attempts_only(monkeypatch):
    """No time passes that would pay for further ones."""
    monkeypatch.setattr(refused.time, "monotonic", lambda: 0.0)


class Plain(torch.Tensor):
    pass


class Takes(Net):
    """Takes whatever else is passed."""

    def forward(self, x, *more, tell=None):
        if tell is not None:
            tell(len(x))
        x = x.to_dense() if x.layout != torch.strided else x
        return super().forward(x)


SEEN = []
CALLS = {
    "malformed": lambda net: net(torch.ones(4, 5)),
    "subclass": lambda net: net(X.as_subclass(Plain)),
    "sparse": lambda net: net(X.to_sparse()),
    "function": lambda net: net(X, tell=SEEN.append),
    "new function": lambda net: net(X, tell=lambda size: None),
    "unhashable": lambda net: net(X, {1: {2}}, tell=print),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_cannot_be_compiled_leaves_others_alone(always_faster, calls, call):
    net = tsopt.hybridize(Takes().eval(), **QUICK)
    for _ in range(2):
        try:
            found = CALLS[call](net)
        except RuntimeError:
            assert call == "malformed"
        else:
            close(found.as_subclass(torch.Tensor), Takes().eval()(X))
    assert not is_compiled(net)
    close(net(X), Takes().eval()(X))
    assert is_compiled(net)


def test_a_call_that_was_refused_is_not_tried_again(always_faster, calls):
    net = tsopt.hybridize(Takes().eval(), **QUICK)
    for _ in range(3):
        net(X, tell=SEEN.append)
        net(X[:2], tell=SEEN.append)
    assert len(calls) == 1
    found = tsopt.report(net)
    assert (found.calls, sum(found.in_eager.values())) == (6, 6)


def test_of_calls_that_the_model_fails_on_other_sizes_are_tried(always_faster, calls):
    net = tsopt.hybridize(Net().eval(), **QUICK)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            net(torch.ones(4, 5))
    assert len(calls) == 1
    net(X)
    assert len(calls) == 2
    assert is_compiled(net)


def hooked(net):
    seen = {}
    return net.layers[0].register_forward_hook(lambda module, args, output: seen.__setitem__("x", output)).remove


def without_values(net):
    kept = net.shift
    net.shift = torch.empty(3, device="meta")
    return lambda: setattr(net, "shift", kept)


def not_a_number(net):
    kept = net.shift.clone()
    net.shift.fill_(float("nan"))
    return lambda: net.shift.copy_(kept)


def in_training(net):
    net.layers[2].train()
    return net.eval


STATES = {made.__name__: made for made in (hooked, without_values, not_a_number, in_training)}


@pytest.mark.parametrize("first", [True, False], ids=["from the start", "later"])
@pytest.mark.parametrize("state", STATES)
def test_a_model_that_cannot_be_compiled_for_a_while_is_compiled_then(always_faster, calls, state, first):
    net = tsopt.hybridize(Net().eval(), **QUICK)
    if not first:
        net(X)
    end = STATES[state](net)
    before = len(calls)
    for _ in range(3):
        try:
            net(X)
        except RuntimeError:  # there is nothing to add on that device
            assert state == "without_values"
    assert len(calls) <= before + 1, "it is not tried at each call"
    end()
    close(net(X), eager(net))
    assert is_compiled(net)


def test_a_lazy_module_is_compiled_once_it_has_weights(always_faster):
    net = tsopt.hybridize(nn.Sequential(nn.LazyLinear(8), nn.ReLU()).eval(), **QUICK)
    net(X)
    close(net(X), eager(net))
    assert is_compiled(net)


class Decides(Net):
    """Is no graph; counts its calls in Python, in a buffer and outside of it."""

    counted = 0

    def __init__(self):
        super().__init__()
        self.calls, self.seen = 0, []
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        type(self).counted += 1
        self.calls += 1
        self.count += 1
        self.seen.append(len(x))
        if x.sum().item() > 1e9:
            return x
        return super().forward(x)


def test_what_a_refused_model_changes_in_its_own_calls_is_no_change(calls):
    net = tsopt.hybridize(Decides().eval(), **QUICK, frontend="export")
    for _ in range(4):
        close(net(X), Net().eval()(X))
    assert (len(calls), net.calls, float(net.count)) == (1, 4, 4)
    net.scale = 3.0
    net(X)
    assert len(calls) == 2, "that is one"


@pytest.mark.usefixtures("first_attempts_only")
def test_a_model_that_always_changes_is_not_always_tried(calls):
    net = tsopt.hybridize(Decides().eval(), **QUICK, frontend="export")
    for scale in range(10):
        net.scale = float(scale)
        close(net(X), eager(net))
    assert len(calls) == refused.FREE_CAPTURES


@pytest.fixture
def refuses(monkeypatch):
    """Nothing can be compiled; the calls that somebody has tried to compile."""
    tried = []

    def optimize(model, example, **options):
        tried.append(example.args)
        raise tsopt.CaptureError("no matter")

    monkeypatch.setattr(hybrid_state, "optimize", optimize)
    return tried


@pytest.fixture
def long_calls(monkeypatch):
    """Each call takes ages, so that there is time for further attempts."""
    monkeypatch.setattr(refused.time, "monotonic", itertools.count(0.0, 1e9).__next__)


@pytest.mark.usefixtures("long_calls")
def test_further_attempts_are_made_if_calls_take_long(refuses):
    net = tsopt.hybridize(Net().eval(), **QUICK)
    for scale in range(refused.FREE_CAPTURES + 3):
        net.scale = float(scale)
        net(X)
    assert len(refuses) == refused.FREE_CAPTURES + 2, "after a first call that has taken its time"


@pytest.mark.usefixtures("long_calls")
def test_there_is_a_last_attempt(refuses):
    net = tsopt.hybridize(Net().eval(), **QUICK)
    for scale in range(2 * refused.MAX_CAPTURES):
        net.scale = float(scale)
        net(X)
    assert len(refuses) == refused.MAX_CAPTURES


def test_time_without_calls_pays_for_no_attempt(refuses, monkeypatch):
    net, clock = tsopt.hybridize(Net().eval(), **QUICK), [0.0]
    monkeypatch.setattr(refused.time, "monotonic", lambda: clock[0])
    for scale in range(refused.FREE_CAPTURES + 5):
        net.scale = float(scale)
        net(X)
        clock[0] += 1e9
    assert len(refuses) == refused.FREE_CAPTURES


@pytest.mark.usefixtures("first_attempts_only")
def test_of_attempts_that_take_long_there_are_two(refuses, monkeypatch):
    monkeypatch.setattr(refused, "FREE_SECONDS", 0.0)
    net = tsopt.hybridize(Takes().eval(), **QUICK)
    for form in ("a", "b", "c", "d", "a"):
        net(X, form)
    assert [form for _, form in refuses] == ["a", "b"]
    assert tsopt.report(net).in_eager == {"no matter": 3, refused.UNTRIED: 2}, "each call has a reason of its own"


@pytest.mark.usefixtures("long_calls")
def test_of_forms_of_calls_those_that_come_again_are_tried(refuses, monkeypatch):
    monkeypatch.setattr(refused, "FREE_CAPTURES", 1)
    net = tsopt.hybridize(Takes().eval(), **QUICK)
    for number in range(20):
        net(X, number / 7)
    assert len(refuses) == 1
    net(X, 3 / 7)
    assert [number for _, number in refuses] == [0.0, 3 / 7]


@pytest.mark.usefixtures("single_threaded")
def test_what_calls_change_outside_of_the_model_is_found_without_another_capture(always_faster, calls):
    net, before = tsopt.hybridize(Asked().eval(), **QUICK), len(SEEN)
    for keep in ("a", "b", "c", "a"):
        net(X, keep=keep)
    assert (len(calls), len(SEEN) - before) == (1, 4)
    assert len(tsopt.report(net).in_eager) == 1
    close(net(X), eager(net))
    assert is_compiled(net)


def test_after_many_calls_that_were_refused_most_are_not_looked_at(calls, monkeypatch):
    monkeypatch.setattr(refused, "STREAK", 2)
    net, looks = tsopt.hybridize(Decides().eval(), **QUICK, frontend="export"), []
    net(X)
    real = refused.Refused.reason
    monkeypatch.setattr(refused.Refused, "reason", lambda self, *call: looks.append(1) or real(self, *call))
    for _ in range(100):
        net(X)
    found = tsopt.report(net)
    assert (found.calls, sum(found.in_eager.values()), len(found.in_eager)) == (101, 101, 1)
    assert len(looks) < 10
    net.scale = 3.0
    for _ in range(refused.LONGEST_PAUSE):
        net(X)
    assert len(calls) == 2, "it is looked at again"


def test_after_many_calls_that_were_refused_one_with_other_arguments_is_looked_at(always_faster, monkeypatch):
    monkeypatch.setattr(refused, "STREAK", 2)
    net = tsopt.hybridize(Takes().eval(), **QUICK)
    for _ in range(10):
        net(X, tell=SEEN.append)
    close(net(X), eager(net))
    assert is_compiled(net)
    found = tsopt.report(net)
    assert (found.calls, sum(found.in_eager.values())) == (11, 10)


def test_how_long_calls_are_not_looked_at_is_drawn(monkeypatch):
    monkeypatch.setattr(refused, "STREAK", 0)
    drawn = refused.Pauses(choose=lambda below: below - 1)
    lengths = [drawn.after((X,), {}) for _ in range(20)]
    assert (lengths[0], lengths[-1]) == (3 * refused.FIRST_PAUSE // 2 - 1, 3 * refused.LONGEST_PAUSE // 2 - 1)
    pauses = refused.Pauses()
    assert len({pauses.after((X,), {}) % 5 for _ in range(100)}) == 5, "each call of a loop has its turn"
    assert pauses.hold((X,), {})
    assert not pauses.hold((X,), {"more": 1})


def test_a_model_that_is_refused_may_call_itself(monkeypatch):
    depths = []

    def optimize(model, example, **options):
        raise tsopt.CaptureError("no matter")

    @tsopt.hybridize
    def halves(x, depth):
        depths.append(depth)
        return halves(x / 2, depth - 1) if depth else x

    monkeypatch.setattr(hybrid_state, "optimize", optimize)
    assert halves(torch.ones(2), 3).tolist() == [0.125, 0.125]
    assert depths == [3, 2, 1, 0]


class Asked(nn.Module):
    """Leaves something behind if it is asked to."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, keep=False):
        if keep:
            SEEN.append(len(x))
        return self.layer(x)


@pytest.mark.usefixtures("single_threaded")
@pytest.mark.parametrize("first", [True, False])
def test_calls_that_change_what_is_outside_of_the_model_leave_others_alone(always_faster, first):
    net, before = tsopt.hybridize(Asked().eval(), **QUICK | {"warmup": 0}), len(SEEN)
    if not first:
        net(X)
    for _ in range(3):
        close(net(X, keep=True), eager(net))
    assert len(SEEN) == before + 3
    close(net(X), eager(net))
    assert is_compiled(net)
    net(X, keep=True)
    assert len(SEEN) == before + 4
    assert sum(tsopt.report(net).in_eager.values()) == 4


class Tells(Net):
    """Adds up what it is given, counts its calls of a kind, and tells others of each."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(4))
        self.seen = SEEN

    def forward(self, rows, step=False):
        SEEN.append(1)
        if step:
            self.steps.add_(1)
        return sum(super(Tells, self).forward(row) for row in rows)


def test_iterators_are_left_to_the_call(always_faster):
    net = tsopt.hybridize(Tells().eval(), **QUICK)
    found = net([X, X])
    assert "outside of the model" in str(tsopt.report(net))
    close(net(iter([X, X])), found)


def test_state_is_left_alone_beside_another_thread(always_faster, another_thread):
    net = tsopt.hybridize(Tells().eval(), **QUICK)
    net([X])
    before = float(net.steps[0])
    net([X], step=True)
    assert float(net.steps[0]) == before + 1
