"""Literals and constant tensors: one form, none that change nothing, one in place of two."""

from __future__ import annotations

import math

import pytest
import torch

from tests.passes.examples import FLOATS, INTS, NARROW, N, With
from tests.passes.helpers import Limits, capture, check, check_declines, check_fires, specials
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.rewriting.rewrite import OTHER_LAYOUT, RulePass
from tsopt.passes import ALGEBRA, CANONICALIZE, STANDARD, DeadCode, FoldConstants, constants

NUMBERS = specials(N).nan_to_num(nan=2.0, posinf=math.inf, neginf=-math.inf).flip(0)  # no model holds a NaN


def test_every_rule_has_an_equation_and_a_name_of_its_own():
    rules = (*constants.FORMS, *constants.RULES)
    assert len({item.name for item in rules}) == len(rules)
    assert all("->" in item.doc for item in rules)
    assert all(item.numerics == Numerics.EXACT for item in constants.FORMS)


# ---- literals ---------------------------------------------------------------------------------------------

BINARY = {
    "add": (lambda x, w: x + w, "add.Tensor"),
    "sub": (lambda x, w: x - w, "sub.Tensor"),
    "mul": (lambda x, w: x * w, "mul.Tensor"),
    "div": (lambda x, w: x / w, "div.Tensor"),
    "eq": (lambda x, w: x == w, "eq.Scalar"),
    "ne": (lambda x, w: x != w, "ne.Scalar"),
    "lt": (lambda x, w: x < w, "lt.Scalar"),
    "le": (lambda x, w: x <= w, "le.Scalar"),
    "gt": (lambda x, w: x > w, "gt.Scalar"),
    "ge": (lambda x, w: x >= w, "ge.Scalar"),
    "remainder": (lambda x, w: x % w, "remainder.Scalar"),
    "fmod": (lambda x, w: x.fmod(w), "fmod.Scalar"),
}


@pytest.mark.sliced(8)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", BINARY)
def test_a_scalar_constant_becomes_a_literal_with_the_same_bits(op, dtype):
    """Values that the dtype of x does not hold as well: the kernels see the same float64 number."""
    function, name = BINARY[op]
    for value, own in ((-0.0, dtype), (3.0, dtype), (1e-7, torch.float64), (1.0 / 3.0, torch.float64)):
        model = With(function, torch.tensor(value, dtype=own))
        check_fires(constants.literal_operand, model, specials(3, N, dtype=dtype), ops=[name], exact=True)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("op", ["add", "sub", "mul", "lt", "eq", "remainder"])
def test_an_integer_constant_becomes_a_literal(op, dtype):
    function, name = BINARY[op]
    for own in (dtype, torch.int64):
        model = With(function, torch.tensor(100, dtype=own))
        check_fires(constants.literal_operand, model, INTS.to(dtype), ops=[name], exact=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("own", NARROW, ids=str)
def test_an_integer_constant_beside_a_float_becomes_a_literal(own, dtype):
    model = With(lambda x, w: x * w, torch.tensor(3, dtype=own))
    found = check_fires(constants.literal_operand, model, specials(N, dtype=dtype), ops=["mul.Tensor"], exact=True)
    assert "aten.mul.Tensor(%arg0, 3)" in found.after.text


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (2, 3, 7)])
def test_a_scalar_constant_becomes_a_literal_in_any_shape(shape):
    model = With(lambda x, w: x * w + 1, torch.tensor(0.3))
    check_fires(constants.literal_operand, model, torch.randn(shape), exact=True)


@pytest.mark.parametrize(
    ("x", "w"),
    [
        (specials(N).half(), torch.ones(1)),
        (specials(N), torch.ones(1)),
        (specials(N), torch.tensor(math.inf)),
        (specials(N), torch.tensor(True)),
        (specials(N), torch.tensor(1 + 2j)),
        (INTS, torch.tensor(2.0)),
        (torch.tensor([True, False]), torch.tensor(2)),
        (torch.tensor([1 + 2j]), torch.tensor(2.0)),
        (torch.tensor(1.0), torch.tensor(2.0, dtype=torch.float64)),
        (torch.tensor(1, dtype=torch.int8), torch.tensor(2)),
        (INTS.to(torch.int8), torch.tensor(1000)),
    ],
    ids=[
        "rank 1 promotes",
        "rank 1",
        "inf",
        "bool",
        "complex",
        "int",
        "bool x",
        "complex x",
        "0-d",
        "0-d int",
        "range",
    ],
)
def test_a_constant_that_is_no_literal_stays(x, w):
    found = check_declines(constants.literal_operand, With(lambda x, w: x * w, w), x)
    assert found.declined == set(), "no near miss: most constants are no literals"


