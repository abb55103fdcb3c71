"""What new signatures may cost: captures take their share of the time, and most refused calls are not looked at."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tests.runtime.calling.helpers import OPTIONS
from tsopt.runtime.calling import new_signatures, specializations
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


@pytest.fixture
def looks(one_by_one, monkeypatch):
    """Calls that looked for what serves them, since the hybrid was made."""
    found, real = [], NewSignatures.serving
    monkeypatch.setattr(NewSignatures, "serving", lambda self, *call: found.append(1) or real(self, *call))
    return found


def test_where_no_more_captures_follow_calls_that_come_often_are_left_alone(one_by_one, looks, monkeypatch):
    for captures in (99, 0):
        monkeypatch.setattr(new_signatures, "MAX_CAPTURES", captures)
        looks.clear()
        for _ in range(20):
            for rows in range(20, 30):
                call(one_by_one[0], rows, 1)
    assert len(looks) < 120


def test_what_cannot_be_captured_is_left_alone_however_often_it_comes(one_by_one, looks, monkeypatch):
    def refused(self, *calls):
        raise tsopt.CaptureError("not this one")

    monkeypatch.setattr(new_signatures, "FREE_CAPTURES", 0)
    monkeypatch.setattr(new_signatures, "OFTEN", 3)
    monkeypatch.setattr(NewSignatures, "_timed", refused)
    for _ in range(100):
        for rows in range(20, 25):
            call(one_by_one[0], rows, 1)
    assert {20, 21, 22, 23, 24} <= set(one_by_one[1])
    assert len(looks) < 200


def test_many_compiled_sizes_are_found_in_turn_without_a_look(one_by_one, looks, monkeypatch):
    monkeypatch.setattr(new_signatures, "FREE_CAPTURES", 99)
    fast, captured, _ = one_by_one
    sizes = range(4, 12)
    for rows in sizes:
        call(fast, rows, 6)
    assert set(sizes) <= set(captured)
    calls = fast.calls, looks.clear()
    for rows in (*sizes, *sizes):
        call(fast, rows, 1)
    assert (fast.calls, looks) == (calls[0], [])


class Table(nn.Module):
    """Takes 30 rows at most."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(30, 6))

    def forward(self, x):
        return (x + self.table[torch.arange(x.shape[0])]).tanh()


def test_ranges_are_extended_for_a_share_of_the_time(wins, monkeypatch):
    """More calls that a range cannot be extended to than are remembered."""
    asked, real = [], new_signatures.widened
    monkeypatch.setattr(new_signatures, "widened", lambda *args: asked.append(args) or real(*args))
    monkeypatch.setattr(specializations, "MAX_REFUSED", 3)
    model = Table().eval()
    fast = tsopt.optimize(model, [torch.randn(4, 6), torch.randn(8, 6)], warmup=99, audit=0, **OPTIONS)
    signatures = fast.new_signatures

    def too_many():
        for rows in (31, 32, 33, 34, 35, 36):
            with pytest.raises((IndexError, RuntimeError)):
                fast(torch.randn(rows, 6))

    too_many()
    assert signatures.seconds > 0
    signatures.seconds = 1e6
    asked.clear()
    too_many()
    assert not asked
    signatures.seconds = 0.0
    too_many()
    assert asked
