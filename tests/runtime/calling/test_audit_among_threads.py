"""Audits while other threads run: what these draw, write and load is theirs."""

from __future__ import annotations

import random
from queue import SimpleQueue

import pytest
import torch
from torch import nn

import tsopt
from tests.runtime.calling.helpers import X
from tests.runtime.helpers import Counter
from tsopt.compiler.calls.example import Example
from tsopt.runtime.calling.audit import executable_difference, may_draw


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).eval().requires_grad_(False)


def test_what_another_thread_draws_during_an_audit_is_not_drawn_again(model, in_a_thread, another_thread):
    drawn = []
    executable = tsopt.compile(tsopt.capture(model, X), "eager")
    executable.reference = tsopt.capture(model, X)

    def draw():
        drawn.append((torch.rand(1).item(), random.random()))

    model.register_forward_pre_hook(lambda module, args: in_a_thread(draw))
    assert executable_difference(executable, model, Example((X,))) == ""
    draw()
    assert len(drawn) == 2
    assert not set(drawn[0]) & set(drawn[1])


def test_what_tells_rounding_from_errors_draws_nothing_beside_another_thread(in_a_thread, another_thread):
    drawn = []

    class Cancels(nn.Module):
        def forward(self, x):
            return (x / 3 + 1e3) * 3 - 3e3

    model, x = Cancels(), torch.rand(2000, generator=torch.Generator().manual_seed(0)) - 0.5
    program = tsopt.capture(model, x)
    executable = tsopt.compile(program, "eager")
    executable.reference = program
    executable._runs(lambda inputs: [(inputs[0] + 3e3) - 3e3])
    model.register_forward_pre_hook(lambda module, args: in_a_thread(lambda: drawn.append(torch.rand(1).item())))
    assert executable_difference(executable, model, Example((x,))) == ""
    assert len(drawn) > 1, "the model is asked more than once"
    assert len(set(drawn)) == len(drawn)


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


def draws_elsewhere(executable, in_a_thread):
    """The same, while another thread draws."""
    right = executable._run
    executable._runs(lambda inputs: in_a_thread(lambda: torch.rand(1)) or right(inputs))
    return executable


def test_a_model_that_draws_is_not_compared_while_another_thread_may_draw(in_a_thread, another_thread):
    model = Noisy().eval()
    program = tsopt.capture(model, X)
    executable = draws_elsewhere(tsopt.compile(program, "eager"), in_a_thread)
    executable.reference = program
    before = torch.get_rng_state()
    assert executable_difference(executable, model, Example((X,))) is None
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.usefixtures("single_threaded")
def test_alone_a_model_that_draws_is_compared():
    model = Noisy().eval()
    program = tsopt.capture(model, X)
    executable = tsopt.compile(program, "eager")
    executable.reference = program
    assert executable_difference(executable, model, Example((X,))) == ""
    executable._runs(lambda inputs: [inputs[0]])
    assert "exceed" in executable_difference(executable, model, Example((X,)))


def test_a_model_may_draw_unless_it_is_known_not_to():
    program, noisy = tsopt.capture(Counter().eval(), X[0, :2]), tsopt.capture(Noisy().eval(), X)
    executable = tsopt.compile(program, "eager")
    assert may_draw(executable)
    executable.reference = program
    assert not may_draw(executable)
    executable.reference = None
    assert not may_draw(executable.called_as(executable.signature)), "found out before"
    executable = tsopt.compile(noisy, "eager")
    executable.reference = noisy
    assert may_draw(executable)


@pytest.fixture
def counting():
    """A model that counts its calls, and what it is compiled to."""
    model = Counter().eval()
    program = tsopt.capture(model, torch.zeros(2))
    executable = tsopt.compile(program, "eager")
    executable.reference = program
    return model, executable


def test_what_another_thread_counts_during_an_audit_stays(counting, in_a_thread, another_thread):
    model, executable = counting
    right = executable._run

    def beside_another(inputs):
        in_a_thread(lambda: model.count.add_(1))
        return right(inputs)

    executable._runs(beside_another)
    assert executable_difference(executable, model, Example((torch.zeros(2),))) == ""
    assert torch.equal(model.count, torch.ones(2))
    assert executable.state[0] is model.count


def test_a_difference_is_found_beside_another_thread_in_what_is_written_too(counting, another_thread):
    model, executable = counting
    right = executable._run
    executable._runs(lambda inputs: [value + 1 for value in right(inputs)])
    assert "exceed" in executable_difference(executable, model, Example((torch.zeros(2),)))
    assert torch.equal(model.count, torch.zeros(2))


class Told(Counter):
    """Tells who is called, the module itself or a copy."""

    called = SimpleQueue()  # a list would be put back to what it was

    def forward(self, x):
        Told.called.put(self)
        return super().forward(x)


def test_a_difference_is_told_without_a_call_of_the_model_whose_writes_would_be_put_back(in_a_thread, another_thread):
    drawn, model, x = [], Told().eval(), torch.zeros(2)
    program = tsopt.capture(model, x)
    executable = tsopt.compile(program, "eager")
    executable.reference = program
    executable._runs(lambda inputs: [inputs[0] + 9, inputs[0] + 9])
    model.register_forward_pre_hook(lambda module, args: in_a_thread(lambda: drawn.append(torch.rand(1).item())))
    Told.called = SimpleQueue()
    assert executable_difference(executable, model, Example((x,)))
    called = [Told.called.get() for _ in range(Told.called.qsize())]
    assert called
    assert not any(who is model for who in called)
    assert len(set(drawn)) == len(drawn) > 1, "what another thread draws is not drawn again"
