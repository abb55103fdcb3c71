"""What a job has made nothing for, is begun again when the model has changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tests.background.helpers import QUICK, Net, X, reports
from tsopt.background import in_background
from tsopt.background.in_background import InBackground
from tsopt.background.job import Job
from tsopt.hybrid import compiled_of
from tsopt.runtime.calling import refused
from tsopt.runtime.calling.model_changes import Watch

pytestmark = pytest.mark.filterwarnings("ignore:tsopt. .* runs in eager mode:UserWarning")


def settled(net):
    found = net(X)
    tsopt.wait(net)
    return found


def test_a_hook_that_collects_keeps_it_in_eager_only_while_it_is_there():
    net, seen = tsopt.hybridize(Net().eval(), **QUICK), {}
    hook = net.layers[0].register_forward_hook(lambda module, args, output: seen.__setitem__("x", output))
    settled(net)
    assert reports(net)[0].winner_key != "model"
    settled(net)
    assert "outside of the model" in str(tsopt.report(net))
    hook.remove()
    settled(net)
    before = sum(tsopt.report(net).in_eager.values())
    torch.testing.assert_close(net(X), net.layers(X))
    assert sum(tsopt.report(net).in_eager.values()) == before


def test_a_lazy_module_is_compiled_once_it_has_weights():
    net = tsopt.hybridize(nn.Sequential(nn.LazyLinear(16), nn.GELU()).eval(), **QUICK)
    for _ in range(2):
        settled(net)
    assert [report.winner for report in reports(net)] == ["TorchScript"]


@pytest.fixture
def jobs(monkeypatch):
    """How many sizes those jobs are for that were begun."""
    begun, real = [], in_background.Job

    def job(model, examples, options):
        begun.append(len(examples))
        return real(model, examples, options)

    monkeypatch.setattr(in_background, "Job", job)
    return begun


def of_sizes(net, *rows):
    for count in rows:
        x = torch.ones(count, 16)
        assert net(x).shape == x.shape
        assert tsopt.wait(net)


def test_what_calls_change_outside_of_the_model_is_so_in_calls_of_all_sizes(jobs):
    net, seen = tsopt.hybridize(Net().eval(), **QUICK), {}
    net.layers[0].register_forward_hook(lambda module, args, output: seen.__setitem__("x", output))
    of_sizes(net, 4, 9, 9, 12, 12, 12)
    assert jobs == [1]
    assert sorted(tsopt.report(net).in_eager.values()) == [1, 5], "the first call while it is being compiled"


@pytest.mark.slow
def test_an_error_that_is_the_same_for_two_sizes_is_so_for_all(jobs):
    net = tsopt.hybridize(Decides().eval(), **QUICK)
    of_sizes(net, 4, 9, 12, 12, 15, 15, 15, 20, 20, 20)
    assert len(jobs) <= 4


class NoProcess:
    """A job that ends at once, in an error."""

    ended, error = True, tsopt.CaptureError("no matter")

    def __init__(self, model, examples, options):
        self.examples, self.watch = examples, Watch(model)

    def wait(self, seconds):
        return True

    def answer(self):
        raise self.error


def test_an_error_that_has_ended_two_jobs_is_told_of_calls_that_are_not_much_larger(monkeypatch):
    monkeypatch.setattr(in_background, "Job", NoProcess)
    net = tsopt.hybridize(Net().eval(), **QUICK)
    of_sizes(net, 4, 9, *range(10, 50))
    behind = compiled_of(net).fast
    assert behind._started == 7, "what holds for small sizes need not hold for those that are more than twice as large"


class ForSmallOnes(NoProcess):
    """A job that ends in an error for small inputs only."""

    def __new__(cls, model, examples, options):
        is_small = any(len(example.args[0]) < 10 for example in examples)
        return super().__new__(cls) if is_small else Job(model, examples, options)


def test_calls_that_are_much_larger_than_those_that_are_refused_are_compiled(monkeypatch):
    monkeypatch.setattr(in_background, "Job", ForSmallOnes)
    net = tsopt.hybridize(Net().eval(), **QUICK)
    of_sizes(net, 4, 9, 4, 9, 9, *[40] * 8)
    assert [report.winner_key for report in reports(net)] != []
    assert compiled_of(net).fast.serving((torch.ones(40, 16),), {}) is not None


def test_after_many_calls_that_were_refused_most_are_not_looked_at(monkeypatch):
    monkeypatch.setattr(in_background, "Job", NoProcess)
    monkeypatch.setattr(refused, "STREAK", 2)
    net, looks, real = tsopt.hybridize(Net().eval(), **QUICK), [], InBackground.changed
    monkeypatch.setattr(InBackground, "changed", lambda self: looks.append(1) or real(self))
    for _ in range(100):
        settled(net)
    found = tsopt.report(net)
    assert len(looks) < 15
    assert (found.calls, found.in_eager.total(), found.in_eager["no matter"]) == (100, 100, 99)
    monkeypatch.undo()
    net.layers[0].linear.weight.data = net.layers[0].linear.weight * 2
    for _ in range(2 * refused.LONGEST_PAUSE):
        net(X)
        if compiled_of(net).fast._job is not None:
            break
    assert compiled_of(net).fast._job is not None, "it is looked at again"


class Decides(Net):
    """Is no graph, and counts its calls in a buffer and in Python."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) if float(x.sum()) < 1e9 else x


def test_what_a_refused_model_changes_in_its_own_calls_is_no_change():
    net = tsopt.hybridize(Decides().eval(), **QUICK)
    settled(net)
    first = tsopt.report(net).compile_seconds
    for _ in range(3):
        settled(net)
    found = tsopt.report(net)
    assert found.compile_seconds == first, "it is not tried again"
    assert found.in_eager.total() == found.calls == 4
    assert any("data-dependent" in reason for reason in found.in_eager)
