"""The invariants are re-derived. The mistakes that break them are in test_pipeline.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.passes.helpers import capture, find
from tsopt.compiler.graph.infer import infer
from tsopt.compiler.graph.verify import output_aliases, verify_program
from tsopt.errors import InvalidProgram

X = torch.ones(4, 4)


def test_a_captured_program_is_sound():
    verify_program(capture(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4)).eval(), X))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda x: x + 1, set()),
        (lambda x: x, {(0, "placeholder")}),
        (lambda x: (x + 1, x.t()), {(1, "placeholder")}),
        (lambda x: (lambda y: (y, y.view(-1)))(x + 1), {(1, 0)}),
        (lambda x: (lambda y: (y.t(), y[0], x))(x + 1), {(1, 0), (2, "placeholder")}),
        (lambda x: tuple(x.max(0)), set()),
        (lambda x: (x + 1).split(2), {(1, 0)}),
    ],
)
def test_shared_memory_of_outputs_is_named(model, expected):
    found = output_aliases(capture(model, X))
    assert {(i, source if isinstance(source, int) else source[0]) for i, source in found} == expected


def test_only_the_touched_types_are_derived_when_asked():
    program = capture(lambda x: x.sin().cos(), X)
    node = find(program, "sin")
    node.meta = {**node.meta, "val": capture(lambda x: x.double(), X).output_node.args[0][0].meta["val"]}
    verify_program(program, touched=())
    with pytest.raises(InvalidProgram, match="invariant 3: recorded as f64"):
        verify_program(program)


def test_a_wrong_stride_is_found():
    program = capture(lambda x: x.t().contiguous(), X)
    node = find(program, "t")
    node.meta = {**node.meta, "val": find(program, "clone").meta["val"] if "clone" in program.text else X}
    with pytest.raises(InvalidProgram, match="invariant 3"):
        verify_program(program)


def test_a_call_that_was_possible_elsewhere_is_derived_for_where_a_view_begins():
    program = capture(lambda x: torch.view_as_complex(x.view(-1)[2:6].view(2, 2)), X)
    verify_program(program)
    part = find(program, "slice.Tensor")
    after = next(iter(part.users))
    part.args = (part.args[0], 0, 1, 5)  # of the same type; but complex numbers begin at even places
    for node in (part, after):
        node.meta = {**node.meta, "val": infer(program, node.target, node.args, {})}
    with pytest.raises(InvalidProgram, match="invariant 3: the call is invalid"):
        verify_program(program)


def test_literals_that_are_equal_and_of_other_types_are_told_apart():
    program = capture(lambda x: (x * 2, x.int() * 2, x.int() * 2.0), X)
    verify_program(program)
    whole = [node for node in program.calls() if node.target == torch.ops.aten.mul.Tensor][1]
    whole.args = (whole.args[0], 2.0)
    with pytest.raises(InvalidProgram, match="invariant 3: recorded as i32"):
        verify_program(program)


def test_strides_of_single_dimensions_do_not_count():
    verify_program(capture(lambda x: x[:1].contiguous() + 1, X))


def test_a_weight_of_another_type_is_found():
    program = capture(nn.Linear(4, 4).eval(), X)
    program.weights["weight"] = torch.ones(4, 5)
    with pytest.raises(InvalidProgram, match=r"invariant 4: the weight is f32\[4, 5\]"):
        verify_program(program)


def test_a_missing_weight_is_found():
    program = capture(nn.Linear(4, 4).eval(), X)
    del program.weights["bias"]
    with pytest.raises(InvalidProgram, match="invariant 4: there is no weight with this name"):
        verify_program(program)
