"""Wrong rules and wrong passes, and the finger that must point at them; right ones, at which it must not."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tests.passes.helpers import Edit, aten, capture, find
from tsopt.compiler.graph.infer import infer
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.rewriting.pass_base import Changes, Done, Pass
from tsopt.compiler.rewriting.rewrite import RulePass, rule
from tsopt.passes import CANONICALIZE, CommonSubexpressions, DeadCode
from tsopt.transforms import debug_passes, transform


@rule(lambda x: aten.sin.default(x), numerics=Numerics.ROUNDING)
def sin_is_cos(at, x):
    """sin(x) -> cos(x)"""
    return at.call(aten.cos.default, x)


@rule(lambda x: aten.div.Tensor(x, 3.0))
def third_exact(at, x):
    """x / 3 -> x * (1 / 3), wrongly called EXACT"""
    return at.call(aten.mul.Tensor, x, 1 / 3)


@rule(lambda x: aten.div.Tensor(x, 3.0), numerics=Numerics.ROUNDING)
def third(at, x):
    """x / 3 -> x * (1 / 3)"""
    return at.call(aten.mul.Tensor, x, 1 / 3)


@rule(lambda x: aten.add.Tensor(x, 0.0))
def plus_zero_exact(at, x):
    """x + 0 -> x, wrong for -0"""
    return x


@rule(lambda x: aten.mul.Tensor(x, 0.0))
def times_zero(at, x):
    """x * 0 -> 0, wrong for NaN and inf"""
    return at.call(aten.zeros_like.default, x)


@rule(lambda x: aten.nan_to_num.default(x))
def drops_nan(at, x):
    """nan_to_num(x) -> x"""
    return x


@rule(lambda x, y: aten.sub.Tensor(x, y))
def swaps_operands(at, x, y):
    """x - y -> y - x"""
    return at.call(aten.sub.Tensor, y, x) if y.target is aten.mul.Tensor else None


@rule(lambda x: aten.add.Tensor(x, x))
def twice(at, x):
    """x + x -> x * 2"""
    return at.call(aten.mul.Tensor, x, 2)


@rule(lambda x, d, k: aten.max.dim(x, d, k))
def max_is_min(at, x, d, k):
    """max(x, d) -> min(x, d)"""
    return at.call(aten.min.dim, x, d, k)


@rule(lambda x, d, k: operator.getitem(aten.max.dim(x, d, k), 1))
def argmax_is_argmin(at, x, d, k):
    """max(x, d)[1] -> argmin(x, d)"""
    return at.call(aten.argmin.default, x, d, k)


@rule(lambda w, i: aten.embedding.default(w, i))
def out_of_range(at, w, i):
    """embedding(w, i) -> embedding(w, i + 1000)"""
    return at.call(aten.embedding.default, w, at.call(aten.add.Tensor, i, 1000)) if i.op == "placeholder" else None


def rules(*found):
    return (RulePass("mine", found),)


class Model(nn.Module):
    """A function as a module: torch.export tells the source lines of modules alone."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def findings(model, example, passes, **options):
    program = capture(Model(model).eval(), example)
    return debug_passes(program, example, passes, **options).findings


X = torch.tensor([[0.1, -0.7, 2.0], [0.3, 5.0, 7.0]])

