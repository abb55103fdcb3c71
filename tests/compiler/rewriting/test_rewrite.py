"""What the driver sees to, so that no rule has to think of it. Wrong rules are in test_pipeline.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.passes.helpers import aten, capture, check, check_declines, check_fires, find, ops_of, run
from tsopt.compiler.rewriting import rewrite
from tsopt.compiler.rewriting.rewrite import NEW_ALIAS, OTHER_LAYOUT, USED_ELSEWHERE, RulePass, Site, rule
from tsopt.errors import RuleError

X = torch.rand(4, 4)


@rule(lambda x: aten.sin.default(aten.cos.default(x)))
def sin_cos(at, x):
    """sin(cos(x)) -> tanh(x)"""
    return at.call(aten.tanh.default, x)


@rule(lambda x: aten.neg.default(aten.neg.default(x)))
def cancel(at, x):
    """-(-x) -> x"""
    return x


@rule(lambda x: aten.clone.default(x))
def drop_clone(at, x):
    """clone(x) -> x"""
    return x


@rule(lambda x: aten.sin.default(x))
def to_constant(at, x):
    """sin(x) -> a weight"""
    return at.constant(torch.zeros(at.type(x).shape), "zeros")


@rule(lambda x, y: aten.mul.Tensor(x, y))
def to_fill(at, x, y):
    """x * 2.0 -> a weight"""
    return at.constant(torch.full(at.type(x).shape, y), "filled")


def test_new_nodes_are_typed_and_say_where_they_come_from():
    class Net(nn.Module):
        def forward(self, x):
            return x.cos().sin()

    program = capture(nn.Sequential(Net()), X)
    after, _ = run(program, (RulePass("t", (sin_cos,)),))
    made = find(after, "tanh")
    assert made.meta["val"].shape == (4, 4)
    assert made.meta["source"] == find(program, "sin").meta["source"]
    assert made.meta["module"] == "0"


def test_rewrites_cascade_upwards_and_downwards():
    check_fires(cancel, lambda x: x.neg().neg().neg().neg().neg().neg().abs(), X, ops=["abs"])


def test_values_used_elsewhere_decline_with_a_reason():
    check_declines(cancel, lambda x: (lambda y: ((-y).abs(), y + 1))(-x), X, USED_ELSEWHERE)


def test_the_root_may_be_used_many_times():
    check_fires(
        cancel,
        lambda x: (lambda y: y.abs() + y.sin() + y)(x.neg().neg()),
        X,
        ops=["abs", "sin", "add.Tensor", "add.Tensor"],
    )


def test_layouts_are_kept():
    check_declines(drop_clone, lambda x: x.expand(2, 4, 4).clone().abs(), X, OTHER_LAYOUT)


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x.clone(),
        lambda x: x.t().clone(),
        lambda x: x.clone().t(),
        lambda x: x.clone()[0],
        lambda x: [x.clone().view(-1)],
        lambda x: (x + 1, x.clone()),
        lambda x: x.clone().split(2),
    ],
)
def test_outputs_do_not_start_to_be_the_input(model):
    found = check(drop_clone, model, X)
    assert "clone" in found.ops
    assert ("drop_clone", NEW_ALIAS) in found.declined


def test_outputs_do_not_start_to_share_with_each_other():
    found = check(drop_clone, lambda x: (lambda y: (y, y.clone()))(x + 1), X)
    assert "clone" in found.ops


def test_a_copy_between_values_of_one_output_goes():
    check_fires(drop_clone, lambda x: (x + 1).clone(), X, ops=["add.Tensor"])


def test_a_copy_of_a_returned_value_that_is_not_returned_goes():
    check_fires(drop_clone, lambda x: (lambda y: (y, y.clone().sin()))(x + 1), X, ops=["add.Tensor", "sin"])


def test_fresh_names_do_not_meet_old_ones():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("zeros", torch.ones(4, 4))

        def forward(self, x):
            return x.sin() + self.zeros + x.cos().sin()

    after, _ = run(capture(Net().eval(), X), (RulePass("t", (to_constant,)),))
    assert sorted(after.weights) == ["zeros", "zeros.2"]
    assert torch.equal(after.weights["zeros"], torch.ones(4, 4))


@pytest.mark.parametrize(
    ("numbers", "count"),
    [
        ((2.0, 2.0, 2.0), 1),
        ((2.0, 3.0, 2.0), 2),
        ((0.0, -0.0, 0.0), 2),
        ((float("nan"), float("nan"), 1.0), 2),
    ],
    ids=str,
)
def test_weights_with_the_same_bits_are_one(numbers, count):
    def model(x):
        return [(x * number).abs() for number in numbers]

    after, _ = run(capture(model, X, allow_nan=True), (RulePass("t", (to_fill,)),))
    assert len(after.weights) == count


def test_a_weight_that_other_calls_read_outlives_a_rewrite_that_is_left():
    """The second one would be returned, which no weight may be."""
    after, (record,) = run(capture(lambda x: (x.sin() + 1, x.cos().sin()), X), (RulePass("t", (to_constant,)),))
    assert NEW_ALIAS in {item.reason for item in record.declined}
    assert list(after.weights) == ["zeros"]


def test_a_weight_that_is_left_is_made_anew():
    after, _ = run(capture(lambda x: (x.cos().sin(), x.sin() + 1), X), (RulePass("t", (to_constant,)),))
    assert list(after.weights) == ["zeros"]


def test_a_declined_rule_takes_back_what_it_made():
    """The constant would be an output."""
    program = capture(lambda x: x.sin(), X)
    after, (record,) = run(program, (RulePass("t", (to_constant,)),))
    assert after is program
    assert (record.done, [item.reason for item in record.declined]) == ((), [NEW_ALIAS])
    assert program.weights == {}


def test_dead_values_go_but_checks_and_draws_stay():
    @rule(lambda x, y: aten.mul.Tensor(x, aten.bernoulli.default(y)))
    def forget(at, x, y):
        """x * bernoulli(y) -> sin(x)"""
        return at.call(aten.sin.default, x)

    program = capture(lambda x: x * torch.bernoulli(x), X)
    after, _ = run(program, (RulePass("t", (forget,)),))
    assert ops_of(after) == ["bernoulli", "sin"]


def test_what_a_site_can_be_asked():
    program = capture(nn.Linear(4, 4).eval(), X)
    site = Site(program, find(program, "linear"))
    x, w, _ = site.root.args
    assert site.same_type(x)
    assert not site.same_type(3)
    assert site.value(w) is program.weights["weight"]
    assert site.value(x) is None
    assert site.value(3) is None
    assert site.type(w).shape == (4, 4)


def test_a_refused_call_prints_nothing(caplog):
    """The op's refusal is an answer, no event for the user's log."""

    @rule(lambda x: aten.sin.default(x))
    def impossible(at, x):
        """sin(x) -> mm(x, a vector)"""
        return at.call(aten.mm.default, x, at.call(aten.sum.dim_IntList, x, [0]))

    run(capture(lambda x: x.sin(), X), (RulePass("t", (impossible,)),))
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


def without_docstring(at, x):
    return x


def test_a_rule_needs_its_equation_but_where_python_leaves_docstrings_out(monkeypatch):
    make = rule(lambda x: aten.neg.default(x))
    with pytest.raises(RuleError, match="without_docstring needs a docstring with its equation"):
        make(without_docstring)
    monkeypatch.setattr(rewrite, "sys", SimpleNamespace(flags=SimpleNamespace(optimize=2)))
    assert make(without_docstring).doc == rewrite.NO_DOC


def test_a_rule_that_raises_is_named_with_the_place_and_how_to_go_on_without_it():
    @rule(lambda x: aten.relu.default(x))
    def broken(at, x):
        """relu(x) -> nothing at all"""
        return at.type(x).shape["rows"]

    program = capture(lambda x: x.relu(), torch.randn(2))
    with pytest.raises(RuleError, match=r"(?s)the rule broken raises TypeError.*where: .*--without broken") as caught:
        run(program, [RulePass("mine", (broken,))])
    assert isinstance(caught.value.__cause__, TypeError)
    assert caught.value.rule == "broken"


@rule(lambda x: aten.relu.default(x))
def same_again(at, x):
    """relu(x) -> relu(x)"""
    return at.root


@rule(lambda x: aten.relu.default(x))
def of_itself(at, x):
    """relu(x) -> neg(neg(relu(x)))"""
    return at.call(aten.neg.default, at.call(aten.neg.default, at.root))


@pytest.mark.parametrize("item", [same_again, of_itself], ids=lambda item: item.name)
def test_a_rule_may_not_return_what_it_is_to_replace(item):
    program = capture(lambda x: x.relu() + 1, torch.randn(2))
    with pytest.raises(RuleError, match=f"the rule {item.name} returns the value that it is to replace, or") as caught:
        run(program, [RulePass("mine", (item,))])
    assert "the holes of the pattern" in caught.value.fix


def test_a_rule_needs_a_pattern():
    for given in ((), ("relu",)):
        with pytest.raises(RuleError, match="a rule needs a pattern") as caught:
            rule(*given)
        assert "@rule(lambda" in caught.value.fix


def test_a_pass_takes_rules_and_nothing_else():
    with pytest.raises(RuleError, match=r"(?s)the pass mine takes a tuple of rules, got a Rule.*\(my_rule,\)"):
        RulePass("mine", sin_cos)
    with pytest.raises(RuleError, match=r"(?s)the pass mine has a function among its rules.*@rule\(lambda"):
        RulePass("mine", (sin_cos, rule(lambda at, x: x)))  # what `@rule` without parentheses makes
    assert RulePass("mine", [sin_cos]).rules == (sin_cos,)


def test_a_rule_whose_pattern_is_wrong_is_left_out_and_the_others_go_on():
    @rule(lambda x: aten.relu(x))
    def by_packet(at, x):
        """relu(x) -> x"""
        return x

    program = capture(lambda x: x.cos().sin(), torch.rand(2))
    after, (_, failed) = run(program, [RulePass("mine", (by_packet, sin_cos))], keep_going=True)
    assert ops_of(after) == ["tanh"]
    assert failed.rule == "by_packet"
    assert "calls aten.relu, which is not an overload" in failed.failed
