"""Runs of passes, and the mistakes that they must not get away with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import fx, nn

from tests.passes.helpers import Edit, assert_computes, aten, capture, find, ops_of, run, specials
from tsopt.compiler.infer import infer
from tsopt.compiler.pipeline import Changes, Limits, Repeat, weight_bytes
from tsopt.compiler.program import Numerics
from tsopt.compiler.rewrite import RulePass, rule
from tsopt.compiler.verify import output_aliases, verify_program
from tsopt.errors import InvalidProgram, PassError, RuleError
from tsopt.passes import NORMALIZE, DeadCode


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))

    def forward(self, x, y):
        z = torch.sub(x, y)
        return z * self.w, z.sum(0)


def tiny():
    return capture(Tiny().eval(), (torch.randn(2, 3), torch.randn(2, 3)))


def new_call(program, before, target, *args):
    with program.graph.inserting_before(before):
        node = program.graph.call_function(target, args)
    node.meta["val"] = infer(program, target, args, {})
    return node


# ---- seeded mistakes --------------------------------------------------------------------------------------


def drop_the_sum(program):
    """M01: the output has another shape."""
    node = find(program, "sum.dim_IntList")
    node.replace_all_uses_with(node.args[0])
    program.graph.erase_node(node)


def keep_the_dimension(program):
    """M04, in place: the inputs of the call stay the same, a literal changes."""
    node = find(program, "sum.dim_IntList")
    node.args = (node.args[0], node.args[1], True)


def another_axis(program):
    """M03."""
    node = find(program, "sum.dim_IntList")
    node.args = (node.args[0], [1])


def lie_about_the_type(program):
    node = find(program, "mul.Tensor")
    made = new_call(program, node, aten.mul.Tensor, *node.args)
    made.meta["val"] = infer(program, aten.sum.default, (node.args[0],), {})
    node.replace_all_uses_with(made)
    program.graph.erase_node(node)


def lie_about_an_old_type(program):
    node = find(program, "sub.Tensor")
    node.meta = {**node.meta, "val": find(program, "sum.dim_IntList").meta["val"]}


def use_before_definition(program):
    node = find(program, "sub.Tensor")
    program.output_node.prepend(node)


def cycle(program):
    """The difference is computed from the product that is computed from it."""
    find(program, "sub.Tensor").replace_input_with(
        next(node for node in program.graph.nodes if node.op == "placeholder"), find(program, "mul.Tensor")
    )


def write(program):
    node = find(program, "mul.Tensor")
    made = new_call(program, node, aten.mul.Tensor, *node.args)
    made.target = aten.mul_.Tensor
    node.replace_all_uses_with(made)
    program.graph.erase_node(node)


def call_python(program):
    node = find(program, "mul.Tensor")
    with program.graph.inserting_before(node):
        made = program.graph.call_function(torch.mul, node.args)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    program.graph.erase_node(node)


def call_a_method(program):
    node = find(program, "mul.Tensor")
    with program.graph.inserting_before(node):
        made = program.graph.call_method("relu", (node.args[0],))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)


def unknown_weight(program):
    node = next(node for node in program.graph.nodes if node.op == "get_attr")
    node.target = "nowhere"


def another_weight(program):
    program.weights["w"] = torch.randn(4)
    new_call(program, program.output_node, aten.relu.default, find(program, "mul.Tensor"))


def another_input(program):
    first = next(iter(program.graph.nodes))
    with program.graph.inserting_before(first):
        made = program.graph.placeholder("more")
    made.meta = dict(first.meta)


def drop_an_output(program):
    program.output_node.args = (tuple(program.outputs[:1]),)


def swap_outputs(program):
    program.output_node.args = (tuple(reversed(program.outputs)),)


def return_a_literal(program):
    program.output_node.args = ((program.outputs[0], 3),)


def transpose_an_output(program):
    """M14: the shape is square, the strides give it away."""
    made = new_call(program, program.output_node, aten.t.default, program.outputs[0])
    program.output_node.args = ((made, program.outputs[1]),)


def return_the_input(program):
    program.output_node.args = ((next(iter(program.graph.nodes)), program.outputs[1]),)


def impossible_call(program):
    node = find(program, "mul.Tensor")
    with program.graph.inserting_before(node):
        made = program.graph.call_function(aten.mm.default, node.args)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    program.graph.erase_node(node)


MISTAKES = {
    drop_the_sum: 6,
    keep_the_dimension: 3,
    another_axis: 3,
    lie_about_the_type: 3,
    lie_about_an_old_type: 3,
    use_before_definition: 1,
    cycle: 1,
    call_a_method: 1,
    write: 2,
    call_python: 2,
    impossible_call: 3,
    unknown_weight: 4,
    another_weight: 4,
    another_input: 5,
    drop_an_output: 6,
    swap_outputs: 6,
    return_a_literal: 6,
    return_the_input: 7,
}


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


# What the types cannot tell, the numbers must: M01, M02, M20, M11.


def drop_a_node(program):
    node = find(program, "mul.Tensor")
    weight = node.args[1]
    node.replace_all_uses_with(node.args[0])
    program.graph.erase_node(node)
    program.graph.erase_node(weight)


def swap_operands(program):
    node = find(program, "sub.Tensor")
    node.args = (node.args[1], node.args[0])


def other_literal(program):
    node = find(program, "sum.dim_IntList")
    node.replace_all_uses_with(new_call(program, node, aten.amax.default, node.args[0], [0]))
    program.graph.erase_node(node)


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
    """M18: `x + 0 -> x` and `x * 0 -> 0` are right at ones."""
    model = lambda x: (x + 0.0).abs() * 0 + (x + 0.0)  # noqa: E731

    def edit(p):
        last = find(p, "abs")
        p.output_node.args = ((new_call(p, p.output_node, aten.mul.Tensor, last.args[0].args[0], 1.0),),)

    after, _ = run(capture(model, torch.ones(3)), (Edit(edit),))
    assert_computes(after, model, [torch.ones(3)], exact=True)
    with pytest.raises(AssertionError):
        assert_computes(after, model, [torch.tensor([value, float("inf"), 1.0])], exact=True)


# ---- honesty ----------------------------------------------------------------------------------------------


def test_a_change_that_was_not_made_is_an_error():
    with pytest.raises(PassError, match="faulty reported a change and made none"):
        run(tiny(), (Edit(lambda p: None),))


def test_a_change_that_was_not_reported_is_an_error():
    with pytest.raises(PassError, match="faulty reported no change and made one"):
        run(tiny(), (Edit(drop_a_node, says=False),))


def test_a_pass_that_raises_leaves_the_program():
    program = tiny()
    text = program.text

    def edit(p):
        drop_a_node(p)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(program, (Edit(edit),))
    assert program.text == text


def test_numerics_are_the_weakest_applied_and_never_become_stronger():
    passes = (Edit(drop_a_node, "a", numerics=Numerics.ROUNDING), Edit(swap_operands, "b"))
    after, _ = run(tiny(), passes)
    assert after.numerics == Numerics.ROUNDING
    before = replace(tiny(), numerics=Numerics.LOSSY)
    assert run(before, (Edit(drop_a_node),))[0].numerics == Numerics.LOSSY


def test_an_idle_pass_returns_the_program_itself():
    program = tiny()
    after, records = run(program, (DeadCode(),))
    assert after is program
    assert [record.changed for record in records] == [False]


def test_records_say_what_was_done():
    seen = []
    after, (record,) = run(tiny(), (Edit(drop_a_node, "dropper"),), keep_text=True, progress=seen.append)
    assert (record.name, record.changed, record.before.nodes, record.after.nodes) == ("dropper", True, 3, 2)
    assert (record.before.weight_bytes, record.after.weight_bytes) == (12, 0)
    assert record.text == after.text
    assert record.seconds > 0
    assert seen == ["dropper"]


def test_weights_nobody_uses_are_dropped_and_shared_ones_count_once():
    after, _ = run(tiny(), (Edit(drop_a_node),))
    assert after.weights == {}
    base = torch.randn(4)
    assert weight_bytes(replace(after, weights={"a": base, "b": base[:2]})) == 16


def test_a_broken_program_is_refused_before_the_first_pass():
    program = tiny()
    drop_an_output(program)
    with pytest.raises(InvalidProgram, match="invariant 6"):
        run(program, ())


# ---- repeat, fuel, without --------------------------------------------------------------------------------


def flip(program):
    swap_operands(program)


def test_a_repeat_that_never_rests_names_the_rules():
    with pytest.raises(PassError, match=r"(?s)did not come to rest in 4 rounds.*still being applied: swap"):
        run(tiny(), (Repeat((Edit(flip, "swap"),), limit=4),))


def test_a_repeat_stops_when_nothing_changes():
    program = capture(lambda x: x.clone().clone().neg(), torch.ones(3))
    after, records = run(program, (Repeat((NORMALIZE, DeadCode())),))
    assert ops_of(after) == ["neg"]
    assert [record.changed for record in records] == [True, False, False]  # and dce is not asked again


def test_a_pass_that_rests_on_a_program_is_not_asked_about_it_again():
    program = capture(lambda x: x.clone().neg(), torch.ones(3))
    _, records = run(program, (Repeat((DeadCode(), Repeat((NORMALIZE,)))), NORMALIZE))
    asked = [(record.name, record.changed) for record in records]
    assert asked == [("dce", False), ("normalize", True), ("normalize", False), ("dce", False)]


def test_a_pass_is_asked_again_once_another_has_changed_something():
    program = capture(lambda x: x.clone().sin(), torch.ones(3))
    late = RulePass("late", (cos_to_sin,))
    after, records = run(program, (late, RulePass("first", (sin_to_cos,)), late))
    assert [record.changed for record in records] == [False, True, True]
    assert "sin" in ops_of(after)


def test_repeats_nest():
    program = capture(lambda x: x.clone().neg(), torch.ones(3))
    after, _ = run(program, (Repeat((Repeat((NORMALIZE,)), DeadCode())),))
    assert ops_of(after) == ["neg"]


@rule(lambda x: aten.sin.default(x))
def sin_to_cos(at, x):
    """sin(x) -> cos(x)"""
    return at.call(aten.cos.default, x)


@rule(lambda x: aten.cos.default(x))
def cos_to_sin(at, x):
    """cos(x) -> sin(x)"""
    return at.call(aten.sin.default, x)


def test_rules_that_undo_each_other_are_named():
    program = capture(lambda x: x.sin(), torch.ones(3))
    with pytest.raises(PassError, match=r"(?s)pass loop does not come to an end.*cos_to_sin, sin_to_cos"):
        run(program, (RulePass("loop", (sin_to_cos, cos_to_sin)),))


@pytest.mark.parametrize("fuel", [0, 1, 2, 3, 9])
def test_fuel_counts_rewrites(fuel):
    program = capture(lambda x: x.sin() + (x + 1).sin() + (x + 2).sin(), torch.ones(3))
    after, records = run(program, (RulePass("cosine", (sin_to_cos,)),), Limits(fuel=fuel))
    assert ops_of(after).count("cos") == min(fuel, 3) == len(records[0].done)


def test_fuel_is_shared_by_passes():
    program = capture(lambda x: x.sin().clone().neg(), torch.ones(3))
    after, _ = run(program, (RulePass("cosine", (sin_to_cos,)), NORMALIZE), Limits(fuel=1))
    assert ops_of(after) == ["cos", "clone", "neg"]


@pytest.mark.parametrize("name", ["cosine", "sin_to_cos"])
def test_passes_and_rules_can_be_left_out(name):
    program = capture(lambda x: x.sin(), torch.ones(3))
    after, _ = run(program, (RulePass("cosine", (sin_to_cos,)),), Limits(without=frozenset({name})))
    assert ops_of(after) == ["sin"]


# ---- wrong rules ------------------------------------------------------------------------------------------


@rule(lambda x: aten.sin.default(x))
def returns_a_number(at, x):
    """sin(x) -> 3"""
    return 3


@rule(lambda x: aten.sin.default(x))
def returns_another_type(at, x):
    """sin(x) -> sum(x)"""
    return at.call(aten.sum.default, x)


@rule(lambda x: aten.sin.default(x))
def asks_for_the_impossible(at, x):
    """sin(x) -> x.view(7)"""
    return at.call(aten.view.default, at.call(aten.cos.default, x), [7])


def test_a_rule_must_return_a_value():
    program = capture(lambda x: x.sin(), torch.ones(3))
    with pytest.raises(RuleError, match="returns_a_number returned int"):
        run(program, (RulePass("wrong", (returns_a_number,)),))


def test_a_rule_must_keep_the_type():
    program = capture(lambda x: x.sin(), torch.ones(3))
    with pytest.raises(RuleError, match=r"returns_another_type replaces f32\[3\] by f32\[\]"):
        run(program, (RulePass("wrong", (returns_another_type,)),))


def test_a_call_that_the_op_refuses_declines_the_rule_and_leaves_nothing_behind():
    program = capture(lambda x: x.sin(), torch.ones(3))
    after, (record,) = run(program, (RulePass("wrong", (asks_for_the_impossible,)),))
    assert after is program
    assert "refuses" in record.declined[0].reason


def test_a_rule_without_an_equation_is_refused():
    with pytest.raises(TypeError, match="needs its equation"):
        rule(lambda x: aten.sin.default(x))(lambda at, x: x)


@dataclass(frozen=True)
class Renames:
    """A pass that does nothing but give nodes other names."""

    name: str = "renames"

    def run(self, program, limits):
        for node in program.calls():
            node.name = f"other_{node.name}"
        return Changes()


def test_a_change_of_order_alone_is_seen():
    program = capture(lambda x: (x.sin(), x.cos()), torch.ones(3))

    def turn(program):
        find(program, "sin").prepend(find(program, "cos"))

    after, records = run(program, (Edit(turn, "turn"),))
    assert records[0].changed
    assert ops_of(after) == ["cos", "sin"]
    assert ops_of(program) == ["sin", "cos"]


def test_names_of_nodes_are_no_change():
    assert isinstance(next(tiny().calls()), fx.Node)
    _, (record,) = run(tiny(), (Renames(),))
    assert not record.changed


def test_a_pass_may_be_given_special_values_of_any_kind():
    program = capture(lambda x: x.clone().neg(), specials(4))
    assert ops_of(run(program, (NORMALIZE,))[0]) == ["neg"]
