"""Real calls that are timed compiled and in eager mode, and what follows from that."""

from __future__ import annotations

from queue import SimpleQueue

import pytest
import torch
from torch import nn

import tsopt
from tsopt.runtime.backends.backend import compile as compile_by
from tsopt.runtime.calling import in_service, own_work
from tsopt.runtime.calling.audit import Audits
from tsopt.runtime.calling.in_service import FEWEST, InService

X = torch.randn(2, 8)


class Counting(nn.Module):
    """Writes a buffer and an attribute in each call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.seen = 0

    def forward(self, x):
        self.calls.add_(1)
        self.seen += 1
        return x + x.new_ones(x.shape[1:]) * torch.rand(())


@pytest.fixture(autouse=True)
def _times_calls(monkeypatch):
    monkeypatch.setattr(in_service, "LONG", own_work.LONG)


def compiled(model):
    return compile_by(tsopt.capture(model, X), "eager")


def service(pairs, *, served=1e9, took=1.0, share=0.01):
    audits = Audits(share)
    audits.served, audits.took = served, took
    found = InService(audits)
    found._pairs.extend(pairs)
    return found


@pytest.mark.parametrize(
    ("eager", "ours", "is_slower"),
    [
        ([10e-3] * FEWEST, [12e-3] * FEWEST, True),
        ([10e-3] * (FEWEST - 1), [12e-3] * (FEWEST - 1), False),
        ([10e-3] * FEWEST, [10.2e-3] * FEWEST, False),  # next to nothing
        ([10e-3] * FEWEST, [8e-3] * FEWEST, False),
        ([10e-3] * FEWEST, [10e-3] * (FEWEST - 1) + [200e-3], False),  # one that had to wait
        ([10e-3, 1.0] * FEWEST, [12e-3, 0.5] * FEWEST, False),  # most are slower, all together are not
        ([10e-3, 1.0] * FEWEST, [8e-3, 1.5] * FEWEST, True),
    ],
)
def test_eager_serves_where_it_is_known_to_be_faster(eager, ours, is_slower):
    assert bool(service(zip(eager, ours, strict=True)).loss) == is_slower


def test_the_reason_says_what_calls_take():
    said = service([(10e-3, 12e-3)] * FEWEST).loss
    assert said == "in service, a call takes 10.0 ms in eager mode and 12.0 ms compiled (means of 10 calls)"


def test_what_was_measured_long_ago_does_not_count():
    found = service([(1.0, 9.0)] * in_service.LATEST)
    assert found.loss
    found._pairs.extend([(1.0, 0.5)] * in_service.LATEST)
    assert not found.loss


@pytest.mark.parametrize(
    ("known", "is_affordable"),
    [({}, True), ({"took": 0.9e-3}, False), ({"took": 0.0}, False), ({"served": 0.0}, True)],
)
def test_short_calls_are_not_timed(known, is_affordable):
    assert service([], **known).is_affordable == is_affordable


def test_timing_takes_no_larger_share_than_audits(monkeypatch):
    now = iter(range(1000))
    audits = Audits(0.01)
    audits.served, audits.took = 100.0, 1.0
    found = InService(audits, clock=lambda: float(next(now)))  # each measurement takes a second
    monkeypatch.setattr(in_service, "seconds_of_both", lambda *_: (1.0, 1.0))
    executable = compiled(nn.ReLU())
    timed = 0
    for _ in range(40):
        audits.served += 25.0
        if found.is_affordable:
            found.time(nn.ReLU(), executable, executable, tsopt.example(X))
            timed += 1
    assert timed == pytest.approx(audits.served * audits.share, abs=1)


def test_what_a_timed_call_changes_is_put_back():
    model = Counting().eval()
    executable = compiled(model)
    state, calls = torch.get_rng_state(), model.calls.clone()
    x, found = X.clone(), service([])
    found.time(model, executable, executable, tsopt.example(x))
    assert len(found._pairs) == 1
    assert found.largest == X.numel()
    assert (model.seen, model.calls) == (0, calls)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, X)


def test_a_call_that_raises_is_left_to_the_call_itself(caplog):
    def broken(x):
        raise ValueError("of this call")

    found = service([])
    with caplog.at_level("INFO", "tsopt"):
        found.time(broken, broken, compiled(nn.ReLU()), tsopt.example(X))
    assert "of this call" in caplog.text
    assert not found._pairs
    assert found.is_affordable


def test_a_model_that_calls_itself_is_timed_once():
    found, asked = service([]), SimpleQueue()  # a list would be put back

    def model(x):
        asked.put(found.is_affordable)
        return x.relu()

    found.time(model, model, compiled(nn.ReLU()), tsopt.example(X))
    assert [asked.get_nowait(), asked.get_nowait(), asked.empty()] == [False, False, True]
