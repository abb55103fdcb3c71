"""Proofs of the elementwise rules that claim EXACT: over IEEE floats and machine integers, for every input at once.

A proof takes a model on which the rule fires, reads the program before and the program that the rule has made of it as
two expressions, and asks Z3 for an input on which their bits differ. NaN has one form there, so its payload does not
count. That the prover can find such an input is shown by rules that are wrong; that the expressions are what torch
computes, by values put into them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import z3
from torch import fx

from tests.passes.helpers import SPECIAL, aten, capture
from tests.passes.random_programs import RULES
from tsopt.compiler import ops
from tsopt.compiler.pipeline import Limits, run
from tsopt.compiler.program import Numerics, Program
from tsopt.compiler.rewrite import Rule, RulePass, rule
from tsopt.passes import NORMALIZE, DeadCode

TIMEOUT = 60_000  # ms; on a free machine the slowest takes less than a second
NEAREST = z3.RNE()
SORTS = {
    torch.float16: z3.FPSort(5, 11), torch.float32: z3.Float32(), torch.float64: z3.Float64(),
    torch.bool: z3.BoolSort(), torch.int8: z3.BitVecSort(8), torch.int16: z3.BitVecSort(16),
    torch.int32: z3.BitVecSort(32), torch.int64: z3.BitVecSort(64),
}  # fmt: skip


# ---- programs as expressions ------------------------------------------------------------------------------


def literal(value: Any, dtype: torch.dtype) -> Any:
    """A Python number as eager takes it in an operation of this dtype."""
    if dtype == torch.bool:
        return z3.BoolVal(bool(value))
    if not dtype.is_floating_point:
        return z3.BitVecVal(int(value), SORTS[dtype])
    # NOTE: torch computes float16 with a float32 literal, which is one rounding only where the literal is a float16.
    assert dtype != torch.float16 or math.isnan(value) or float(torch.tensor(value).half()) == value
    return z3.FPVal(float(value), SORTS[dtype])


def cast(x: Any, source: torch.dtype, target: torch.dtype) -> Any:
    """Every cast but those of floats to integers, whose values out of range are the machine's own."""
    if source == target:
        return x
    if source == torch.bool:
        return z3.If(x, literal(1, target), literal(0, target))
    if target == torch.bool:
        return z3.Not(z3.fpIsZero(x)) if source.is_floating_point else x != literal(0, source)
    if target.is_floating_point:
        return (z3.fpFPToFP if source.is_floating_point else z3.fpSignedToFP)(NEAREST, x, SORTS[target])
    assert not source.is_floating_point, f"no expression for {source} to {target}"
    bits = x.size() - SORTS[target].size()
    return z3.Extract(SORTS[target].size() - 1, 0, x) if bits >= 0 else z3.SignExt(-bits, x)


def _arithmetic(on_floats: Callable[..., Any], on_integers: Callable[..., Any]) -> Callable[..., Any]:
    """An operation of two operands in the dtype of its result, which is rounded once."""
    return lambda t, x, y: on_floats(NEAREST, x, y) if t.is_floating_point else on_integers(x, y)


def divide(x: Any, y: Any) -> Any:
    raise AssertionError("the result of a division is a float")


ADD, SUB = _arithmetic(z3.fpAdd, operator.add), _arithmetic(z3.fpSub, operator.sub)
MUL, DIV = _arithmetic(z3.fpMul, operator.mul), _arithmetic(z3.fpDiv, divide)


def without_alpha(operation: Callable[..., Any]) -> Callable[..., Any]:
    def compute(t: torch.dtype, x: Any, y: Any, alpha: Any) -> Any:
        assert alpha == 1, "with alpha it is another operation, that may round once or twice"
        return operation(t, x, y)

    return compute


def less(t: torch.dtype, x: Any, y: Any) -> Any:
    return z3.fpLT(x, y) if t.is_floating_point else x < y


def clamp(t: torch.dtype, x: Any, low: Any = None, high: Any = None) -> Any:
    """NaN goes through, and so does a zero of the other sign than the bound."""
    x = x if low is None else z3.If(less(t, x, literal(low, t)), literal(low, t), x)
    return x if high is None else z3.If(less(t, literal(high, t), x), literal(high, t), x)


def power(t: torch.dtype, x: Any, n: Any) -> Any:
    """The powers that torch's pow treats by themselves; nothing is known here of the others."""
    return {1: x, 2: MUL(t, x, x)}[n]


def positive(name: str) -> Callable[..., Any]:
    """A function that is not looked into, but for its sign: none."""
    return lambda t, x: z3.fpAbs(z3.Function(name, SORTS[t], SORTS[t])(x))


# What an op computes of one element, from the dtype of its result, the operands in that dtype, and the other arguments.
OPERATIONS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: without_alpha(ADD),
    aten.sub.Tensor: without_alpha(SUB),
    aten.rsub.Scalar: without_alpha(lambda t, x, y: SUB(t, y, x)),
    aten.mul.Tensor: MUL,
    aten.div.Tensor: DIV,
    aten.div.Tensor_mode: lambda t, x, y, mode: {"trunc": x / y}[mode],
    aten.neg.default: lambda t, x: z3.fpNeg(x) if t.is_floating_point else -x,
    aten.abs.default: lambda t, x: z3.fpAbs(x) if t.is_floating_point else z3.If(x < 0, -x, x),
    aten.relu.default: lambda t, x: clamp(t, x, 0),
    aten.clamp.default: clamp,
    aten.clamp_min.default: clamp,
    aten.square.default: lambda t, x: MUL(t, x, x),
    aten.pow.Tensor_Scalar: power,
    aten.exp.default: positive("exp"),
    aten.sigmoid.default: positive("sigmoid"),
    aten.logical_not.default: lambda t, x: z3.Not(x),
    aten.masked_fill.Scalar: lambda t, x, mask, value: z3.If(mask, value, x),
    aten.masked_fill.Tensor: lambda t, x, mask, value: z3.If(mask, value, x),
    aten.where.self: lambda t, mask, x, y: z3.If(mask, x, y),
    aten.to.dtype: lambda t, x, *_: x,
    aten.flip.default: lambda t, x, dims: x,
}
for name in ("ScalarOther", "ScalarSelf"):
    OPERATIONS[getattr(aten.where, name)] = OPERATIONS[aten.where.self]
