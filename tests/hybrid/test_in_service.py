"""`hybridize`: in service, the model itself takes over where real calls take less time in it."""

from __future__ import annotations

import pytest
import torch

import tsopt
from tests.hybrid.models import QUICK, Net, X, close
from tsopt import hybrid_choice
from tsopt.originals import compiled_of
from tsopt.runtime.calling import in_service

SLOWER = "in service, a call takes 2.0 ms in eager mode and 3.0 ms compiled"
CALLS = 300  # the first look at how long calls take is at one of the calls 51 to 100
OFTEN = QUICK | {"audit": 1.0}  # looks that follow soon after it


@pytest.fixture
def timed(monkeypatch, always_faster):
    """Calls that were timed, each of which takes 2 ms in eager mode and 3 ms compiled."""
    calls = []
    monkeypatch.setattr(hybrid_choice, "loss", lambda *_: "")
    monkeypatch.setattr(in_service.InService, "is_affordable", True)
    monkeypatch.setattr(in_service, "FEWEST", 3)
    monkeypatch.setattr(in_service, "seconds_of_both", lambda *given: calls.append(given[:2]) or (2e-3, 3e-3))
    return calls


def serve(net, x=X, calls=CALLS):
    with torch.no_grad():
        for _ in range(calls):
            close(net(x), tsopt.hybridize(net, active=False)(x))


def test_where_eager_is_faster_in_service_it_takes_over_and_says_so_once(timed):
    net = tsopt.hybridize(Net().eval(), **OFTEN)
    with pytest.warns(UserWarning, match=f"Net runs in eager mode: {SLOWER}") as said:
        serve(net)
    assert [warning.filename for warning in said] == [__file__]
    assert len(timed) == 3, "nothing is timed any more"
    report = tsopt.report(net)
    (reason,) = report.in_eager
    assert reason == f"{SLOWER} (means of 3 calls)"
    assert report.calls == CALLS
    assert 0 < report.in_eager[reason] < CALLS - 50
    assert len(report.reports) == 1
    count, compiled = report.in_eager[reason], CALLS - report.in_eager[reason]
    serve(net)
    assert tsopt.report(net).in_eager == {reason: count + CALLS}
    assert 50 < compiled < CALLS


@pytest.mark.filterwarnings("ignore:tsopt. Net runs in eager mode:UserWarning")
def test_for_much_larger_inputs_it_is_compiled_again(timed, monkeypatch, calls):
    monkeypatch.setattr(hybrid_choice, "UNSEEN", 0)
    net = tsopt.hybridize(Net().eval(), **OFTEN)
    serve(net)
    before = sum(tsopt.report(net).in_eager.values())
    assert before
    serve(net, torch.cat([X] * 3), 5)
    assert len(calls) == 1
    serve(net, torch.cat([X] * 4), 5)
    assert len(calls) == 2
    assert sum(tsopt.report(net).in_eager.values()) == before + 5


def test_a_form_that_is_faster_in_service_stays(timed, monkeypatch):
    monkeypatch.setattr(in_service, "seconds_of_both", lambda *_: timed.append(1) or (3e-3, 2e-3))
    net = tsopt.hybridize(Net().eval(), **OFTEN)
    serve(net)
    assert len(timed) > 3
    assert not tsopt.report(net).in_eager


@pytest.mark.filterwarnings("ignore:tsopt. Net runs in eager mode:UserWarning")
def test_what_is_timed_is_the_model_and_the_call_with_all_that_is_done_around_it(timed):
    net = tsopt.hybridize(Net().eval(), **OFTEN)
    serve(net, calls=110)
    model, served = timed[0]
    assert model is tsopt.hybridize(net, active=False)
    with torch.no_grad():
        close(served(X), model(X))
    assert compiled_of(net).fast is not served


@pytest.mark.parametrize("kind", ["another_thread", "policy", "audits are off"])
def test_nothing_steps_back_where_it_must_not(timed, kind, request):
    if kind == "another_thread":
        request.getfixturevalue(kind)
    options = {"policy": {"on_new_signature": "error"}, "audits are off": {"audit": 0}}.get(kind, {})
    net = tsopt.hybridize(Net().eval(), **OFTEN | options)
    serve(net)
    assert not tsopt.report(net).in_eager
    assert bool(timed) == (kind == "policy"), "times mean little beside other threads"


def test_a_call_that_the_compiled_form_does_not_serve_is_not_timed(timed):
    net = tsopt.hybridize(Net().eval(), on_new_signature="eager", **OFTEN)
    serve(net, calls=1)
    serve(net, X[:2])
    assert not timed
