"""A program for many sizes at given ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tests.passes.helpers import ops_of
from tsopt.compiler.graph.verify import verify_program
from tsopt.compiler.sizes.specialize import by_size_alone, instance, retyped, specialize, traced_sizes


@pytest.fixture
def program():
    table = torch.randn(16, 4)

    def model(x):
        return x + table[: x.shape[0]], torch.zeros(x.shape[0], 2)

    return tsopt.capture(model, torch.randn(3, 4), dynamic={"x": {0: "n"}})


def test_the_types_are_those_of_the_trace(program):
    assert traced_sizes(program.signature) == {"n": 3}
    verify_program(program)


def test_at_a_size_a_program_is_static_and_right(program):
    made = specialize(program, {"n": 5})
    verify_program(made)
    assert made.signature.dims == ()
    assert made.signature.inputs[0].type.shape == (5, 4)
    assert "sym_size.int" not in ops_of(made)
    x = torch.randn(5, 4)
    for mine, other in zip(tsopt.compile(made, "eager")(x), tsopt.compile(program, "eager")(x), strict=True):
        assert torch.equal(mine, other)


def test_what_depends_on_sizes_alone_comes_in_where_passes_look(program):
    names = {node.target for node in by_size_alone(program)}
    assert {str(name) for name in names} == {"aten.slice.Tensor", "aten.zeros.default"}
    made = instance(program, {"n": 5})
    verify_program(made.program)
    assert ops_of(made.program) == ["add.Tensor"]
    assert [tuple(item.type.shape) for item in made.program.signature.inputs] == [(5, 4), (5, 4), (5, 2)]


def test_random_numbers_are_not_a_matter_of_size():
    program = tsopt.capture(lambda x: x + torch.rand(x.shape[0], 4), torch.randn(3, 4), dynamic={"x": {0: "n"}})
    assert by_size_alone(program) == frozenset()


def test_types_at_other_sizes(program):
    made = retyped(program, {"n": 7})
    assert made.signature.outputs[1].type.shape == (7, 2)
    assert program.signature.outputs[1].type.shape == (3, 2)
    verify_program(made)


def test_sizes_that_do_not_fit_raise(program):
    with pytest.raises(tsopt.CaptureError, match=r"the program does not run at n=17\n  why: RuntimeError: .*broadcast"):
        specialize(program, {"n": 17})


def test_sizes_that_torch_has_no_shapes_for_are_refused():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Upsample(scale_factor=2)).eval()
    program = tsopt.capture(model, [torch.randn(1, 3, 16, 16), torch.randn(2, 3, 16, 16)])
    assert specialize(program, {"batch": 3}).signature.outputs[0].type.shape == (3, 4, 28, 28)
    with pytest.raises(tsopt.CaptureError, match=r"the program does not run at batch=0\n  why: \w+: "):
        specialize(program, {"batch": 0})
