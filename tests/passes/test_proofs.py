"""Proofs of the elementwise rules that claim EXACT: over IEEE floats and machine integers, for every input at once.

A proof takes a model on which the rule fires, reads the program before and the program that the rule has made of it as
two expressions, and asks Z3 for an input on which their bits differ. NaN has one form there, so its payload does not
count. That the prover can find such an input is shown by rules that are wrong; that the expressions are what torch
computes, by values put into them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import z3

from tests.passes.expressions import OPERATIONS, SORTS, assert_expressions_of_torch, expression
from tests.passes.helpers import aten, capture
from tests.passes.random_programs import RULES
from tsopt.compiler.graph.program import Numerics, Program
from tsopt.compiler.rewriting.pass_base import Limits
from tsopt.compiler.rewriting.pipeline import run
from tsopt.compiler.rewriting.rewrite import Rule, RulePass, rule
from tsopt.passes import CANONICALIZE, DeadCode

TIMEOUT = 60_000  # ms; on a free machine the slowest takes less than a second


def counterexample(before: Program, after: Program) -> Any:
    """An input on which the bits of an output differ, or None; what cannot be decided is an error."""
    inputs = [z3.Const(item.name, SORTS[getattr(torch, item.type.dtype)]) for item in before.signature.inputs]
    solver = z3.Solver()
    solver.set("timeout", TIMEOUT)
    pairs = zip(expression(before, inputs), expression(after, inputs), strict=True)
    solver.add(z3.Or([one != other for one, other in pairs]))
    found = solver.check()
    assert found != z3.unknown, f"not decided: {solver.reason_unknown()}"
    return solver.model() if found == z3.sat else None


def applied(item: Rule, model: Callable[..., Any], dtypes: Sequence[torch.dtype]) -> tuple[Program, Program]:
    """The program before and after the rule, which must fire. The outputs are flipped, or they might be the inputs."""
    inputs = tuple(torch.ones(2, dtype=dtype) for dtype in dtypes)
    own = item in CANONICALIZE.rules or item.name.endswith("_again")  # the forms must not have been given already
    before, _ = run(
        capture(lambda *values: model(*values).flip(-1), inputs),
        (DeadCode(),) if own else (DeadCode(), CANONICALIZE, DeadCode("dce-again")),
    )
    after, records = run(before, (RulePass("alone", (item,)),), Limits(Numerics.EXACT))
    assert {done.rule for record in records for done in record.done} == {item.name}, before.text
    return before, after


# ---- the rules --------------------------------------------------------------------------------------------

HALF, SINGLE, BYTE, SHORT, INT = torch.float16, torch.float32, torch.int8, torch.int16, torch.int32
FLOATS, INTS = (HALF, SINGLE), (BYTE, INT)
ANY = (*FLOATS, *INTS)
W = torch.tensor([1.5, -2.0])
ONE_NUMBER = [torch.tensor(value) for value in (2.0, -0.0, 0.1)]
SAME_NUMBERS = [value.repeat(2) for value in ONE_NUMBER]
NUMBERS = (2.0, -0.5, 0.0, -0.0, math.inf, math.nan, 2.0**-24, 3)
YES, NO = torch.tensor([True, True]), torch.tensor([False, False])


@dataclass(frozen=True)
class Proof:
    """A model on which the rule fires, and the dtypes that it is proved for; more than one input has the same."""

    model: Callable[..., Any]
    dtypes: Sequence[torch.dtype] = ANY
    mixed: Sequence[Sequence[torch.dtype]] = ()

    def cases(self) -> list[tuple[torch.dtype, ...]]:
        count = self.model.__code__.co_argcount - len(self.model.__defaults__ or ())
        return [*((dtype,) * count for dtype in self.dtypes), *map(tuple, self.mixed)]


PROOFS: dict[str, list[Proof]] = {
    "times_one": [
        Proof(lambda x: x * 1),
        Proof(lambda x: x**1),
        Proof(lambda x: x * 1.0, FLOATS),
        Proof(lambda x: x / 1, FLOATS),
        Proof(lambda x: x / 1.0, FLOATS),
    ],
    "minus_zero": [
        Proof(lambda x: x - 0),
        Proof(lambda x: x - 0.0, FLOATS),
        Proof(lambda x: x + -0.0, FLOATS),
    ],
    "plus_zero_integer": [Proof(lambda x: x + 0, INTS)],
    "neg_neg": [Proof(lambda x: x.neg().neg())],
    "add_neg": [
        Proof(lambda x, y: x + y.neg(), mixed=[(SINGLE, HALF), (HALF, SINGLE)]),
        Proof(lambda x, y: y.neg() + x, mixed=[(SINGLE, HALF), (HALF, SINGLE)]),
        *(Proof(lambda x, c=c: x.neg() + c, FLOATS) for c in NUMBERS),
        Proof(lambda x: x.neg() + 3),
    ],
    "sub_neg": [
        Proof(lambda x, y: x - y.neg(), mixed=[(SINGLE, HALF), (HALF, SINGLE)]),
        *(Proof(lambda x, c=c: c - x.neg(), FLOATS) for c in NUMBERS),
    ],
    "neg_times_neg": [
        Proof(lambda x, y: x.neg() * y.neg(), (HALF, BYTE), mixed=[(SINGLE, HALF)]),
        Proof(lambda x, y: x.neg() / y.neg(), (HALF,)),
    ],
    "neg_times": [
        *(Proof(lambda x, c=c: x.neg() * c, FLOATS) for c in NUMBERS),
        *(Proof(lambda x, c=c: (x * c).neg(), FLOATS) for c in NUMBERS),
        *(Proof(lambda x, c=c: x.neg() / c, (HALF,)) for c in NUMBERS),
        *(Proof(lambda x, c=c: (x / c).neg(), (HALF,)) for c in NUMBERS),
        *(Proof(lambda x, c=c: x.neg() * c, INTS) for c in (3, -1, 0, 127)),
        *(Proof(lambda x, c=c: (x * c).neg(), INTS) for c in (3, -1, 0, 127)),
    ],
    "positive_already": [
        Proof(lambda x: x.relu().relu()),
        Proof(lambda x: x.abs().abs()),
        Proof(lambda x: x.abs().relu(), FLOATS),
        Proof(lambda x: x.exp().relu(), FLOATS),
        Proof(lambda x: x.sigmoid().abs(), FLOATS),
    ],
    "div_power_of_two": [Proof(lambda x, c=c: x / c, FLOATS) for c in (2.0**-8, 0.5, -2.0, 2, 2.0**8)],
    **{
        name: [Proof(lambda x: W + x, (SINGLE,)), Proof(lambda x: W * x, (SINGLE,))]
        for name in ("constant_right", "constant_right_again")
    },
    **{
        name: [
            *(Proof(lambda x, w=w: x * w, (SINGLE,)) for w in numbers),
            *(Proof(lambda x, w=w: x + w, (SINGLE,)) for w in numbers),
            *(Proof(lambda x, w=w: x - w, (SINGLE,)) for w in numbers),
            *(Proof(lambda x, w=w: x > w, (SINGLE,)) for w in numbers),
        ]
        for name, numbers in (("literal_operand", ONE_NUMBER), ("uniform_operand", SAME_NUMBERS))
    },
    "literal_minus": [Proof(lambda x, w=w: w - x, (SINGLE,)) for w in ONE_NUMBER],
    "uniform_minus": [Proof(lambda x, w=w: w - x, (SINGLE,)) for w in SAME_NUMBERS],
    **{
        name: [Proof(lambda x, w=w: x.masked_fill(x > 0, w), (SINGLE,)) for w in ONE_NUMBER]
        for name in ("literal_fill", "literal_fill_again")
    },
    "fill_nothing": [Proof(lambda x: x.masked_fill(NO, 3))],
    "where_decided": [Proof(lambda x, y: torch.where(YES, x, y)), Proof(lambda x, y: torch.where(NO, x, y))],
    "square_power": [Proof(lambda x: x.square())],
    "cast_cast": [
        Proof(lambda x: x.float().half(), (HALF,)),
        Proof(lambda x: x.double().half(), (HALF, SINGLE)),
        Proof(lambda x: x.float().double(), (HALF,)),
        Proof(lambda x: x.int().to(BYTE), (BYTE,)),
        Proof(lambda x: x.int().long(), (BYTE,)),
        Proof(lambda x: x.double().to(SINGLE), (INT,)),
        Proof(lambda x: x.to(INT).float(), (torch.bool, BYTE)),
    ],
}

# EXACT rules whose elements are computed as before: they change which elements there are, or how a call is written.
NAME, MOVE, NOTHING = (
    "another name of the same call",
    "moves elements, computes none",
    "leaves out a call that computes nothing",
)
NOT_ARITHMETIC = {
    "batch_norm_inference": "another name of the same kernel; its numbers are compared in test_normalize",
    "scale_before_moves": "multiplies the same elements by the same literal before they are moved",
    **dict.fromkeys(["short_name", "padding_form", "pad_form", "cast_form", "reshape_form", "expand_form"], NAME),
    **dict.fromkeys(["slice_form", "permute_form", "stack_cat"], NAME),
    **dict.fromkeys(["dropout_eval", "copy_of_value", "pad_nothing", "cat_of_one", "cast_to_same"], NOTHING),
    **dict.fromkeys(["same_shape", "copy_before_copy"], NOTHING),
    **dict.fromkeys(["permute_permute", "permute_ones", "reshape_reshape", "permute_reshape_permute"], MOVE),
    **dict.fromkeys(["expand_expand", "expand_dropped", "slice_slice", "part_of_joined"], MOVE),
    **dict.fromkeys(["cat_cat", "cat_neighbours", "stack_unbind"], MOVE),
}


def proofs() -> list[Any]:
    return [
        pytest.param(name, claim, id=f"{name}-{number}")
        for name, claims in PROOFS.items()
        for number, claim in enumerate(claims)
    ]


@pytest.fixture
def narrow(monkeypatch):
    """Smaller floats, where Z3 would need a minute for the real ones. No proof depends on the width."""

    def change() -> None:
        monkeypatch.setitem(SORTS, HALF, z3.FPSort(3, 4))
        monkeypatch.setitem(SORTS, SINGLE, z3.FPSort(4, 6))

    return change


@pytest.mark.sliced(50)
@pytest.mark.parametrize(("name", "claim"), proofs())
def test_an_exact_rule_keeps_every_bit_of_every_input(name, claim, narrow):
    """And the expressions are what torch computes."""
    item = next(item for item in RULES if item.name == name)
    pairs = [(dtypes, *applied(item, claim.model, dtypes)) for dtypes in claim.cases()]
    for dtypes, before, _ in pairs:
        assert_expressions_of_torch(before, dtypes)
    for dtypes, before, after in pairs:
        if len(set(dtypes)) > 1:
            narrow()  # and so for those that follow
        found = counterexample(before, after)
        assert found is None, f"{found}\n{before.text}\n{after.text}"


def test_every_exact_rule_has_a_proof_or_a_reason_why_not():
    exact = {item.name for item in RULES if item.numerics == Numerics.EXACT}
    assert not PROOFS.keys() & NOT_ARITHMETIC.keys()
    assert exact - PROOFS.keys() - NOT_ARITHMETIC.keys() == set(), "a new EXACT rule needs a proof"
    assert (PROOFS.keys() | NOT_ARITHMETIC.keys()) - exact == set(), "no such EXACT rule"
    assert all(NOT_ARITHMETIC.values())


# ---- the prover -------------------------------------------------------------------------------------------


@rule(lambda x: aten.mul.Tensor(x, 0))
def mul_zero(at, x):
    """x * 0 -> 0"""
    return at.constant(torch.zeros(2, dtype=at.root.meta["val"].dtype), "zero")


@rule(lambda x: aten.add.Tensor(x, 0))
def add_zero(at, x):
    """x + 0 -> x"""
    return x


@rule(lambda x: aten.sub.Tensor(x, x))
def sub_self(at, x):
    """x - x -> 0"""
    return at.constant(torch.zeros(2, dtype=at.root.meta["val"].dtype), "zero")


@rule(lambda x, c: aten.div.Tensor(x, c))
def div_reciprocal(at, x, c):
    """x / c -> x * (1 / c)"""
    return at.call(aten.mul.Tensor, x, 1 / c)


@rule(lambda x, y: aten.neg.default(aten.sub.Tensor(x, y)))
def neg_sub(at, x, y):
    """-(x - y) -> y - x"""
    return at.call(aten.sub.Tensor, y, x)


@rule(lambda x, y: aten.logical_not.default(aten.gt.Tensor(x, y)))
def not_greater(at, x, y):
    """~(x > y) -> x <= y"""
    return at.call(aten.le.Tensor, x, y)


@rule(lambda x: aten.div.Tensor_mode(aten.mul.Tensor(x, 2), 2, rounding_mode="trunc"))
def double_half(at, x):
    """x * 2 // 2 -> x"""
    return x


