"""`hybridize`: states that a model comes back to, as adapters are switched off, and on again."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import tsopt
from tests.hybrid.models import QUICK, close
from tsopt import hybrid_choice
from tsopt.originals import compiled_of
from tsopt.runtime.calling import put_aside
from tsopt.runtime.calling.served import KEEPS_CHANGING

X = torch.randn(2, 8)
STATE = {"factor": 2.0}


class Adapted(nn.Module):
    """Layers on top of a layer; which of them are active is a list, as in peft."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(8, 8)
        self.adapters = nn.ModuleDict({name: nn.Linear(8, 8) for name in "abc"})
        self.active, self.is_count = ["a"], False

    def forward(self, x):
        y = self.base(x)
        for name in self.active:
            y = y + self.adapters[name](x)
        return y.shape[0] if self.is_count else y


@pytest.fixture(autouse=True)
def _pays(monkeypatch):
    """Compiled forms of such small models pay."""
    monkeypatch.setattr(hybrid_choice, "loss", lambda *_: "")


@pytest.fixture
def net(always_faster):
    return tsopt.hybridize(Adapted().eval(), **QUICK)


def right(net):
    with torch.no_grad():
        close(net(X), nn.Module.__call__(tsopt.hybridize(net, active=False), X))
    state = compiled_of(net)
    return state.fast is not None and not state._stepped_back


def test_a_state_that_the_model_comes_back_to_is_compiled_once(net, calls):
    for _ in range(5):
        for active in (["a"], [], ["b"]):
            net.active = active
            assert right(net)
            assert right(net)
    assert len(calls) == 3
    report = tsopt.report(net)
    assert (report.calls, sum(report.in_eager.values())) == (30, 0)


def test_what_is_counted_of_a_form_counts_once(net):
    with torch.no_grad():
        net(X)
        net(torch.randn(3, 8, 8))  # a signature that comes once is served by the model itself
        assert tsopt.report(net).in_eager == {"the signature is not compiled": 1}
        net.active = []
        net(X)
        seconds = tsopt.report(net).compile_seconds
        for active in (["a"], [], ["a"]):
            net.active = active
            net(X)
    report = tsopt.report(net)
    assert (report.calls, report.in_eager) == (6, {"the signature is not compiled": 1})
    assert report.compile_seconds == pytest.approx(seconds)


@pytest.mark.parametrize("is_written", [False, True])
def test_a_form_whose_weights_were_written_meanwhile_is_not_used(net, calls, is_written):
    right(net)
    net.active = []
    right(net)
    with torch.no_grad():
        if is_written:
            net.base.weight.add_(1)
    net.active = ["a"]
    assert right(net)
    assert len(calls) == 2 + is_written


@pytest.mark.filterwarnings("ignore:tsopt. Adapted runs in eager mode:UserWarning")
def test_only_the_last_ones_are_kept(net, calls):
    for active in (["a"], [], ["b"], ["c"]):
        net.active = active
        right(net)
    assert len(calls) == 4
    net.active = ["a"]
    assert not right(net), "too many changes"
    assert list(tsopt.report(net).in_eager) == [KEEPS_CHANGING]
    assert not compiled_of(net)._aside
    assert put_aside.MOST == 2


def test_a_form_that_is_given_up_for_good_is_gone(net):
    right(net)
    form = weakref.ref(compiled_of(net).fast)
    with torch.no_grad():
        net.base.weight.add_(1)
    right(net)
    gc.collect()
    assert form() is None


@pytest.mark.filterwarnings("ignore:tsopt. Adapted runs in eager mode:UserWarning")
def test_a_state_that_cannot_be_compiled_comes_between(net, calls):
    right(net)
    for _ in range(6):
        net.is_count = True
        with torch.no_grad():
            assert net(X) == 2
        net.is_count = False
        assert any(right(net) for _ in range(1000)), "calls of the other state may be left to the model without a look"
    assert not tsopt.report(net).in_eager.get(KEEPS_CHANGING)


@pytest.mark.filterwarnings("ignore:tsopt. Adapted runs in eager mode:UserWarning")
def test_a_form_serves_in_the_settings_that_it_was_compiled_in(net, calls, default_dtype):
    right(net)
    net.is_count = True
    with torch.no_grad():
        net(X)
    default_dtype(torch.float64)
    net.is_count = False
    assert right(net)  # compiled for this default
    net.is_count = True
    with torch.no_grad():
        net(X)
    default_dtype(torch.float32)
    net.is_count = False
    compiled = len(calls)
    assert right(net)
    assert len(calls) == compiled


