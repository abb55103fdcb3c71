"""Audits of partitioned models: they find what has changed, and change nothing themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.runtime.calling.helpers import Signs
from tests.runtime.calling.parts import Branches, Decides, X, due, optimized
from tsopt.runtime.calling import partitioned
from tsopt.runtime.racing import race
from tsopt.runtime.racing.speedup import Speedup, Timing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.usefixtures("parts_win", "single_threaded")
def test_an_audit_leaves_what_the_python_of_the_model_counts():
    model = Branches().eval()
    fast = due(optimized(model))
    calls, count = model.calls, model.count.clone()
    fast(X)
    assert (fast._audits.count, fast.backend) == (1, "parts")
    assert (model.calls, model.count) == (calls + 1, count + 1)


MEANS: list[float] = []


class Means(nn.Module):
    """Keeps what its inner values are on average, outside of it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        hidden = self.first(x)
        MEANS.append(float(hidden.mean()))
        return self.second(hidden)


@pytest.mark.usefixtures("parts_win", "single_threaded")
def test_an_audit_leaves_what_the_python_of_the_model_collects():
    fast = due(optimized(Means().eval(), frontend="parts"))
    MEANS.clear()
    fast(X)
    fast(X)
    assert (fast._audits.count, fast.backend) == (1, "parts")
    assert len(MEANS) == 2


def beside_another(fast, work, in_a_thread):
    """The same, while another thread does some work in each call."""
    run = fast._run
    fast._run = lambda *args, **kwargs: in_a_thread(work) or run(*args, **kwargs)
    return fast


@pytest.mark.usefixtures("parts_win", "another_thread")
def test_what_another_thread_counts_during_an_audit_stays(in_a_thread):
    model = Branches().eval()
    fast = beside_another(due(optimized(model)), lambda: model.count.add_(1), in_a_thread)
    count = model.count.clone()
    fast(X)
    assert fast._audits.count == 1
    assert model.count == count + 2


@pytest.mark.usefixtures("parts_win", "another_thread")
def test_parts_that_leave_no_trace_are_compared_beside_another_thread(in_a_thread):
    model, drawn = Signs().eval(), []

    def work():
        drawn.append(torch.rand(1).item())
        model.norm.num_batches_tracked.fill_(7)

    fast = beside_another(optimized(model, frontend="parts"), work, in_a_thread)
    assert fast.difference((X,), {}) == ""
    work()
    assert len(set(drawn)) == 2
    assert model.norm.num_batches_tracked == 7


class Sides(nn.Module):
    """Does something on one side of a branch that it does not do on the other."""

    def __init__(self, does):
        super().__init__()
        self.layer, self.does, self.calls = nn.Linear(8, 8), does, 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        y = self.layer(x)
        if x.sum() < 0:
            return -y
        if self.does == "counts":
            self.calls += 1
        elif self.does == "writes":
            self.count.add_(1)
        elif self.does == "draws":
            y = y * torch.rand(8)
        return y * 2


@pytest.mark.usefixtures("parts_win", "another_thread")
@pytest.mark.parametrize("does", ["counts", "writes", "draws"])
def test_a_call_that_takes_another_branch_than_the_example_is_not_audited_beside_another_thread(does):
    model, x = Sides(does).eval(), X.abs()
    fast = optimized(model, -x, frontend="parts")
    assert fast.backend == "parts"
    assert fast.difference((x,), {}) is None
    assert (model.calls, model.count) == (0, 0)
    assert fast.difference((-x,), {}) == ""


@pytest.mark.usefixtures("parts_win", "another_thread")
def test_what_another_thread_does_during_an_audit_that_leaves_no_trace_stays(in_a_thread):
    model, x = Sides("counts").eval(), X.abs()

    def work():
        model.calls += 1
        model.count.add_(1)

    fast = beside_another(optimized(model, -x, frontend="parts"), work, in_a_thread)
    assert fast.difference((-x,), {}) == ""
    assert (model.calls, model.count) == (1, 1)


@pytest.mark.usefixtures("parts_win")
def test_what_parts_do_not_notice_an_audit_finds(monkeypatch):
    monkeypatch.setattr(race, "speedup", lambda *_: Speedup(2.0, 1.9, 2.1))

    class Decides(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            hidden = torch.tanh(self.first(x))
            return {"y": self.second(hidden) if hidden.sum() > 1e6 else self.second(-hidden)}

    model = Decides().eval()
    fast = due(optimized(model, frontend="parts"))
    model.second.weight.detach().numpy()[:] *= 2
    wanted = model(X)["y"].detach()
    with pytest.warns(UserWarning, match="runs in eager mode from now on: .*y: 12 of 12 values"):
        torch.testing.assert_close(fast(X)["y"], wanted)
    assert fast.backend == "eager"
    assert "since then" in fast.report.text


def test_a_script_keeps_the_weights_of_then(monkeypatch):
    def measure(calls, inputs, **_):
        return {name: Timing((9.0, 9.01) * 4 if name == "eager" else (1.0, 1.01) * 4, 5) for name in calls}

    monkeypatch.setattr(partitioned, "measure", measure)
    script = torch.jit.script(Decides().eval())
    fast = due(optimized(script))
    wanted = fast(X)
    with torch.no_grad():
        script.layer.weight.mul_(2)
    with pytest.warns(UserWarning, match="calls keep using the old ones"):
        torch.testing.assert_close(due(fast)(X), wanted)
    assert fast.backend == "torchscript"


@pytest.mark.usefixtures("another_thread", "parts_win")
def test_torchscript_is_compared_beside_another_thread():
    """Its weights are copies: nothing but an audit tells that those of the model have changed."""
    model = torch.jit.script(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval())
    fast = optimized(model, frontend="parts")
    assert fast.difference((X,), {}) == ""
    with torch.no_grad():
        dict(model.named_parameters())["0.weight"].mul_(2)
    assert fast.difference((X,), {})
