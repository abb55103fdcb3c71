"""What a hybrid counts, and what `tsopt.report` says of it."""

from __future__ import annotations

import pytest
import torch

import tsopt
from tests.hybrid.models import QUICK, Net, X, close, eager
from tsopt import hybrid_choice, hybrid_state
from tsopt.hybrid import compiled_of
from tsopt.runtime.calling import own_work
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


@pytest.mark.filterwarnings("ignore:tsopt. Net runs in eager mode:UserWarning")
@pytest.mark.parametrize("look", [0, 1, 2])
def test_another_thread_may_give_the_compiled_form_up_between_two_looks(always_faster, monkeypatch, look):
    net = tsopt.hybridize(Net().eval(), **QUICK)
    with torch.no_grad():
        net(X)
    held, looks = compiled_of(net)._watch, []

    def watch(self):
        looks.append(held)
        return held if len(looks) <= look else None

    monkeypatch.setattr(hybrid_state.Compiled, "_watch", property(watch, lambda self, value: None), raising=False)
    with torch.no_grad():
        close(net(X), eager(net))
        looks.clear()
        net.train()(X)
    assert looks


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


@pytest.fixture
def too_short(monkeypatch):
    """Calls are slower with what is done around them, on inputs of as many rows as are in the list."""
    rows = [1, 2, 3, 4, 5]
    monkeypatch.setattr(
        hybrid_choice, "loss", lambda model, served, example: "too short" if len(example.args[0]) in rows else ""
    )
    return rows


@pytest.mark.usefixtures("too_short")
def test_where_calls_are_too_short_the_model_itself_serves_them(always_faster):
    model = Net().eval()
    net = tsopt.hybridize(model, **QUICK)
    with torch.no_grad():
        for _ in range(5):
            torch.testing.assert_close(net(X), model(X))
        model.scale = 3.0
        torch.testing.assert_close(net(X), model(X))
    found = tsopt.report(net)
    assert (found.calls, found.in_eager, len(found.reports)) == (6, {"too short": 6}, 1)


def test_where_inputs_get_larger_it_is_compiled_for_them(always_faster, too_short, monkeypatch):
    monkeypatch.setattr(hybrid_state, "UNSEEN", 1)
    model = Net().eval()
    net = tsopt.hybridize(model, **QUICK)
    large = torch.cat([X[:1]] * 8)
    with torch.no_grad():
        net(X[:1])
        for x in (X[:1], X[:3], large, large):
            torch.testing.assert_close(net(x), model(x))
    found = tsopt.report(net)
    assert (found.calls, found.in_eager) == (5, {"too short": 3})
    assert [report.winner for report in found.reports] == ["eager + passes"]


def test_a_policy_that_refuses_calls_holds_where_eager_is_faster(always_faster, too_short):
    net = tsopt.hybridize(Net().eval(), on_new_signature="error", **QUICK)
    with torch.no_grad():
        net(X)
        with pytest.raises(tsopt.SignatureError):
            net(X[:1])


def test_only_short_calls_are_compared(monkeypatch):
    monkeypatch.setattr(own_work, "seconds_of", lambda *_: 1.1e-3)
    monkeypatch.setattr(own_work, "seconds_in_turns", lambda *_: pytest.fail("no work around a call matters here"))
    assert own_work.loss(Net(), Net(), tsopt.example(X)) == ""


@pytest.mark.parametrize(("ours", "expected"), [(4e-6, ""), (6e-6, "a call takes 5.0 us in eager mode, and 6.0 us")])
def test_short_calls_are_compared_with_all_that_is_done_around_them(monkeypatch, ours, expected):
    monkeypatch.setattr(own_work, "seconds_of", lambda *_: 5e-6)
    monkeypatch.setattr(own_work, "seconds_in_turns", lambda *_: [[5e-6, 9e-6, 5e-6], [ours, ours, 9e-5]])
    assert own_work.loss(Net(), Net(), tsopt.example(X)).startswith(expected)


@pytest.mark.filterwarnings("ignore:tsopt. halves runs in eager mode:UserWarning")
def test_a_function_that_calls_itself_is_optimized_once(monkeypatch):
    made = []

    def optimize(model, example, **options):
        made.append(example.args[1])
        model(*example.args)
        raise tsopt.CaptureError("no matter")

    @tsopt.hybridize
    def halves(x, depth):
        return halves(x / 2, depth - 1) if depth else x

    monkeypatch.setattr("tsopt.hybrid_state.optimize", optimize)
    for _ in range(2):
        assert halves(torch.ones(2), 3).tolist() == [0.125, 0.125]
    assert made == [3]


@pytest.mark.parametrize(
    ("module", "place"),
    [(hybrid_choice, "loss"), (hybrid_state, "call_effects"), (hybrid_state, "executable_difference")],
)
def test_after_an_interrupt_in_the_first_call_the_next_one_compiles_all_the_same(
    always_faster, calls, monkeypatch, module, place
):
    real, seen = getattr(module, place), []

    def interrupted(*args, **options):
        seen.append(compiled_of(net).fast)
        if len(seen) == 1:
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(module, place, interrupted)
    net = tsopt.hybridize(Net().eval(), **QUICK)
    with torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            net(X)
        for _ in range(110):
            close(net(X), eager(net))
    assert seen[:2] == [None, None], "what is not finished serves no calls"
    assert len(calls) == 2
    assert compiled_of(net)._audits.count


@pytest.mark.parametrize("background", [False, True])
def test_an_option_that_is_refused_is_refused_by_each_call(background):
    net = tsopt.hybridize(Net().eval(), audit=7, background=background, **QUICK)
    for _ in range(2):
        with torch.no_grad(), pytest.raises(tsopt.UsageError, match="audit must be"):
            net(X)