class Normed(Adapted):
    """Torch writes its statistics without raising their versions."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x):
        if self.is_count:
            return super().forward(x)
        return nn.functional.batch_norm(super().forward(x), self.mean, self.var, training=self.training)


@pytest.mark.filterwarnings("ignore:tsopt. Normed runs in eager mode:UserWarning")
@pytest.mark.parametrize("between", [0, 200])
def test_statistics_written_while_a_form_was_put_aside_are_read(always_faster, between):
    net = tsopt.hybridize(Normed().eval(), **QUICK)
    right(net)
    if between:  # calls that are refused: later ones are not looked at
        net.is_count = True
        with torch.no_grad():
            for _ in range(between):
                net(X)
    else:
        net.active = []
        right(net)
    net.train()
    net.is_count = False
    with torch.no_grad():
        net(X)
    net.eval()
    net.active = ["a"]
    for _ in range(3):
        right(net)


def test_attributes_that_come_and_go_with_a_state_do_not_matter(net, calls):
    for _ in range(5):
        right(net)
        net.saved, net.active = net.active, []
        right(net)
        net.active = net.saved
        del net.saved
    assert len(calls) == 2


def test_a_form_that_is_taken_back_is_audited(always_faster):
    """Writes through `.data` leave no trace."""
    net = tsopt.hybridize(Adapted().eval(), share_weights=False, **QUICK)
    right(net)
    net.active = []
    right(net)
    net.base.weight.data.mul_(2)
    net.active = ["a"]
    with torch.no_grad(), pytest.warns(UserWarning, match="an audit found a difference"):
        net(X)
    assert right(net)


def test_what_a_form_serves_pays_for_audits_however_few_calls_there_are_before_the_next_state(net):
    for _ in range(3):
        for active in (["a"], []):
            net.active = active
            with torch.no_grad():
                net(X)
    assert compiled_of(net)._audits.served > 0


@pytest.mark.filterwarnings("ignore:tsopt. Adapted runs in eager mode:UserWarning")
def test_calls_of_a_state_that_is_kept_are_not_left_to_the_model(net):
    for _ in range(40):
        net.is_count = True
        with torch.no_grad():
            for _ in range(3):
                net(X)
        net.is_count = False
        for _ in range(3):
            right(net)
    with torch.no_grad():
        before = sum(tsopt.report(net).in_eager.values())
        for _ in range(64):
            net(X)
    assert sum(tsopt.report(net).in_eager.values()) - before < 64


def test_a_form_whose_parameters_are_gone_is_not_kept(net):
    right(net)
    form = weakref.ref(compiled_of(net).fast)
    net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()}, assign=True)
    right(net)
    gc.collect()
    assert form() is None


def test_a_function_that_calls_itself_is_compiled_once_for_each_state(always_faster, calls):
    @tsopt.hybridize(**QUICK)
    def halves(x):
        return x * STATE["factor"] if x.shape[0] <= 1 else halves(x[::2]) + 1

    for _ in range(3):
        for factor in (2.0, 3.0):
            STATE["factor"] = factor
            with torch.no_grad():
                torch.testing.assert_close(halves(X[:2]), X[:1] * factor + 1)
    assert len(calls) <= 4


def test_where_the_model_itself_is_faster_nothing_is_kept(net, monkeypatch):
    right(net)
    monkeypatch.setattr(hybrid_choice, "loss", lambda *_: "it is faster")
    net.active = []
    with torch.no_grad():
        net(X)
    assert not compiled_of(net)._aside


def test_forms_that_cannot_serve_any_more_are_gone(net):
    right(net)
    form = weakref.ref(compiled_of(net).fast)
    net.active = []
    right(net)
    with torch.no_grad():
        net.base.weight.add_(1)
    right(net)
    gc.collect()
    assert form() is None


class Branches(Adapted):
    def forward(self, x):
        y = super().forward(x)
        return -y if self.active and float(y.sum()) > 1e9 else y


def test_forms_in_parts_are_kept_as_well(always_faster, calls):
    net = tsopt.hybridize(Branches().eval(), **QUICK)
    for _ in range(4):
        for active in (["a"], []):
            net.active = active
            assert right(net)
    assert len(calls) == 2
