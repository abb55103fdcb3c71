"""What else happens to a model while its compiled form is made in another process: nothing of it is lost."""

from __future__ import annotations

import os
import sys
import threading
import weakref

import pytest
import torch
from torch import nn

import tsopt
from tests.background.helpers import QUICK, Net, X, reports
from tests.forks import FORKS, in_a_fork
from tsopt.background import in_background, job
from tsopt.compiler.turns import Turn
from tsopt.hybrid import compiled_of
from tsopt.runtime.calling.holdings import Holdings
from tsopt.runtime.calling.model_changes import Watch


class Answered(job.Job):
    """No process: the answer is that eager is the fastest, and what calls write."""

    answers, meanwhile, written, made = True, None, ("x",), 0

    def __init__(self, model, examples, options):
        type(self).made += 1
        self.examples, self.watch, self._tensors = examples, Watch(model), job.named_tensors(model)
        self._held = Holdings(self.watch.modules)
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


@FORKS
def test_a_fork_has_no_part_in_what_its_parent_has_begun(answered):
    net, answered.answers = tsopt.hybridize(Net().eval(), **QUICK), False
    net(X)
    behind = compiled_of(net)
    held, free = threading.Event(), threading.Event()

    def hold():
        with behind._turn.taken(), behind.fast._lock:
            held.set()
            free.wait(60)

    def is_free():
        with Turn().taken(), behind._turn.taken() as mine:  # one that has another does not wait
            return tsopt.wait(net, 0) and mine

    thread = threading.Thread(target=hold, daemon=True)  # which the fork does not have
    thread.start()
    assert held.wait(60)
    assert not is_free()
    assert in_a_fork(is_free)
    free.set()
    thread.join(60)
    assert not tsopt.wait(net, 0)


@FORKS
def test_a_process_ends_with_its_caller_although_a_fork_of_that_is_there(monkeypatch):
    until_the_end = [sys.executable, "-c", "import sys; sys.stdin.buffer.read()"]
    monkeypatch.setattr(job, "python", lambda *_: until_the_end)
    begun = job.Job(Net().eval(), [tsopt.example(X)], {})
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(write)
        os.read(read, 1)  # until the parent closes it
        os._exit(0)
    os.close(read)
    begun._process.stdin.close()
    ended = begun.wait(30)
    os.close(write)
    os.waitpid(child, 0)
    assert ended


def test_waiting_while_another_thread_waits_takes_no_longer_than_asked_for(answered):
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
    net(X)
    assert compiled_of(net).fast._job is not None, "it is made again"


class Scaled(Net):
    """What knows the model by its identity, which a copy of it does not have."""

    def forward(self, x):
        return super().forward(x) * SCALES.get(self, 1.0)


SCALES = weakref.WeakKeyDictionary()


@pytest.mark.sliced(1)
@pytest.mark.filterwarnings("ignore:tsopt. Scaled runs in eager mode:UserWarning")
def test_a_model_that_is_known_by_its_identity_is_compared_itself(always_faster):
    model = Scaled().eval()
    SCALES[model] = 2.0
    net = tsopt.hybridize(model, **QUICK)
    with torch.no_grad():
        net(X)
        assert tsopt.wait(net)
        assert torch.allclose(net(X), model(X), atol=1e-5)
        assert float(net.x) == 3.0