def test_a_constant_with_alpha_stays():
    model = With(lambda x, w: torch.add(x, w, alpha=2), torch.tensor(2.0))
    check_declines(constants.literal_operand, model, specials(N))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.uint8], ids=str)
def test_a_constant_minus_a_value_is_rsub(dtype):
    x = specials(2, N, dtype=dtype) if dtype.is_floating_point else INTS.to(dtype)
    model = With(lambda x, w: w - x, torch.tensor(3).to(dtype))
    check_fires(constants.literal_minus, model, x, ops=["rsub.Scalar"], exact=True)


@pytest.mark.parametrize("w", [torch.ones(1), torch.tensor(math.inf), torch.tensor(2.5, dtype=torch.float64)])
def test_other_differences_stay(w):
    found = check_declines(constants.literal_minus, With(lambda x, w: w - x, w), torch.tensor(0.5))
    assert found.declined == set()


@pytest.mark.parametrize("item", [constants.literal_minus, constants.uniform_minus])
def test_a_constant_minus_a_literal_stays(item):
    check_declines(item, With(lambda x, w: x * (w - 2.0), torch.tensor(3.0)), specials(N))


@pytest.mark.parametrize(
    ("item", "function"),
    [
        (constants.literal_operand, lambda x, w: x * w),
        (constants.uniform_operand, lambda x, w: x * w),
        (constants.literal_minus, lambda x, w: w - x),
        (constants.uniform_minus, lambda x, w: w - x),
        (constants.literal_fill, lambda x, w: x.masked_fill(x > 0, w)),
    ],
)
def test_a_number_on_another_device_stays_there(item, function):
    """The meta device stands for any: kernels differ there, and to look at the number means to wait for it."""
    program = capture(With(function, torch.tensor(2.0)), specials(N))
    program.weights["w0"] = program.weights["w0"].to("meta")
    changes = RulePass("literals", (item,)).run(program, Limits(Numerics.ROUNDING))
    assert changes.done == changes.declined == ()


@pytest.mark.parametrize("value", [2.0, -math.inf, -3.3895313892515355e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_fill_takes_its_number_out_of_the_constant(value, dtype):
    model = With(lambda x, w: x.masked_fill(x > 0, w), torch.tensor(value, dtype=dtype))
    x = specials(3, N, dtype=dtype)
    check_fires(constants.literal_fill, model, x, ops=["gt.Scalar", "masked_fill.Scalar"], exact=True)


def test_a_fill_of_integers_takes_its_number_out_of_the_constant():
    model = With(lambda x, w: x.masked_fill(x > 0, w), torch.tensor(7))
    check_fires(constants.literal_fill, model, INTS, exact=True)
    check_fires(constants.literal_fill, model, INTS.float(), exact=True)


@pytest.mark.parametrize(
    ("x", "w"),
    [(torch.tensor([True, False]), torch.tensor(True)), (torch.tensor([1 + 1j]), torch.tensor(1 + 2j))],
    ids=["bool", "complex"],
)
def test_other_fills_stay(x, w):
    check_declines(constants.literal_fill, With(lambda x, w: x.masked_fill(x == 1, w), w), x)


def test_a_fill_with_a_computed_number_stays():
    check_declines(constants.literal_fill, lambda x: x.masked_fill(x > 0, x.sum()), specials(N))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("function", [lambda x, w: w + x, lambda x, w: w * x], ids=["add", "mul"])
@pytest.mark.parametrize("shape", [(N,), (3, N)])
def test_the_constant_is_on_the_right(function, shape, dtype):
    x = (specials(2, 3, N) if dtype.is_floating_point else specials(2, 3, N) > 0).to(dtype)
    w = (NUMBERS.expand(shape) if dtype.is_floating_point else NUMBERS.expand(shape) > 0).to(dtype).contiguous()
    found = check_fires(constants.constant_right, With(function, w), x, exact=True)
    assert "(%arg0, %w0)" in found.after.text


HALVES = [torch.float16, torch.bfloat16]
FINITE = torch.arange(0, 2**15, 7, dtype=torch.int16)  # bits of a half


def every(dtype):
    """Numbers of all sizes."""
    x = FINITE.view(dtype)
    return x[x.isfinite()]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_factor_that_half_precision_rounds_on_the_left_only_stays_there(dtype):
    x, product = every(dtype), lambda x, w: w * x
    for w in (torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64), torch.tensor([3001])):
        check_declines(constants.constant_right, With(product, w), x, constants.SIDES, exact=True)
    check_declines(constants.constant_right, With(product, x), torch.tensor(0.1), constants.SIDES, exact=True)
    check_fires(constants.constant_right, With(product, torch.tensor(0.5)), x, exact=True)
    check_fires(constants.constant_right, With(lambda x, w: w + x, torch.tensor(0.1)), x, exact=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: x + w,
        lambda x, w: w - x,
        lambda x, w: w / x,
        lambda x, w: torch.add(w, x, alpha=2),
        lambda x, w: w + w,
        lambda x, w: w * 2,
        lambda x, w: x.neg() * x,
    ],
)
def test_nothing_else_changes_sides(function):
    check_declines(constants.constant_right, With(function, NUMBERS), specials(N))


