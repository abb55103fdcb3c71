"""Runs of passes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import fx

import tsopt
from tests.compiler.mistakes import drop_a_node, drop_an_output, swap_operands, tiny
from tests.passes.helpers import Edit, aten, capture, find, ops_of, run, specials
from tsopt.compiler.graph.labels import Labels
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.rewriting.pass_base import Changes, Limits, Pass, Repeat
from tsopt.compiler.rewriting.pipeline import weight_bytes
from tsopt.compiler.rewriting.rewrite import RulePass, rule
from tsopt.errors import InvalidProgram, PassError, RuleError, UsageError
from tsopt.passes import CANONICALIZE, DeadCode

# ---- honesty ----------------------------------------------------------------------------------------------


def test_a_change_that_was_not_made_is_an_error():
    with pytest.raises(PassError, match="faulty reported a change but made none"):
        run(tiny(), (Edit(lambda p: None),))


def test_a_change_that_was_not_reported_is_an_error():
    with pytest.raises(PassError, match="faulty reported no change but made one"):
        run(tiny(), (Edit(drop_a_node, says=False),))


def test_a_pass_that_raises_leaves_the_program():
    program = tiny()
    text = program.text

    def edit(p):
        drop_a_node(p)
        raise ZeroDivisionError

    with pytest.raises(PassError, match=r"(?s)the pass faulty raises ZeroDivisionError.*--without faulty") as caught:
        run(program, (Edit(edit),))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert program.text == text


def test_an_error_of_tsopt_that_a_pass_raises_is_passed_on():
    def edit(p):
        raise UsageError("no")

    with pytest.raises(UsageError, match="no"):
        run(tiny(), (Edit(edit),))


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
    assert record.text == Labels().text(after)
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
    with pytest.raises(PassError, match=r"(?s)did not converge in 4 rounds.*still being applied: swap"):
        run(tiny(), (Repeat((Edit(flip, "swap"),), limit=4),))


def test_a_repeat_stops_when_nothing_changes():
    program = capture(lambda x: x.clone().clone().neg(), torch.ones(3))
    after, records = run(program, (Repeat((CANONICALIZE, DeadCode())),))
    assert ops_of(after) == ["neg"]
    assert [record.changed for record in records] == [True, False, False]  # and dce is not asked again


def test_a_pass_that_rests_on_a_program_is_not_asked_about_it_again():
    program = capture(lambda x: x.clone().neg(), torch.ones(3))
    _, records = run(program, (Repeat((DeadCode(), Repeat((CANONICALIZE,)))), CANONICALIZE))
    asked = [(record.name, record.changed) for record in records]
    assert asked == [("dce", False), ("canonicalize", True), ("canonicalize", False), ("dce", False)]


def test_a_pass_is_asked_again_once_another_has_changed_something():
    program = capture(lambda x: x.clone().sin(), torch.ones(3))
    late = RulePass("late", (cos_to_sin,))
    after, records = run(program, (late, RulePass("first", (sin_to_cos,)), late))
    assert [record.changed for record in records] == [False, True, True]
    assert "sin" in ops_of(after)


@pytest.mark.parametrize("limit", [0, -1, 2.5, "3"])
def test_a_repeat_has_at_least_one_round(limit):
    with pytest.raises(UsageError, match=f"limit must be a number of rounds, got {limit!r}"):
        Repeat((CANONICALIZE,), limit=limit)


@pytest.mark.parametrize(
    ("passes", "what", "fix"),
    [
        (CANONICALIZE, "passes must be a tuple of passes, got a RulePass", r"\(my_pass,\)"),
        ("dce", "passes must be a tuple of passes, got a str", r"\(my_pass,\)"),
        (None, "passes must be a tuple of passes, got a NoneType", r"\(my_pass,\)"),
        ((DeadCode,), "among the passes is the class DeadCode", r"DeadCode\(\)"),
        (CANONICALIZE.rules, "among the passes is a Rule", "RulePass"),
    ],
)
def test_only_passes_are_repeated_and_run(passes, what, fix):
    program = capture(lambda x: x.sin(), torch.ones(3))
    calls = [
        lambda: Repeat(passes),
        lambda: tsopt.transform(program, passes),
        lambda: tsopt.optimize(lambda x: x.sin(), torch.ones(3), passes=passes),
    ]
    for call in calls:
        with pytest.raises(UsageError, match=f"(?s){what}.*{fix}"):
            call()


def test_repeats_nest():
    program = capture(lambda x: x.clone().neg(), torch.ones(3))
    after, _ = run(program, (Repeat((Repeat((CANONICALIZE,)), DeadCode())),))
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
    with pytest.raises(PassError, match=r"(?s)pass loop does not terminate.*cos_to_sin, sin_to_cos"):
        run(program, (RulePass("loop", (sin_to_cos, cos_to_sin)),))


@pytest.mark.parametrize("fuel", [0, 1, 2, 3, 9])
def test_fuel_counts_rewrites(fuel):
    program = capture(lambda x: x.sin() + (x + 1).sin() + (x + 2).sin(), torch.ones(3))
    after, records = run(program, (RulePass("cosine", (sin_to_cos,)),), Limits(fuel=fuel))
    assert ops_of(after).count("cos") == min(fuel, 3) == len(records[0].done)


def test_fuel_is_shared_by_passes():
    program = capture(lambda x: x.sin().clone().neg(), torch.ones(3))
    after, _ = run(program, (RulePass("cosine", (sin_to_cos,)), CANONICALIZE), Limits(fuel=1))
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
    with pytest.raises(RuleError, match=r"returns_another_type replaces f32\[3\] with f32\[\]"):
        run(program, (RulePass("wrong", (returns_another_type,)),))


def test_a_call_that_the_op_refuses_declines_the_rule_and_leaves_nothing_behind():
    program = capture(lambda x: x.sin(), torch.ones(3))
    after, (record,) = run(program, (RulePass("wrong", (asks_for_the_impossible,)),))
    assert after is program
    assert "rejects its arguments" in record.declined[0].reason


def test_a_rule_without_an_equation_is_refused():
    with pytest.raises(RuleError, match="needs a docstring with its equation"):
        rule(lambda x: aten.sin.default(x))(lambda at, x: x)


@dataclass(frozen=True)
class Renames(Pass):
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
    assert ops_of(run(program, (CANONICALIZE,))[0]) == ["neg"]


# ---- a pass that fails -------------------------------------------------------------------------------------


def _raises(program):
    raise KeyError("oops")


def _breaks(program):
    next(iter(program.calls())).meta["val"] = next(iter(program.calls())).meta["val"].double()


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (Edit(_raises, "faulty"), "the pass faulty raises KeyError; 'oops'"),
        (Edit(_breaks, "faulty"), "the pass faulty broke the program; invariant"),
        (Edit(lambda p: None, "faulty"), "reported a change but made none"),
        (RulePass("faulty", (sin_to_cos, cos_to_sin)), "the pass faulty does not terminate"),
    ],
    ids=["raises", "breaks", "lies", "loops"],
)
def test_a_pass_that_fails_is_left_out_and_the_others_go_on(fault, why):
    program = capture(lambda x: x.clone().sin(), torch.ones(3))
    after, records = run(program, (fault, CANONICALIZE), keep_going=True)
    assert ops_of(after) == ["sin"]
    (failed,) = [record for record in records if record.failed]
    assert failed.name == "faulty"
    assert why in failed.failed
    assert not failed.changed
    with pytest.raises(Exception):  # noqa: B017,PT011 - whatever it raises
        run(program, (fault, CANONICALIZE))


@pytest.mark.parametrize("error", [TypeError("no"), UsageError("no"), RuleError("no")], ids=lambda e: type(e).__name__)
def test_a_rule_that_raises_is_left_out_and_the_others_of_its_pass_go_on(error):
    @rule(lambda x: aten.cos.default(x))
    def broken(at, x):
        """cos(x) -> nothing at all"""
        raise error

    program = capture(lambda x: x.sin(), torch.ones(3))
    after, records = run(program, (RulePass("mine", (sin_to_cos, broken)),), keep_going=True)
    assert ops_of(after) == ["cos"]
    kept, failed = records
    assert (kept.failed, kept.left_out) == ("", "")
    said = f"the rule broken of the pass mine was left out: the rule broken raises {type(error).__name__}"
    assert failed.left_out.startswith(said)
    assert failed.left_out.endswith("; no")


@pytest.mark.parametrize("wrong", [returns_a_number, returns_another_type], ids=lambda item: item.name)
def test_a_rule_that_returns_what_cannot_be_used_is_left_out_too(wrong):
    program = capture(lambda x: x.sin(), torch.ones(3))
    after, (kept, failed) = run(program, (RulePass("mine", (wrong, sin_to_cos)),), keep_going=True)
    assert ops_of(after) == ["cos"]
    assert (kept.failed, failed.rule) == ("", wrong.name)


def test_a_repeat_that_does_not_come_to_rest_loses_the_pass_that_was_last():
    flips = RulePass("there", (sin_to_cos,)), RulePass("back", (cos_to_sin,))
    program = capture(lambda x: x.sin(), torch.ones(3))
    after, records = run(program, (Repeat(flips, limit=3),), keep_going=True)
    assert ops_of(after) == ["cos"]
    assert [record.name for record in records if record.failed] == ["back"]


def test_a_program_that_is_broken_before_any_pass_is_not_blamed_on_one():
    program = tiny()
    _breaks(program)
    with pytest.raises(InvalidProgram):
        run(program, (Edit(drop_a_node),), keep_going=True)
