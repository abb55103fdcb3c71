"""What new signatures may cost: captures take their share of the time, and most refused calls are not looked at."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tests.runtime.calling.helpers import OPTIONS
from tsopt.runtime.calling import new_signatures
from tsopt.runtime.calling.new_signatures import NewSignatures


class OneByOne(nn.Module):
    """No program serves two sizes."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * float(str(len(x)))


@pytest.fixture
def one_by_one(wins, monkeypatch):
    """A hybrid whose captures take ten seconds each, the sizes that it has captured, and what goes on behind it."""
    real, captured = NewSignatures._for_one_size, []

    def slow(self, example, signature):
        captured.append(len(example.args[0]))
        self.seconds += 10.0
        return real(self, example, signature)

    monkeypatch.setattr(NewSignatures, "_for_one_size", slow)
    fast = tsopt.hybridize(OneByOne().eval(), audit=0, **OPTIONS)
    with torch.no_grad(), pytest.warns(UserWarning, match="compiled calls do not change its attribute 'calls'"):
        fast(torch.ones(3, 3))
    return fast, captured, type(fast)._tsopt_compiled.fast.new_signatures


def call(fast, rows, times=2):
    with torch.no_grad():
        for _ in range(times):
            x = torch.ones(rows, 3)
            torch.testing.assert_close(fast(x), x * rows)


def test_captures_for_one_size_take_their_share_of_the_time(one_by_one, monkeypatch):
    monkeypatch.setattr(new_signatures, "STREAK", 10**9)
    fast, captured, signatures = one_by_one
    for rows in range(4, 30):
        call(fast, rows)
    assert 0 < len(captured) <= new_signatures.FREE_CAPTURES
    at_once = len(captured)
    signatures._since -= 100 * signatures.seconds
    for rows in range(40, 44):
        call(fast, rows)
    assert len(captured) > at_once


def test_what_is_called_often_is_captured_all_the_same(one_by_one, monkeypatch):
    monkeypatch.setattr(new_signatures, "STREAK", 10**9)
    fast, captured, _ = one_by_one
    for rows in range(4, 30):
        call(fast, rows)
    assert 20 not in captured
    call(fast, 20, new_signatures.OFTEN)
    assert 20 in captured
    calls = fast.calls
    call(fast, 20)
    assert fast.calls == calls, "it is compiled"


def test_what_is_called_often_is_captured_in_spite_of_the_pauses(one_by_one):
    fast, captured, _ = one_by_one
    for rows in range(4, 300):
        call(fast, rows, 1)
    for _ in range(3000):
        call(fast, 301, 1)
        call(fast, 302, 1)
    assert {301, 302} <= set(captured)


def test_after_many_calls_that_nothing_serves_most_are_not_looked_at(one_by_one, monkeypatch):
    fast, _, signatures = one_by_one
    looks, real = [], NewSignatures.serving
    monkeypatch.setattr(NewSignatures, "serving", lambda self, *call: looks.append(1) or real(self, *call))
    for rows in range(4, 1500):
        call(fast, rows, 1)
    assert len(looks) < 200
    found = tsopt.report(fast)
    assert found.in_eager["the signature is not compiled"] + len(signatures.kept) >= 1490
    call(fast, 3)
    assert tsopt.report(fast).in_eager == found.in_eager, "what is compiled is served as before"


def test_an_optimized_model_looks_at_every_call(wins, monkeypatch):
    """Only a hybrid knows that a call needs no gradients before it asks."""
    monkeypatch.setattr(new_signatures, "STREAK", 1)
    fast = tsopt.optimize(OneByOne().eval(), torch.ones(3, 3), warmup=99, audit=0, on_gradients="error", **OPTIONS)
    for rows in range(4, 9):
        assert fast(torch.ones(rows, 3)).sum() == rows * rows * 3
        with pytest.raises(tsopt.SignatureError, match="only the model itself"):
            fast(torch.ones(rows, 3, requires_grad=True))
