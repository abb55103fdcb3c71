"""What nobody uses goes; what could still fail or be seen stays."""

from __future__ import annotations

import torch
from torch import nn

import tsopt
from tests.passes.helpers import Limits, capture, check, find, ops_of, run
from tsopt.passes import DeadCode

DCE = DeadCode()
X = torch.randn(2, 3)


def test_unused_chains_go():
    def model(x):
        (x.sin() + 1).cos()
        return x.relu()

    found = check(DCE, model, X, ["relu"])
    assert found.done == {"dead_code"}


def test_unused_weights_go():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x):
            x + self.w
            return x * 2

    found = check(DCE, Net().eval(), X, ["mul.Tensor"])
    assert found.after.weights == {}


def test_unused_random_calls_stay_and_so_do_the_numbers_behind_them():
    def model(x):
        torch.rand(3).lt(0.5)
        torch.empty(3)
        return x + torch.randn_like(x)

    program = capture(model, X)
    after, _ = run(program, (DCE,))
    assert ops_of(after) == ["rand", "randn_like", "add.Tensor"]

    def drawn(called):
        torch.manual_seed(0)
        return called(X), torch.rand(1)

    assert all(map(torch.equal, drawn(model), drawn(tsopt.compile(after, "eager"))))


def test_unused_results_of_a_split_go():
    check(DCE, lambda x: x.split(1, 1)[1] + 1, X, ["split.Tensor", "getitem", "add.Tensor"])


def test_an_assert_on_values_stays():
    """D19."""

    def model(x):
        torch._assert_async((x > -100).all(), "too small")
        return x + 1

    found = check(DCE, model, X)
    assert any("assert" in name for name in found.ops)
    assert "gt.Scalar" in found.ops


def test_an_assert_that_the_types_have_answered_goes():
    check(DCE, lambda x: x.double() + 1, X, ["to.dtype", "add.Tensor"])


def test_an_assert_that_the_types_contradict_stays():
    program = capture(lambda x: x.double() + 1, X)
    claim = find(program, "_assert_tensor_metadata")
    claim.kwargs = {**claim.kwargs, "dtype": torch.int8}
    edited = program.copy()
    DCE.run(edited, Limits())
    assert ops_of(edited).count("_assert_tensor_metadata") == 1


def test_written_buffers_stay():
    """The count is an output of the program although the user does not see it."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            return x * 2

    program = capture(Counter().eval(), X)
    after, _ = run(program, (DCE,))
    assert ops_of(after) == ops_of(program)
    assert len(after.outputs) == 2


def test_unused_inputs_stay():
    found = check(DCE, lambda x, y: x + 1, (X, X), ["add.Tensor"])
    assert len(found.after.signature.inputs) == 2


def test_a_custom_op_nobody_uses_stays():
    """It may log, count or talk to a device."""
    with torch.library._scoped_library("tsopt_tests", "DEF") as library:
        library.define("noisy(Tensor x) -> Tensor")
        library.impl("noisy", lambda x: x.clone(), "CompositeExplicitAutograd")
        torch.library.register_fake("tsopt_tests::noisy", lambda x: torch.empty_like(x), lib=library)

        def model(x):
            torch.ops.tsopt_tests.noisy(x)
            return x + 1

        program = capture(model, X)
        after, _ = run(program, (DCE,))
        assert ops_of(after) == ops_of(program)