COMPARISONS: dict[Any, Callable[..., Any]] = {
    aten.gt.Tensor: lambda t, x, y: less(t, y, x),
    aten.gt.Scalar: lambda t, x, y: less(t, y, x),
    aten.lt.Tensor: less,
    aten.le.Tensor: lambda t, x, y: z3.fpLEQ(x, y) if t.is_floating_point else x <= y,
}
MASKS = ("mask", "condition")
SETTINGS = (
    "alpha",
    "exponent",
    "rounding_mode",
    "min",
    "max",
    "dtype",
    "non_blocking",
    "copy",
    "memory_format",
    "dims",
)


def expression(program: Program, inputs: Sequence[Any]) -> list[Any]:
    """The outputs, each of one element, as expressions of the inputs. A weight that is one number is that number."""
    given = iter(inputs)
    values: dict[fx.Node, Any] = {}

    def operand(value: Any, wanted: torch.dtype) -> Any:
        if isinstance(value, fx.Node):
            return cast(values[value], value.meta["val"].dtype, wanted)
        return literal(value, wanted)

    def of_call(node: fx.Node) -> Any:
        wanted = node.meta["val"].dtype
        if node.target in COMPARISONS:
            sides = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in node.args]
            wanted = torch.result_type(*sides)
        kinds = [(k, torch.bool if k in MASKS else wanted, v) for k, v in ops.bind(node).items()]
        arguments = [value if name in SETTINGS else operand(value, dtype) for name, dtype, value in kinds]
        return (OPERATIONS | COMPARISONS)[node.target](wanted, *arguments)

    for node in program.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            weight = program.weights[str(node.target)]
            uniform = len(set(map(repr, weight.reshape(-1).tolist()))) == 1
            first = weight.reshape(-1)[0].item()
            values[node] = literal(first, weight.dtype) if uniform else z3.Const(str(node.target), SORTS[weight.dtype])
        elif ops.is_call(node):
            values[node] = of_call(node)
    return [values[output] for output in program.outputs]


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
    own = item in NORMALIZE.rules or item.name.endswith("_again")  # the forms must not have been given already
    before, _ = run(
        capture(lambda *values: model(*values).flip(-1), inputs),
        (DeadCode(),) if own else (DeadCode(), NORMALIZE, DeadCode("dce-again")),
    )
    after, records = run(before, (RulePass("alone", (item,)),), Limits(Numerics.EXACT))
    assert {done.rule for record in records for done in record.done} == {item.name}, before.text
    return before, after


# ---- expressions and torch --------------------------------------------------------------------------------


def value_of(number: Any, dtype: torch.dtype) -> Any:
    """A constant expression: a number, or its bits, which tell -0.0 from 0.0."""
    if dtype == torch.bool:
        return z3.is_true(number)
    if not dtype.is_floating_point:
        return number.as_signed_long()
    if z3.is_true(z3.simplify(z3.fpIsNaN(number))):
        return "nan"
    return z3.simplify(z3.fpToIEEEBV(number)).as_signed_long()


def value_in(element: torch.Tensor) -> Any:
    if not element.is_floating_point():
        return element.item()
    views = {torch.float16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
    return "nan" if bool(element.isnan()) else element.view(views[element.dtype]).item()


def hard(dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    if dtype == torch.bool:
        return torch.tensor([True, False])
    limits = torch.iinfo(dtype)
    return torch.tensor([0, 1, -1, 7, limits.min, limits.max, limits.min + 1], dtype=dtype)


UNKNOWN = (aten.exp.default, aten.sigmoid.default)


def assert_expressions_of_torch(program: Program, dtypes: Sequence[torch.dtype]) -> None:
    """Value by value, over the hardest ones."""
    if any(node.target in UNKNOWN for node in program.calls()):
        return
    columns = [hard(dtype).roll(5 * i).repeat(9)[:18] for i, dtype in enumerate(dtypes)]
    wanted = [row[0] for row in program.module()(*[column.unsqueeze(1).expand(18, 2) for column in columns])[0]]
    for i, element in enumerate(wanted):
        inputs = [literal(column[i].item(), column.dtype) for column in columns]
        found = z3.simplify(expression(program, inputs)[0])
        if any(str(name) in str(found) for name in program.weights):
            continue  # of a weight of several numbers
        assert value_of(found, element.dtype) == value_in(element), (i, inputs, found, element)


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
    """Smaller floats, where Z3 would need a minute for the real ones. No proof hangs on the width."""

    def change() -> None:
        monkeypatch.setitem(SORTS, HALF, z3.FPSort(3, 4))
        monkeypatch.setitem(SORTS, SINGLE, z3.FPSort(4, 6))

    return change


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
