"""The values of a program on real inputs."""

from __future__ import annotations

import weakref

import torch

import tsopt
from tests.compiler.helpers import Net
from tsopt.compiler.graph import values
from tsopt.compiler.graph.values import Values

X = torch.arange(6.0).reshape(2, 3)


def test_outputs_are_those_of_the_model_whatever_else_uses_them():
    def forward(self, x):
        first = x + self.w
        return first, first.relu() * first, x

    model = Net(forward, w=torch.tensor([1.0, -9.0, 2.0]))
    program = tsopt.capture(model, X)
    found, wanted = Values.on(program, [X]).compute(program.outputs), model(X)
    assert len(found) == len(wanted)
    assert all(map(torch.equal, found, wanted))
    assert all(map(torch.equal, found, (Values.on(program, [X])[node] for node in program.outputs)))


def test_what_is_used_up_is_given_back(monkeypatch):
    """The activations of a detector are gigabytes."""

    def forward(self, x):
        kept = x.sin()
        for _ in range(20):
            x = x.cos() + 1
        return x + kept

    program, alive, most = tsopt.capture(Net(forward), X), [], []
    called = values._called

    def counted(node, args, kwargs):
        value = called(node, args, kwargs)
        alive.append(weakref.ref(value))
        most.append(sum(item() is not None for item in alive))
        return value

    monkeypatch.setattr(values, "_called", counted)
    Values.on(program, [X]).compute(program.outputs)
    assert len(most) > 40
    assert max(most) <= 4


def test_only_what_is_asked_for_is_computed(monkeypatch):
    program, called = tsopt.capture(Net(lambda self, x: (x.sin(), x.cos().tan())), X), []
    real = values._called
    monkeypatch.setattr(values, "_called", lambda node, *rest: called.append(node.name) or real(node, *rest))
    (found,) = Values.on(program, [X]).compute(program.outputs[1:])
    assert torch.equal(found, X.cos().tan())
    assert called == ["cos", "tan"]
