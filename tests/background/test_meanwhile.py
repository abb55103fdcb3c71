"""What else happens to a model while its compiled form is made in another process: nothing of it is lost."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from torch import nn

import tsopt
from tests.background.helpers import QUICK, Net, X, reports
from tsopt.background import in_background, job
from tsopt.hybrid import compiled_of
from tsopt.runtime.calling.model_changes import Watch


class Answered(job.Job):
    """No process: the answer is that eager is the fastest, and what calls write."""

    answers, meanwhile, written, made = True, None, ("x",), 0

    def __init__(self, model, examples, options):
        type(self).made += 1
        self.examples, self.watch, self._tensors = examples, Watch(model), job.named_tensors(model)
        self._owner = os.getpid()
        if self.meanwhile is not None:
            self.meanwhile(model)

    @property
    def ended(self):
        return self.answers

    def wait(self, seconds):
        return self.answers

    def answer(self):
        return job.Answer(None, self.written)


@pytest.fixture
def answered(monkeypatch):
    made = type("Made", (Answered,), {})
    monkeypatch.setattr(in_background, "Job", made)
    return made


def test_what_a_call_writes_is_no_change_of_the_weights(answered):
    net = tsopt.hybridize(Net().eval(), **QUICK)
    net(X)
    assert tsopt.wait(net)
    assert (net.x, len(reports(net))) == (1, 1)


def load(model):
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def assign(model):
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [load, assign])
def test_weights_that_change_during_the_call_that_begins_it_are_not_those_that_were_sent(answered, change):
    answered.meanwhile = staticmethod(change)
    net = tsopt.hybridize(Net().eval(), **QUICK)
    net(X)
    assert tsopt.wait(net)
    assert reports(net) == []


def test_a_buffer_that_the_model_has_lost_meanwhile_is_a_change(answered):
    net = tsopt.hybridize(Net().eval(), **QUICK)
    net(X)
    net.x = None
    del net.x
    net.x = torch.zeros(())
    assert tsopt.wait(net)
    assert reports(net) == []


def test_a_fork_has_no_part_in_what_its_parent_has_begun(answered, monkeypatch):
    net, answered.answers = tsopt.hybridize(Net().eval(), **QUICK), False
    net(X)
    compiled_of(net).fast._lock.acquire()  # by another thread, which the fork does not have
    monkeypatch.setattr(os, "getpid", lambda: -1)
    net(X)
    assert answered.made == 2
    assert not tsopt.wait(net)


def test_to_wait_for_who_waits_takes_no_longer_than_asked_for(answered):
    net = tsopt.hybridize(Net().eval(), **QUICK)
    net(X)
    found = []
    with compiled_of(net).fast._lock:
        thread = threading.Thread(target=lambda: found.append(tsopt.wait(net, 0.01)), daemon=True)
        thread.start()
        thread.join(10)
        assert found == [False]
    assert tsopt.wait(net, float("inf"))


@pytest.mark.filterwarnings("ignore:tsopt. Net runs in eager mode:UserWarning")
def test_a_model_is_not_looked_through_at_each_call_for_gradients(answered, monkeypatch):
    found = []
    monkeypatch.setattr(in_background, "Watch", lambda model, *args: found.append(model) or Watch(model, *args))
    net, answered.answers = tsopt.hybridize(Net().eval().requires_grad_(False), **QUICK), False
    with torch.enable_grad():
        for _ in range(3):
            net(X)
    assert (answered.made, found) == (1, [])


class Normed(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        return self.norm(super().forward(x))


@pytest.mark.sliced(1)
def test_what_another_thread_loads_while_a_form_is_taken_over_stays(monkeypatch, in_a_thread):
    net, real = tsopt.hybridize(Normed().eval(), **QUICK), nn.functional.gelu

    def gelu(x):
        monkeypatch.setattr(nn.functional, "gelu", real)
        in_a_thread(lambda: net.norm.running_mean.fill_(3.0))
        return real(x)

    net(X)
    monkeypatch.setattr(nn.functional, "gelu", gelu)
    tsopt.wait(net)
    assert nn.functional.gelu is real, "the model was called"
    assert reports(net) == [], "it was made of other weights"
    assert (float(net.norm.running_mean[0]), float(net.x)) == (3.0, 1.0)
