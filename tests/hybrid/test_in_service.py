"""`hybridize`: eager and the compiled form serve some calls in turns, and the faster one goes on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tests.hybrid.models import QUICK, Net, X, close
from tsopt import hybrid_choice, hybrid_state
from tsopt.compiler.calls.structure import flatten
from tsopt.originals import compiled_of
from tsopt.runtime.calling.in_service import TURN, InService
from tsopt.runtime.calling.served import COMPARED

ROUNDS = 3
CALLS = 101 + 2 * TURN * (ROUNDS + 1)  # the first look at what calls take is at one of the calls 51 to 100
SLOWER = "eager is faster in service"


@pytest.fixture
def compares(monkeypatch, always_faster, single_threaded):
    """Rounds begin whenever they may, and after some of them eager has turned out to be faster."""
    monkeypatch.setattr(hybrid_choice, "loss", lambda *_: "")
    monkeypatch.setattr(InService, "begins", lambda self, gain: True)
    monkeypatch.setattr(InService, "loss", property(lambda self: SLOWER if len(self._ratios) >= ROUNDS else ""))


@pytest.fixture
def compared(monkeypatch, compares):
    """The same, and none of the two has turned out to be faster."""
    monkeypatch.setattr(InService, "loss", "")


def serve(net, x=X, calls=CALLS):
    with torch.no_grad():
        for _ in range(calls):
            close(net(x), tsopt.hybridize(net, active=False)(x))


@pytest.mark.usefixtures("compares")
def test_where_eager_is_faster_in_service_it_takes_over_and_says_so_once():
    net = tsopt.hybridize(Net().eval(), **QUICK)
    with pytest.warns(UserWarning, match=f"Net runs in eager mode: {SLOWER}") as said:
        serve(net)
    assert [warning.filename for warning in said] == [__file__]
    first = tsopt.report(net)
    assert first.calls == CALLS
    assert set(first.in_eager) == {COMPARED, SLOWER}
    assert first.in_eager[COMPARED] == ROUNDS * TURN
    assert 0 < first.in_eager[SLOWER] < CALLS - 50 - 2 * ROUNDS * TURN
    assert len(first.reports) == 1
    serve(net)
    assert tsopt.report(net).in_eager == first.in_eager | {SLOWER: first.in_eager[SLOWER] + CALLS}


@pytest.mark.usefixtures("compares")
@pytest.mark.filterwarnings("ignore:tsopt. Net runs in eager mode:UserWarning")
def test_for_much_larger_inputs_it_is_compiled_again(monkeypatch, calls):
    monkeypatch.setattr(hybrid_state, "UNSEEN", 0)
    net = tsopt.hybridize(Net().eval(), **QUICK)
    serve(net)
    before = sum(tsopt.report(net).in_eager.values())
    serve(net, torch.cat([X] * 3), 5)
    assert len(calls) == 1
    serve(net, torch.cat([X] * 4), 5)
    assert len(calls) == 2
    assert sum(tsopt.report(net).in_eager.values()) == before + 5


@pytest.mark.usefixtures("compared")
def test_a_form_that_is_as_fast_stays(calls):
    net = tsopt.hybridize(Net().eval(), **QUICK)
    serve(net)
    report = tsopt.report(net)
    assert report.in_eager.keys() == {COMPARED}
    assert TURN <= report.in_eager[COMPARED] <= CALLS / 2
    assert len(calls) == 1


@pytest.mark.usefixtures("compared")
@pytest.mark.parametrize("turn", [0, 1])
def test_a_call_that_raises_ends_its_round_and_others_follow(turn):
    net = tsopt.hybridize(nn.Embedding(4, 3).eval(), **QUICK)
    right, wrong = torch.tensor([0, 3]), torch.tensor([4])
    serve(net, right, calls=101)
    service = compiled_of(net)._service
    while not (service.is_on and service._call // TURN == turn):
        serve(net, right, calls=1)
    with torch.no_grad(), pytest.raises(IndexError):
        net(torch.cat([wrong, wrong]))
    assert not service.is_on
    before = tsopt.report(net)
    serve(net, right)
    after = tsopt.report(net)
    assert after.calls == before.calls + CALLS
    assert after.in_eager[COMPARED] >= before.in_eager.get(COMPARED, 0) + TURN


@pytest.mark.usefixtures("compared")
def test_rounds_go_on_where_a_model_comes_back_to_an_earlier_state(calls):
    net = tsopt.hybridize(Net().eval(), **QUICK)
    net.scale = 2.0
    serve(net)
    service = compiled_of(net)._service
    net.scale = 3.0
    serve(net)
    assert compiled_of(net)._service is not service
    net.scale = 2.0
    serve(net, calls=1)
    assert len(calls) == 2
    assert compiled_of(net)._service is service
    assert not service.is_on


@pytest.mark.usefixtures("compared")
def test_a_model_that_its_own_calls_change_is_not_compared_any_more(monkeypatch):
    net = tsopt.hybridize(Net().eval(), **QUICK)
    serve(net, calls=101)
    before = tsopt.report(net).in_eager.get(COMPARED, 0)
    state = compiled_of(net)
    with monkeypatch.context() as patch:
        patch.setattr(type(state), "_changed", lambda self: tsopt.report(net).in_eager[COMPARED] > before + TURN)
        serve(net, calls=4 * TURN)
    served = tsopt.report(net).in_eager[COMPARED]
    serve(net)
    assert tsopt.report(net).in_eager[COMPARED] == served == before + TURN + 1


@pytest.mark.usefixtures("compares")
@pytest.mark.parametrize("kind", ["another thread", "policy", "audits are off", "int8", "random numbers"])
def test_nothing_is_compared_where_it_must_not_be(kind, monkeypatch):
    if kind == "another thread":
        monkeypatch.setattr(hybrid_choice, "others_run", lambda: True)
    if kind == "random numbers":
        monkeypatch.setattr(hybrid_choice, "may_draw", lambda executable: True)
    if kind == "int8":
        monkeypatch.setattr(hybrid_choice, "LIMITS", {"fp32": 0.1})
    options = {"policy": {"on_new_signature": "error"}, "audits are off": {"audit": 0}}.get(kind, {})
    net = tsopt.hybridize(Net().eval(), **QUICK | options)
    serve(net)
    assert not tsopt.report(net).in_eager


class Branching(Net):
    """Runs in two parts, with the choice between two branches in Python."""

    def forward(self, x):
        y = super().forward(x)
        return -y if float(y.sum()) > 1e9 else y * 2


class Noisy(Branching):
    def forward(self, x):
        return super().forward(x) + 0 * torch.rand(())


@pytest.mark.usefixtures("compares")
def test_a_model_in_parts_is_compared_as_well():
    net = tsopt.hybridize(Branching().eval(), frontend="parts", **QUICK)
    with pytest.warns(UserWarning, match=f"Branching runs in eager mode: {SLOWER}"):
        serve(net)
    report = tsopt.report(net)
    assert report.reports[0].winning.is_in_parts
    assert report.in_eager[COMPARED] == ROUNDS * TURN
    assert set(report.in_eager) == {COMPARED, SLOWER}


@pytest.mark.usefixtures("compares")
@pytest.mark.parametrize(
    ("model", "options"), [(Noisy, {}), (Branching, {"precision": "bf16"}), (Branching, {"level": 3})]
)
def test_a_model_in_parts_that_draws_numbers_or_loses_digits_is_not(model, options):
    net = tsopt.hybridize(model().eval(), frontend="parts", **QUICK | options)
    serve(net)
    assert tsopt.report(net).reports[0].winning.is_in_parts
    assert not tsopt.report(net).in_eager


@pytest.mark.usefixtures("compares")
def test_a_model_in_parts_that_is_on_a_gpu_itself_is_not(monkeypatch):
    net = tsopt.hybridize(Branching().eval(), frontend="parts", **QUICK)
    weights = {*map(id, net.parameters())}
    held = lambda example: any(id(item) in weights for item in flatten((example.args, example.kwargs))[0])  # noqa: E731
    monkeypatch.setattr(hybrid_choice, "is_on_gpu", held)
    serve(net)
    assert not tsopt.report(net).in_eager


@pytest.mark.usefixtures("compares")
@pytest.mark.filterwarnings("ignore:tsopt. Counting:UserWarning")
def test_a_model_whose_calls_change_its_attributes_is_not_compared():
    class Counting(Net):
        seen = 0

        def forward(self, x):
            self.seen += 1
            return super().forward(x)

    net = tsopt.hybridize(Counting().eval(), **QUICK)
    serve(net)
    assert not tsopt.report(net).in_eager


@pytest.mark.usefixtures("compared")
def test_calls_that_the_compiled_form_does_not_serve_are_not_compared():
    net = tsopt.hybridize(Net().eval(), on_new_signature="eager", **QUICK)
    serve(net, calls=1)
    serve(net, X[:2])
    assert COMPARED not in tsopt.report(net).in_eager


@pytest.mark.usefixtures("compared")
def test_calls_that_a_model_makes_of_itself_belong_to_the_call(monkeypatch):
    net = tsopt.hybridize(Net().eval(), **QUICK)
    real, served = InService.serve, []

    def serves(self, call, size):  # each call comes with another one, made while it is served
        served.append(size)
        return real(self, lambda: (call(), net(X))[0], size)

    serve(net, calls=101)
    monkeypatch.setattr(InService, "serve", serves)
    serve(net, calls=2 * TURN)
    assert len(served) == 2 * TURN, "those within are in no round"
