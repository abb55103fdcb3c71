"""Custom ops are called with the example, and with values near it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tsopt.compiler.calls.example import Example
from tsopt.runtime.checking import custom_ops
from tsopt.runtime.checking.accuracy import Oracle
from tsopt.runtime.checking.reference64 import called_in_float64

ROW = torch.linspace(1.0, 2.0, 8)
INDEX = torch.tensor([0, 3])


@pytest.fixture(scope="module")
def pooled():
    """An op whose kernel would read outside of memory for what is far from the example."""
    library = torch.library.Library("tsopt_tests", "DEF")
    library.define("pooled(Tensor x) -> Tensor")
    seen = []

    def kernel(x):
        seen.append(x.clone())
        return x * 2

    library.impl("pooled", kernel, "CPU")
    library.impl("pooled", torch.empty_like, "Meta")
    yield seen
    library._destroy()


class Pooled(nn.Module):
    def forward(self, x, index):
        return torch.ops.tsopt_tests.pooled(x)[index]


class Compiled(nn.Module):
    """Has a function that is compiled by torch.compile."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.inner = torch.compile(lambda x: x.sin() + 1, backend=self.counted)

    def counted(self, graph, example):
        def called(*args):
            self.calls += 1
            return graph(*args)

        return called

    def forward(self, x):
        return self.inner(x) * 2


@pytest.mark.parametrize("watched", [custom_ops.ops_of_call, called_in_float64])
def test_what_the_model_compiles_is_still_compiled_afterwards(watched):
    """TorchDynamo leaves out for good what is called under modes that it does not know."""
    model = Compiled()
    assert watched(model, Example((ROW,)))
    calls = model.calls
    assert calls
    model(ROW)
    assert model.calls == calls + 1


class Branch(nn.Module):
    def forward(self, x):
        pooled = torch.ops.tsopt_tests.pooled
        return torch.cond(x.sum() > 0, lambda x: pooled(x) + 1, lambda x: pooled(x) - 1, (x,))


def of_call(model, example):
    return custom_ops.among(custom_ops.ops_of_call(model, example))


def assert_near(seen):
    assert len(seen) > 1
    for x in filter(torch.Tensor.any, seen):  # tracers of torch run a program on zeros
        torch.testing.assert_close(x, ROW, rtol=0.011, atol=0)


def test_the_custom_ops_of_programs_and_of_calls_are_known(pooled):
    program = tsopt.capture(Pooled().eval(), (ROW, INDEX))
    assert custom_ops.of_program(program) == ("tsopt_tests::pooled",)
    assert of_call(Pooled().eval(), Example((ROW, INDEX))) == ("tsopt_tests::pooled",)
    assert custom_ops.of_program(tsopt.capture(nn.ReLU(), ROW)) == ()
    assert custom_ops.of_program(tsopt.capture(Branch().eval(), ROW)) == ("tsopt_tests::pooled",)
    assert of_call(nn.ReLU(), Example((ROW,))) == ()
    assert of_call(nn.Linear(3, 3), Example((ROW,))) == (), "what the model refuses has no ops"


@pytest.mark.parametrize("captured", [True, False])
def test_a_custom_op_is_not_called_with_values_that_are_made_up(pooled, captured):
    model, example = Pooled().eval(), Example((ROW, INDEX))
    program = tsopt.capture(model, example) if captured else None
    pooled.clear()
    oracle = Oracle(model, example, program)
    assert [expected.inputs.kind for expected in oracle.expected] == ["example", "near-1", "near-2"]
    assert all(torch.equal(expected.inputs.example.args[1], INDEX) for expected in oracle.expected)
    assert any("tsopt_tests::pooled might not check them" in text for text in oracle.skipped)
    assert oracle.judge(model).ok
    assert_near(pooled)


def test_nor_by_the_whole_of_optimize(pooled):
    pooled.clear()
    fast = tsopt.optimize(Pooled().eval(), (ROW, INDEX), backends=("eager", "torchscript"), seconds=0.05, cache=False)
    torch.testing.assert_close(fast(ROW, INDEX), 2 * ROW[INDEX])
    assert_near(pooled)


def test_a_wrong_candidate_is_still_wrong(pooled):
    model = Pooled().eval()
    assert not Oracle(model, Example((ROW, INDEX)), None).judge(lambda x, index: model(x, index) * 1.01).ok