WRONG = {
    "sin": (lambda x: (x + 1).sin() * 2, X, sin_is_cos, "example"),
    "claims bits": (lambda x: (x / 3.0).relu(), X, third_exact, "example"),
    "-0 alone": (lambda x: (x + 0.0).abs(), X, plus_zero_exact, "special"),
    "nan alone": (lambda x: x * 0.0 + 1, X.abs(), times_zero, "special"),
    "nan of the example": (lambda x: torch.nan_to_num(x.log()) + 1, X, drops_nan, "example"),
    "integers": (lambda x: x - (x * x), torch.arange(6), swaps_operands, "example"),
    "booleans": (lambda x: torch.logical_not((x - x * x) > 0), torch.arange(6), swaps_operands, "example"),
    "half precision": (lambda x: x - x * x, X.half(), swaps_operands, "example"),
    "several results": (lambda x: x.max(1)[1] + 1, X, max_is_min, "example"),
    "one of several results": (lambda x: x.max(1)[1] + 1, X, argmax_is_argmin, "example"),
    "raises": (lambda i: nn.functional.embedding(i, X), torch.tensor([0, 1]), out_of_range, "example"),
    "scalar": (lambda x: x.sum() - x.sum() * 2, X, swaps_operands, "example"),
    "complex": (lambda x: x - x * x, torch.tensor([1 + 2j, 3j]), swaps_operands, "example"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_named_with_its_place(name):
    model, example, wrong, trial = WRONG[name]
    (found,) = findings(model, example, (DeadCode(), *rules(wrong)))
    assert (found.rule, found.in_pass, found.leave_out, found.trial) == (wrong.name, "mine", wrong.name, trial)
    assert "test_faulty_rewrite.py:" in found.where
    assert found.numerics == wrong.numerics
    assert found.difference
    assert found.before != found.after


def test_the_calls_and_the_difference_are_shown():
    (found,) = findings(*WRONG["sin"][:2], rules(sin_is_cos))
    assert found.before == "%2: f32[2, 3] = aten.sin(%0)"
    assert found.after == "%1: f32[2, 3] = aten.cos(%0)"
    assert "6 of 6 values exceed rtol" in found.difference
    (found,) = findings(*WRONG["-0 alone"][:2], rules(plus_zero_exact))
    assert found.difference == "not bit-equal, max difference 0"
    assert found.after == "%x: f32[2, 3] = input"
    (found,) = findings(*WRONG["raises"][:2], rules(out_of_range))
    assert found.difference.startswith("the new value cannot be computed: aten.embedding raises IndexError")
    assert found.after.count("\n") == 1


RIGHT = {
    "rounding is rounding": (lambda x: (x / 3.0).relu(), X, third),
    "integers": (lambda x: x + x, torch.arange(6), twice),
    "floats": (lambda x: (y := x.exp()) + y, X, twice),
    "nan of the example": (lambda x: (y := x.log()) + y, X, twice),
    "infinities": (lambda x: ((y := x / 0) + y).sum(), X, twice),
    "empty": (lambda x: (x + x).sum(0), torch.ones(0, 3), twice),
    "booleans": (lambda x: (x + x) > 0, torch.arange(6), twice),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_rule_is_left_in_peace(name):
    model, example, right = RIGHT[name]
    found = debug_passes(capture(model, example), example, rules(right))
    assert found.findings == ()
    assert found.rewrites >= 1
    assert found.not_compared == {}


def test_each_rewrite_is_judged_on_its_own():
    """The wrong one comes first: those after it see its values, and keep them."""
    model = lambda x: (x.sin() + x.sin()) / 3.0  # noqa: E731
    found = debug_passes(capture(model, X), X, rules(sin_is_cos, twice, third))
    assert {item.rule for item in found.findings} == {"sin_is_cos"}
    assert found.rewrites >= 3


def test_rounding_before_does_not_make_an_exact_rule_wrong():
    model = lambda x: (x / 3.0).exp() + (x / 3.0).exp()  # noqa: E731
    passes = (CommonSubexpressions(), *rules(third, twice))
    found = debug_passes(capture(model, X * 7), X * 7, passes)
    assert found.findings == ()
    assert found.rewrites == 2


@rule(lambda x: aten.add.Tensor(x, 1e-9))
def little_first(at, x):
    """x + 1e-9 -> x - -1e-9"""
    return at.call(aten.sub.Tensor, x, -1e-9)


@rule(lambda x: aten.sub.Tensor(x, -1e-9), numerics=Numerics.ROUNDING)
def little_then(at, x):
    """x - -1e-9 -> x"""
    return x


@rule(lambda x: aten.sin.default(aten.neg.default(x)))
def sine_first(at, x):
    """sin(-x) -> sin(x * -1)"""
    return at.call(aten.sin.default, at.call(aten.mul.Tensor, x, -1))


@rule(lambda x: aten.sin.default(aten.mul.Tensor(x, -1)))
def sine_then(at, x):
    """sin(x * -1) -> sin(x * -1.0)"""
    return at.call(aten.sin.default, at.call(aten.mul.Tensor, x, -1.0))


def test_values_are_computed_again_from_what_has_taken_the_place_of_their_inputs():
    """The sine is rewritten before and after its input is rounded elsewhere; both times it keeps its bits."""
    x = torch.full((3,), 1e-3)
    assert not torch.equal(x + 1e-9, x)
    program = capture(lambda x: (x + 1e-9).neg().sin(), x)
    found = debug_passes(program, x, rules(little_first, little_then, sine_first, sine_then))
    assert (found.findings, found.rewrites) == ((), 4)


@rule(lambda x: aten.sub.Tensor(x, aten.mul.Tensor(x, 2)), numerics=Numerics.ROUNDING)
def minus_twice(at, x):
    """x - x * 2 -> -x: the same but for infinities"""
    return at.call(aten.neg.default, x)


def test_rounding_is_not_tried_on_infinities():
    program = capture(lambda x: x - x * 2, X)
    found = debug_passes(program, X, rules(minus_twice))
    assert (found.findings, found.rewrites, found.passes) == ((), 1, 1)


@rule(lambda x: aten.sub.Tensor(aten.add.Tensor(aten.to.dtype(x, torch.float32), 1e4), 1e4), numerics=Numerics.ROUNDING)
def add_and_take_away(at, x):
    """(x.float() + 1e4) - 1e4 -> x.float(), which is nearer to the truth"""
    return at.call(aten.to.dtype, x, torch.float32)


def test_a_value_nearer_to_float64_is_no_mistake():
    """Also where the program asks for float32 by name: the truth is computed in float64 all the same."""
    x = torch.rand(50).half()
    program = capture(lambda x: (x.to(torch.float32) + 1e4) - 1e4, x)
    assert not torch.allclose(program.module()(x)[0], x.float(), rtol=1e-4, atol=1e-5)
    found = debug_passes(program, x, rules(add_and_take_away))
    assert (found.findings, found.rewrites) == ((), 1)


def test_what_the_driver_declines_is_not_judged():
    model = lambda x: (x.sin(), x.sin().neg())  # noqa: E731

    @rule(lambda x: aten.neg.default(aten.sin.default(x)))
    def used_elsewhere(at, x):
        """-sin(x) -> cos(x)"""
        return at.call(aten.cos.default, x)

    found = debug_passes(capture(model, X), X, (CommonSubexpressions(), *rules(used_elsewhere)))
    assert (found.findings, found.rewrites) == ((), 0)


def test_every_wrong_site_is_found():
    found = findings(lambda x: x.sin() + (x + 1).sin() + (x + 2).sin(), X, rules(sin_is_cos, twice))
    assert [item.rule for item in found] == ["sin_is_cos"] * 3


def test_a_rule_left_out_is_not_found():
    program = capture(lambda x: x.sin(), X)
    assert debug_passes(program, X, rules(sin_is_cos), without=["sin_is_cos"]).findings == ()


def test_fuel_ends_the_search_early():
    program = capture(lambda x: x.sin() + (x + 1).sin(), X)
    assert len(debug_passes(program, X, rules(sin_is_cos), fuel=1).findings) == 1


# ---- passes -----------------------------------------------------------------------------------------------


def swap_operands(program):
    node = find(program, "sub.Tensor")
    node.args = (node.args[1], node.args[0])


def test_a_wrong_pass_is_named():
    passes = (CANONICALIZE, Edit(swap_operands, "swapper"), DeadCode())
    (found,) = findings(lambda x: (x * 2 - x.sin(), x + 1), X, passes)
    assert (found.in_pass, found.rule, found.leave_out) == ("swapper", "", "swapper")
    assert found.difference.startswith("output 0: ")
    assert "aten.sub.Tensor(" in found.before
    assert "aten.sub.Tensor(" in found.after


@dataclass(frozen=True)
class SinToCos(Pass):
    """Right for all but one value: it takes fuel for each, so that the wrong one can be told."""

    wrong: int
    name: str = "cosines"

    def run(self, program, limits):
        done = []
        for number, node in enumerate([n for n in program.calls() if n.target is aten.sin.default]):
            if not limits.take():
                break
            node.target = aten.cos.default if number == self.wrong else aten.sin.default
            with program.graph.inserting_before(node):
                made = program.graph.call_function(aten.neg.default, (node.args[0],))
                back = program.graph.call_function(aten.neg.default, (made,))
            made.meta["val"] = back.meta["val"] = infer(program, aten.neg.default, node.args, {})
            node.args = (back,)
            done.append(Done("one_sine", f"sine {number}"))
        return Changes(tuple(done))


@pytest.mark.parametrize("wrong", range(6))
def test_the_wrong_rewrite_of_a_pass_is_found_by_fuel(wrong):
    def model(x):
        for i in range(6):
            x = x + (x * i).sin()
        return x

    (found,) = findings(model, X, (SinToCos(wrong), DeadCode()))
    assert (found.in_pass, found.rule, found.where) == ("cosines", "one_sine", f"sine {wrong}")
    assert found.leave_out == "cosines"


def test_a_right_pass_is_left_in_peace():
    program = capture(lambda x: (x + 1).sin() + (x + 1).sin(), X)
    found = debug_passes(program, X, (SinToCos(-1), CommonSubexpressions(), DeadCode()))
    assert found.findings == ()
    assert found.passes == 2


def test_the_output_check_is_not_made_twice_for_one_mistake():
    """The rule is found at its site; that the outputs differ as well is no second finding."""
    assert len(findings(lambda x: x.sin(), X, rules(sin_is_cos))) == 1


def test_a_tie_that_rounding_decides_is_no_mistake():
    x = next(v for v in torch.arange(1.0, 100.0).split(1) if float(v / 3.0) < float(v * (1 / 3)))
    model = lambda x: torch.cat([x / 3.0, x * (1 / 3)]).argmax(0)  # noqa: E731
    program = capture(model, x)
    after = transform(program, rules(third))
    assert program.module()(x) != after.module()(x)
    assert debug_passes(program, x, rules(third)).findings == ()
    assert len(debug_passes(program, x, rules(third_exact)).findings) == 1
