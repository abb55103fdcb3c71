"""What a hybrid counts, and what `tsopt.report` says of it."""

from __future__ import annotations

import pytest
import torch

import tsopt
from tests.test_hybrid import QUICK, Net, X
from tsopt.runtime.racing import race
from tsopt.runtime.racing.speedup import Speedup


def test_what_was_counted_stays_when_the_model_changes(always_faster):
    net = tsopt.hybridize(Net().eval(), **QUICK)
    with torch.no_grad():
        for _ in range(3):
            net(X)
        net(X[:1])
        first = tsopt.report(net)
        net.scale = 3.0
        net(X)
    found = tsopt.report(net)
    assert (found.calls, found.in_eager) == (5, {"the signature is not compiled": 1})
    assert found.compile_seconds > first.compile_seconds


def test_calls_that_eager_wins_are_counted_as_such(monkeypatch):
    monkeypatch.setattr(race, "speedup", lambda *_: Speedup(0.5, 0.4, 0.6))
    net = tsopt.hybridize(Net().eval(), **QUICK)
    with torch.no_grad():
        for _ in range(4):
            net(X)
    assert tsopt.report(net).in_eager == {"no compiled form is faster": 4}


def test_the_policy_for_new_signatures_counts_as_well(always_faster):
    net = tsopt.hybridize(Net().eval(), on_new_signature="eager", **QUICK)
    with torch.no_grad():
        net(X)
        for _ in range(5):
            net(X[:1])
    assert tsopt.report(net).in_eager == {"the signature is not compiled": 5}


@pytest.mark.filterwarnings("ignore:tsopt")
def test_the_report_counts_what_is_compiled_and_says_why_the_rest_is_not(always_faster):
    net = tsopt.hybridize(Net().eval(), **QUICK)
    assert tsopt.report(net).calls == 0
    assert tsopt.report(net).reports == ()
    with torch.no_grad():
        for _ in range(3):
            net(X)
        net(X[:1])
        net.train()
        for _ in range(2):
            net(X)
        net.eval()
        net(X)
    net(X)
    found = tsopt.report(net)
    assert found.calls == 8
    assert found.in_eager == {
        "it is in training mode: call model.eval() first": 2,
        "gradients are required: call it under torch.no_grad() or torch.inference_mode()": 1,
        "the signature is not compiled": 1,
    }
    assert found.compile_seconds > 0
    (report,) = found.reports
    text = str(found)
    assert text.startswith("Net: 8 calls, 4 compiled\n  2 calls in eager mode: it is in training mode")
    assert f"  {report.winner}: {report.why}" in text


def test_the_report_counts_calls_once_that_are_audited(always_faster):
    net = tsopt.hybridize(Net().eval(), **QUICK | {"audit": 0.5})
    with torch.no_grad():
        for _ in range(250):
            net(X)
    assert tsopt.report(net).calls == 250


def test_the_report_of_what_cannot_be_compiled_says_why():
    def random_choice(x):
        return x * 2 if torch.rand(()).item() > 2 else x

    net = tsopt.hybridize(random_choice, **QUICK | {"frontend": "export"})
    with pytest.warns(UserWarning, match="runs in eager mode"):
        net(X)
    found = tsopt.report(net)
    assert (found.calls, sum(found.in_eager.values()), found.reports) == (1, 1, ())


def test_the_report_of_something_optimized_is_its_own():
    fast = tsopt.optimize(Net().eval(), X, **QUICK)
    assert tsopt.report(fast) is fast.report
    for other in (Net(), torch.ones(1), None):
        with pytest.raises(tsopt.UsageError, match="has no report"):
            tsopt.report(other)
