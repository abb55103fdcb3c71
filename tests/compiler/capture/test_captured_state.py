"""Weights, buffers and what a model writes, in a program."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsopt
from tests.compiler.helpers import Net
from tests.passes.helpers import assert_computes
from tsopt.compiler.capture.capture import capture
from tsopt.compiler.graph.verify import verify_program
from tsopt.errors import CaptureError

X = torch.randn(2, 3)


def captured(model, given):
    program = capture(model, given)
    verify_program(program)
    assert_computes(program, model, [given], exact=True)
    return program


# ---- weights ----------------------------------------------------------------------------------------------


def test_weights_share_memory_with_the_model():
    model = nn.Linear(3, 2).eval()
    program = captured(model, X)
    assert program.weights["weight"].data_ptr() == model.weight.data_ptr()
    assert program.name == "Linear"


def test_tied_weights_are_one():
    a, b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    b.weight = a.weight
    program = captured(nn.Sequential(a, b).eval(), X)
    assert list(program.weights) == ["0.weight"]


def test_unused_weights_are_left_out():
    model = Net(lambda self, x: x + self.used, used=torch.ones(3), unused=torch.ones(3))
    assert list(captured(model, X).weights) == ["used"]


def test_a_buffer_that_is_not_persistent_is_a_weight():
    model = Net(lambda self, x: x + self.b)
    model.register_buffer("b", torch.ones(3), persistent=False)
    assert captured(model, X).weights["b"].data_ptr() == model.b.data_ptr()


def test_a_plain_tensor_attribute_is_a_constant():
    model = Net(lambda self, x: x + self.c)
    model.c = torch.full((3,), 2.0)
    captured(model, X)


def test_a_weight_called_as_an_input_keeps_apart():
    program = captured(Net(lambda self, x: x + self.x, x=torch.ones(3)), X)
    assert program.text.count("input") == 1


def test_a_function_may_close_over_a_module():
    net = nn.Linear(3, 2).eval()
    captured(lambda x: net(x).relu(), X)


# ---- state ------------------------------------------------------------------------------------------------


def count(self, x):
    self.n += 1
    return x * self.n


def test_a_counter_is_an_input_and_an_output():
    model = Net(count, n=torch.tensor(5.0))
    program = capture(model, X)
    verify_program(program)
    assert [item.name for item in program.signature.state_inputs] == ["n"]
    assert [(item.name, item.writes) for item in program.signature.writes] == [("n.new", "n")]
    assert program.state["n"].data_ptr() == model.n.data_ptr()
    assert program.weights == {}
    assert model.n == 5
    new, value = program.module()(X, torch.tensor(7.0))
    assert new == 8
    assert torch.equal(value, X * 8)


def test_a_write_to_an_input_is_part_of_the_signature():
    given = X.clone()
    program = capture(lambda x: x.add_(1) * 2, given)
    verify_program(program)
    assert [(item.name, item.writes) for item in program.signature.writes] == [("x.new", "x")]
    assert torch.equal(given, X)
    new, value = program.module()(X)
    assert torch.equal(new, X + 1)
    assert torch.equal(value, (X + 1) * 2)


def test_writes_to_inner_values_leave_no_trace():
    def model(x):
        y = x.clone()
        y[0] = 7
        y.relu_().mul_(2)
        return y

    program = captured(model, X)
    assert program.signature.writes == ()


def test_a_written_buffer_that_is_returned_is_new():
    def model(self, x):
        self.n += 1
        return self.n, x + self.n

    program = capture(Net(model, n=torch.zeros(())), X)
    assert len(program.outputs) == 3


NORMS = {
    "batch_norm": lambda m, x: F.batch_norm(x, m.mean, m.var, training=True),
    "native_batch_norm": lambda m, x: torch.native_batch_norm(x, None, None, m.mean, m.var, True, 0.1, 1e-5)[0],
    "instance_norm": lambda m, x: F.instance_norm(x, m.mean, m.var, use_input_stats=True),
}


def statistics(norm):
    return Net(norm, mean=torch.zeros(3), var=torch.ones(3))


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_statistics_that_a_norm_writes_in_secret_are_state(norm):
    """The schemas of these ops deny it."""
    x, mine, theirs = torch.randn(4, 3, 5), statistics(norm), statistics(norm)
    program = captured(mine, x)
    assert [item.name for item in program.signature.state_inputs] == ["mean", "var"]
    assert not mine.mean.any()
    run = tsopt.compile(program, "eager")
    for _ in range(2):
        torch.testing.assert_close(run(x), theirs(x), rtol=0, atol=0)
        torch.testing.assert_close(mine.mean, theirs.mean, rtol=0, atol=0)
        torch.testing.assert_close(mine.var, theirs.var, rtol=0, atol=0)
    assert mine.mean.any()


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_optimizing_writes_no_statistics(norm):
    """Of a constant input all of the norm would be constant, but for the write."""
    model = statistics(lambda m, x: x + norm(m, torch.arange(60.0).reshape(4, 3, 5)))
    tsopt.transform(capture(model, torch.ones(4, 3, 5)))
    assert not model.mean.any()


def test_a_norm_that_cannot_be_taken_apart_is_refused(monkeypatch):
    monkeypatch.setattr(torch.export, "default_decompositions", dict)
    with pytest.raises(CaptureError, match=r"(?s)instance_norm updates its running statistics.*helpers.py.*fix: call"):
        capture(statistics(NORMS["instance_norm"]), torch.randn(4, 3, 5))