@rule(lambda x: aten.abs.default(aten.abs.default(x)), lambda x: aten.relu.default(aten.abs.default(x)))
def abs_is_positive(at, x):
    """relu(abs(x)) -> abs(x)"""
    return at.call(aten.abs.default, x)


@rule(lambda x, y: aten.sub.Tensor(x, aten.neg.default(y)))
def sub_neg_promoted(at, x, y):
    """x - -y -> x + y, whatever is promoted"""
    return at.call(aten.add.Tensor, x, y)


WRONG = [
    (mul_zero, lambda x: x * 0, (HALF,), (INT,)),
    (add_zero, lambda x: x + 0, (HALF,), (INT,)),
    (sub_self, lambda x: x - x, (HALF,), (INT,)),
    (div_reciprocal, lambda x: x / 3, (SINGLE,), None),
    (neg_sub, lambda x, y: (x - y).neg(), (HALF, HALF), (INT, INT)),
    (not_greater, lambda x, y: (x > y).logical_not(), (HALF, HALF), (INT, INT)),
    (double_half, lambda x: torch.div(x * 2, 2, rounding_mode="trunc"), (INT,), None),
    (abs_is_positive, lambda x: x.abs().relu(), (BYTE,), (HALF,)),
    (sub_neg_promoted, lambda x, y: x - y.neg(), (SHORT, BYTE), (SHORT, SHORT)),
]


@pytest.mark.parametrize(("item", "model", "fails", "holds"), WRONG, ids=[row[0].name for row in WRONG])
def test_the_prover_finds_what_is_wrong_with_a_wrong_rule(item, model, fails, holds, narrow):
    """And nothing where the same rule is right."""
    narrow()
    assert counterexample(*applied(item, model, fails)) is not None
    assert holds is None or counterexample(*applied(item, model, holds)) is None


def test_the_expressions_are_compared_with_torch(monkeypatch):
    before, _ = applied(neg_sub, lambda x, y: (x - y).neg(), (HALF, HALF))
    monkeypatch.setitem(OPERATIONS, aten.sub.Tensor, OPERATIONS[aten.add.Tensor])
    with pytest.raises(AssertionError):
        assert_expressions_of_torch(before, (HALF, HALF))