def test_sides_change_the_layout_that_ties_decide():
    """With strides that tie, the first operand decides the layout of the sum."""
    w = torch.randn(3, 2).t()
    check_declines(constants.constant_right, With(lambda x, w: w + x, w), torch.randn(2, 3), OTHER_LAYOUT)


@pytest.mark.parametrize(
    ("function", "ops"),
    [
        (lambda x, w: x * w.sqrt(), ["mul.Tensor"]),
        (lambda x, w: x > w.sqrt(), ["gt.Scalar"]),
        (lambda x, w: w.sqrt() - x, ["rsub.Scalar"]),
        (lambda x, w: w.sqrt() * x, ["mul.Tensor"]),
        (lambda x, w: x.masked_fill(x > 0, w.sqrt()), ["gt.Scalar", "masked_fill.Scalar"]),
        (lambda x, w: w.sqrt().expand(N) + x, ["add.Tensor"]),
    ],
)
def test_what_folding_made_constant_gets_its_form_as_well(function, ops):
    passes = (CANONICALIZE, FoldConstants(), DeadCode(), ALGEBRA)
    found = check(passes, With(function, torch.tensor(9.0)), specials(N), ops, exact=True)
    again = (constants.literal_fill_again, constants.constant_right_again)
    assert found.done & {item.name for item in (constants.uniform_operand, constants.uniform_minus, *again)}


# ---- masks ------------------------------------------------------------------------------------------------


# ---- constants of one number ------------------------------------------------------------------------------


@pytest.mark.sliced(32)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize("shape", [(N,), (2, 1)])
def test_a_constant_of_one_number_becomes_a_literal_with_the_same_bits(op, shape, dtype):
    function, name = BINARY[op]
    model = With(function, torch.full(shape, 0.1, dtype=dtype))
    check_fires(constants.uniform_operand, model, specials(2, N, dtype=dtype), ops=[name], exact=True)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("op", ["add", "mul", "gt"])
def test_an_integer_constant_of_one_number_becomes_a_literal(op, dtype):
    function, name = BINARY[op]
    model = With(function, torch.full((8,), 100, dtype=dtype))
    check_fires(constants.uniform_operand, model, INTS.to(dtype), ops=[name], exact=True)


@pytest.mark.parametrize(("dtype", "number"), [(torch.float16, 2049), (torch.float16, 70_000), (torch.bfloat16, 257)])
@pytest.mark.parametrize("op", ["mul", "div"])
def test_an_integer_constant_that_half_precision_rounds_stays(op, dtype, number):
    """As a literal, it would not be rounded."""
    x, function = every(dtype), BINARY[op][0]
    check_declines(constants.uniform_operand, With(function, torch.full((len(x),), number)), x, exact=True)
    check_fires(constants.uniform_operand, With(function, torch.tensor([number])), x, exact=True)
    check_fires(constants.uniform_operand, With(function, torch.full((len(x),), 256)), x, exact=True)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32], ids=str)
