"""The mistakes that a pass must not get away with."""

from __future__ import annotations

import pytest
import torch

from tests.compiler.mistakes import (
    MISTAKES,
    Tiny,
    drop_a_node,
    lie_about_the_type,
    other_literal,
    swap_operands,
    swap_outputs,
    tiny,
    transpose_an_output,
)
from tests.passes.helpers import Edit, assert_computes, aten, capture, find, run
from tsopt.compiler.graph.edit import new_call
from tsopt.compiler.graph.verify import output_aliases, verify_program
from tsopt.errors import InvalidProgram, PassError


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.__name__)
def test_a_faulty_pass_is_named_with_the_invariant(mistake):
    program = tiny()
    text = program.text
    with pytest.raises(PassError, match=rf"(?s)the pass faulty broke the program.*invariant {MISTAKES[mistake]}:"):
        run(program, (Edit(mistake),))
    assert program.text == text, "the program given to a failing pass must stay"
    verify_program(program)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.__name__)
def test_the_verifier_names_the_invariant(mistake):
    program = tiny()
    aliases = output_aliases(program)
    edited = program.copy()
    mistake(edited)
    with pytest.raises(InvalidProgram, match=rf"invariant {MISTAKES[mistake]}:"):
        verify_program(edited, aliases=aliases)


def test_a_square_transpose_is_told_by_its_strides():
    program = capture(lambda x: (x.neg(), x.sum()), torch.randn(3, 3))
    with pytest.raises(PassError, match="invariant 6"):
        run(program, (Edit(transpose_an_output),))


def test_two_outputs_that_start_to_share_memory_are_found():
    program = capture(lambda x: (x.neg(), x.neg()), torch.randn(3))
    with pytest.raises(PassError, match="invariant 7"):
        run(program, (Edit(lambda p: setattr(p.output_node, "args", ((p.outputs[0], p.outputs[0]),))),))


def test_an_output_that_starts_to_be_a_weight_is_found():
    program = capture(Tiny().eval(), (torch.randn(3), torch.randn(3)))

    def edit(p):
        weight = next(node for node in p.graph.nodes if node.op == "get_attr")
        p.output_node.args = ((weight, p.outputs[1]),)

    with pytest.raises(PassError, match="invariant 7"):
        run(program, (Edit(edit),))


def test_the_place_is_shown_with_five_lines_around():
    with pytest.raises(PassError) as caught:
        run(tiny(), (Edit(lie_about_the_type),))
    assert "> " in str(caught.value)
    assert "aten.sub.Tensor(%x, %y)" in str(caught.value)
    assert "fix: leave it out (--without faulty)" in str(caught.value)


@pytest.mark.parametrize("mistake", [drop_a_node, swap_operands, other_literal], ids=lambda m: m.__name__)
def test_a_mistake_of_the_right_type_is_seen_in_the_numbers(mistake):
    model, example = Tiny().eval(), (torch.randn(2, 3), torch.randn(2, 3))
    after, _ = run(capture(model, example), (Edit(mistake),))
    with pytest.raises(AssertionError):
        assert_computes(after, model, [example], exact=False)


def test_swapped_outputs_of_equal_type_are_seen_in_the_numbers():
    model = lambda x: (x.sin(), x.cos())  # noqa: E731
    after, _ = run(capture(model, torch.ones(3)), (Edit(swap_outputs),))
    with pytest.raises(AssertionError):
        assert_computes(after, model, [torch.ones(3)], exact=False)


@pytest.mark.parametrize("value", [float("nan"), -0.0])
def test_a_mistake_at_special_values_alone_is_seen_in_the_bits(value):
    """`x + 0 -> x` and `x * 0 -> 0` are right at ones."""
    model = lambda x: (x + 0.0).abs() * 0 + (x + 0.0)  # noqa: E731

    def edit(p):
        last = find(p, "abs")
        p.output_node.args = ((new_call(p, p.output_node, last, aten.mul.Tensor, (last.args[0].args[0], 1.0), {}),),)

    after, _ = run(capture(model, torch.ones(3)), (Edit(edit),))
    assert_computes(after, model, [torch.ones(3)], exact=True)
    with pytest.raises(AssertionError):
        assert_computes(after, model, [torch.tensor([value, float("inf"), 1.0])], exact=True)
