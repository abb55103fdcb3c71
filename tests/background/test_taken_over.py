"""A form compiled in the background serves calls only if it does what the model does, and is faster."""

from __future__ import annotations

import pytest
import torch

import tsopt
from tests.background.helpers import QUICK, Net, X
from tsopt import hybrid_choice, hybrid_state

SEEN = []


class Collects(Net):
    """Appends to a list outside of the model in each call."""

    def forward(self, x):
        SEEN.append(x)
        return super().forward(x)


def test_a_model_that_changes_what_is_outside_of_it_stays_in_eager():
    SEEN.clear()
    net = tsopt.hybridize(Collects().eval(), **QUICK)
    with torch.no_grad():
        net(X)
        with pytest.warns(UserWarning, match="a call changes a list outside of the model"):
            tsopt.wait(net)
        assert (len(SEEN), float(net.x)) == (1, 1.0), "what is checked counts for nothing"
        torch.testing.assert_close(net(X), net.layers(X))
    assert (len(SEEN), float(net.x)) == (2, 2.0)
    found = tsopt.report(net)
    assert (found.calls, sum(found.in_eager.values())) == (2, 2)
    assert "a call changes a list outside of the model" in str(found)


@pytest.fixture
def too_short(monkeypatch):
    """Eager is always faster than compiled calls; the list has the batch sizes that were compared."""
    rows = []
    monkeypatch.setattr(hybrid_state, "UNSEEN", 0)
    monkeypatch.setattr(hybrid_choice, "loss", lambda model, made, call: rows.append(len(call.args[0])) or "too short")
    return rows


def test_where_calls_are_too_short_the_model_itself_serves_them(too_short):
    net = tsopt.hybridize(Net().eval(), **QUICK)
    with torch.no_grad():
        net(X)
        tsopt.wait(net)
        for _ in range(3):
            torch.testing.assert_close(net(X), net.layers(X))
    found = tsopt.report(net)
    assert (found.calls, found.in_eager["too short"], too_short) == (4, 3, [4])


@pytest.mark.slow
def test_where_inputs_get_larger_they_are_compiled_again(too_short):
    net = tsopt.hybridize(Net().eval(), **QUICK)
    with torch.no_grad():
        for rows in (1, 1, 4):  # four times as large
            net(X[:rows])
            tsopt.wait(net)
    assert too_short == [1, 4]
    found = tsopt.report(net)
    assert (found.calls, found.in_eager["too short"]) == (3, 1)