def test_a_constant_of_one_number_minus_a_value_is_rsub(dtype):
    x = specials(2, N, dtype=dtype) if dtype.is_floating_point else INTS.to(dtype)
    model = With(lambda x, w: w - x, torch.full((x.shape[-1],), 3, dtype=dtype))
    check_fires(constants.uniform_minus, model, x, ops=["rsub.Scalar"], exact=True)


@pytest.mark.parametrize(
    ("x", "w"),
    [
        (specials(N), torch.ones(2, N)),
        (specials(N), torch.ones(N).double()),
        (specials(N).half(), torch.ones(1)),
        (INTS, torch.ones(1)),
        (torch.full((3,), complex(math.inf, 0)), torch.ones(3)),
        (specials(2), torch.tensor([0.0, -0.0])),
        (specials(3), torch.tensor([1.0, 2.0, 1.0])),
        (specials(3), torch.full((3,), -math.inf)),
        (torch.ones(0), torch.ones(0)),
    ],
    ids=["broadcasts", "f64", "f32", "int", "complex", "signs", "numbers", "inf", "empty"],
)
def test_a_constant_that_is_more_than_a_number_stays(x, w):
    product = check_declines(constants.uniform_operand, With(lambda x, w: (x * w, x + w), w), x)
    difference = check_declines(constants.uniform_minus, With(lambda x, w: w - x, w), x)
    assert product.declined == difference.declined == set()


def test_a_constant_of_one_number_stays_until_the_formulas_are_known():
    check_declines(constants.literal_operand, With(lambda x, w: x * w, torch.ones(N)), specials(N))
    check_declines(constants.literal_minus, With(lambda x, w: w - x, torch.ones(N)), specials(N))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize(
    "function",
    [lambda x, w: x * (w + 1), lambda x, w: (w + 1) * x, lambda x, w: x - w, lambda x, w: x + -w],
    ids=["times ones", "ones times", "minus zeros", "plus minus zeros"],
)
def test_ones_and_zeros_go_at_level_one(function, dtype):
    x = specials(2, N, dtype=dtype) if dtype.is_floating_point else torch.arange(2 * N).reshape(2, N).to(dtype)
    model = With(lambda x, w: function(x, w).abs(), torch.zeros(N, dtype=dtype))
    check(STANDARD, model, x, ["abs"], level=Numerics.EXACT)


def test_zeros_of_the_other_sign_go_at_level_two():
    model = With(lambda x, w: (x + w).abs(), torch.zeros(N))
    assert len(check(STANDARD, model, specials(N), level=Numerics.EXACT).ops) == 2
    check(STANDARD, model, specials(N), ["abs"])


def test_a_mask_without_padding_goes():
    """(1 - mask) * min is -0.0 where nothing is masked."""
    model = With(lambda x, m: x + (1.0 - m) * -3.4e38, torch.ones(2, 7))
    check(STANDARD, lambda x: model(x).softmax(-1), torch.randn(2, 7), ["softmax.int"])


# ---- powers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("n", [2.0, 3.0, -1.0, -2.0, 1.0, 0.0, 4.0])
def test_a_power_by_a_constant_has_a_literal(n, dtype):
    x = specials(2, N, dtype=dtype)
    model = With(lambda x, w: x**w, torch.tensor(n, dtype=dtype))
    found = check_fires(constants.literal_power, model, x, ops=["pow.Tensor_Scalar"])
    assert found.after.numerics == Numerics.ROUNDING


@pytest.mark.parametrize(
    ("x", "w"),
    [
        (specials(N), torch.tensor(0.5)),
        (specials(N), torch.tensor(-0.5)),
        (specials(N), torch.tensor(100.0)),
        (specials(2), torch.tensor([2.0, 3.0])),
        (INTS, torch.tensor(2)),
        (INTS, torch.tensor(2.0)),
    ],
)
def test_other_powers_stay(x, w):
    check_declines(constants.literal_power, With(lambda x, w: x**w, w), x)
