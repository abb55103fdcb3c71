"""The algebraic identities: where they fire, and the near misses where they must not."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.passes.helpers import SPECIAL, Limits, aten, capture, check, check_declines, check_fires, ops_of, specials
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.rewriting.pipeline import run
from tsopt.compiler.rewriting.rewrite import NEW_ALIAS, OTHER_LAYOUT, USED_ELSEWHERE, RulePass
from tsopt.passes import ALGEBRA, STANDARD, CommonSubexpressions, DeadCode, algebra
from tsopt.passes.algebra import holds

N = len(SPECIAL)
INTS = torch.tensor([0, 1, -1, 7, 2**31, -(2**63)], dtype=torch.int64)


# ---- x * 1, x - 0, x + 0 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("one", [1, 1.0])
@pytest.mark.parametrize("op", [aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Scalar], ids=str)
def test_times_one_goes(op, one):
    check_fires(algebra.times_one, lambda x: op(x, one).relu(), specials(N), ops=["relu"])


def test_times_one_goes_for_integers_with_an_integer_literal():
    check_fires(algebra.times_one, lambda x: (x * 1).neg(), INTS, ops=["neg"])


@pytest.mark.parametrize("op", [aten.div.Tensor, lambda x, _: x * 1.0, lambda x, _: x**1.0], ids=["div", "mul", "pow"])
def test_one_keeps_a_promoting_literal(op):
    """int / 1 is a float."""
    check_declines(algebra.times_one, lambda x: op(x, 1), INTS, algebra.CASTS)


def test_bool_times_one_is_an_integer():
    check_declines(algebra.times_one, lambda x: x * 1, torch.tensor([True, False]), algebra.CASTS)


@pytest.mark.parametrize("literal", [True, 2, 1.0000001, -1])
def test_only_one_is_one(literal):
    check_declines(algebra.times_one, lambda x: aten.mul.Tensor(x, literal).relu(), specials(N))


def test_times_one_stays_where_the_output_would_be_the_input():
    check_declines(algebra.times_one, lambda x: x * 1, specials(N), NEW_ALIAS)


def test_times_one_stays_where_two_outputs_would_share_memory():
    def model(x):
        y = x + 1
        return y, y * 1

    check_declines(algebra.times_one, model, specials(N), NEW_ALIAS)


def test_times_one_stays_where_a_view_of_it_is_returned_beside_the_value():
    def model(x):
        y = x + 1
        return y, (y * 1).view(-1)

    check_declines(algebra.times_one, model, specials(N), NEW_ALIAS)


@pytest.mark.parametrize(
    "view",
    [
        lambda y: y.split(2)[0],
        lambda y: y.chunk(2)[1],
        lambda y: y.tensor_split(2)[0],
        lambda y: torch.atleast_2d(y),
        lambda y: y.type_as(y),
        lambda y: torch.einsum("i->i", y),
        lambda y: torch.meshgrid(y, y, indexing="ij")[0],
    ],
    ids=["split", "chunk", "tensor_split", "atleast_2d", "type_as", "einsum", "meshgrid"],
)
def test_times_one_stays_where_a_view_of_it_would_be_one_of_the_input(view):
    """Some ops return views although their schema does not say so, or says so of a list."""
    check(algebra.times_one, lambda x: view(x * 1), specials(N))


def test_times_one_stays_where_the_layout_differs():
    """An expanded value times one is dense."""
    check_declines(algebra.times_one, lambda x: (x.expand(3, N) * 1).relu(), specials(1, N), OTHER_LAYOUT)


@pytest.mark.parametrize(
    "value", [complex("inf"), complex(0.0, float("inf")), complex(-0.0, -0.0)], ids=["inf", "infj", "zeros"]
)
@pytest.mark.parametrize("op", [aten.mul.Tensor, aten.div.Tensor], ids=str)
def test_complex_times_one_is_not_the_value_at_infinity(op, value):
    """(inf + 0i) * (1 + 0i) has a NaN part in eager."""
    check(algebra.times_one, lambda x: torch.view_as_real(op(x, 1.0)) + 0.5, torch.full((3,), value))


@pytest.mark.parametrize("model", [lambda x: (x - 0).neg(), lambda x: (x - 0.0).neg(), lambda x: (x + -0.0).neg()])
def test_minus_zero_goes(model):
    check_fires(algebra.minus_zero, model, specials(N), ops=["neg"])


def test_minus_zero_goes_for_integers():
    check_fires(algebra.minus_zero, lambda x: (x - 0).neg(), INTS, ops=["neg"])


def test_minus_zero_keeps_a_promoting_literal():
    check_declines(algebra.minus_zero, lambda x: x - 0.0, INTS, algebra.CASTS)


def test_minus_zero_with_alpha_stays():
    check_declines(
        algebra.minus_zero, lambda x: torch.sub(x, 0, alpha=2).neg(), specials(N), "alpha is not 1"
    )  # exact all the same: a rule may be careful


def test_minus_minus_zero_stays():
    """x - -0.0 turns -0.0 into 0.0."""
    check_declines(algebra.minus_zero, lambda x: (x - -0.0).neg(), specials(N))


def test_complex_plus_minus_zero_loses_the_sign_of_the_imaginary_zero():
    x = torch.complex(torch.tensor([-0.0, 1.0]), torch.tensor([-0.0, -0.0]))
    check(algebra.minus_zero, lambda x: torch.view_as_real(x + -0.0).neg(), x)


def test_integer_plus_zero_goes_at_level_one():
    check_fires(algebra.plus_zero_integer, lambda x: (x + 0).neg(), INTS, ops=["neg"], level=Numerics.EXACT)


def test_float_plus_zero_is_not_exact():
    check_declines(algebra.plus_zero_integer, lambda x: (x + 0).neg(), specials(N), "-0.0 + 0 is 0.0")


def test_bool_plus_zero_is_an_integer():
    check_declines(algebra.plus_zero_integer, lambda x: x + 0, torch.tensor([True, False]), algebra.CASTS)


@pytest.mark.parametrize("zero", [0, 0.0])
def test_float_plus_zero_goes_when_rounding_is_allowed(zero):
    found = check_fires(algebra.plus_zero, lambda x: (x + zero).neg(), specials(N), ops=["neg"])
    assert found.after.numerics == Numerics.ROUNDING


@pytest.mark.parametrize("zero", [0, 0.0])
def test_float_plus_zero_stays_at_level_one(zero):
    check_declines(algebra.plus_zero, lambda x: (x + zero).neg(), specials(N), level=Numerics.EXACT)


def test_plus_zero_keeps_a_promoting_literal():
    check_declines(algebra.plus_zero, lambda x: x + 0.0, INTS, algebra.CASTS)


@pytest.mark.parametrize("literal", [1, 0.5, False])
def test_plus_something_stays(literal):
    check_declines(algebra.plus_zero, lambda x: (x + literal).neg(), specials(N))


# ---- signs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x", [specials(N), INTS], ids=["float", "int"])
def test_neg_neg_goes(x):
    check_fires(algebra.neg_neg, lambda x: x.neg().neg().abs(), x, ops=["abs"])


def test_neg_neg_stays_where_the_inner_is_used_elsewhere():
    def model(x):
        y = -x
        return (-y).abs(), y

    check_declines(algebra.neg_neg, model, specials(N), USED_ELSEWHERE)


FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SMALL = torch.tensor([0, 1, -1, 7, 100, -128, 127], dtype=torch.int64)  # every width wraps somewhere


def other(x: torch.Tensor) -> torch.Tensor:
    """The same values in another order: every special value meets another one."""
    return x.roll(5).contiguous()


SIGNS = {
    "x + -y": (algebra.add_neg, lambda x, y: x + -y, ["sub.Tensor"]),
    "-y + x": (algebra.add_neg, lambda x, y: -y + x, ["sub.Tensor"]),
    "-y + 2": (algebra.add_neg, lambda x, y: x * (-y + 2), ["rsub.Scalar", "mul.Tensor"]),
    "x - -y": (algebra.sub_neg, lambda x, y: x - -y, ["add.Tensor"]),
    "2 - -y": (algebra.sub_neg, lambda x, y: x * (2 - -y), ["add.Tensor", "mul.Tensor"]),
    "-x * -y": (algebra.neg_times_neg, lambda x, y: -x * -y, ["mul.Tensor"]),
    "-x * 3": (algebra.neg_times, lambda x, y: y - -x * 3, ["mul.Tensor", "sub.Tensor"]),
    "-(x * 3)": (algebra.neg_times, lambda x, y: y - -(x * 3), ["mul.Tensor", "sub.Tensor"]),
}
FLOAT_SIGNS = {
    "-x / -y": (algebra.neg_times_neg, lambda x, y: -x / -y, ["div.Tensor"]),
    "-x / 3": (algebra.neg_times, lambda x, y: y - -x / 3, ["div.Tensor", "sub.Tensor"]),
    "-(x / 0.1)": (algebra.neg_times, lambda x, y: y - -(x / 0.1), ["div.Tensor", "sub.Tensor"]),
    "-x * 0": (algebra.neg_times, lambda x, y: y - -x * 0, ["mul.Tensor", "sub.Tensor"]),
    "-x * -0.0": (algebra.neg_times, lambda x, y: y - -x * -0.0, ["mul.Tensor", "sub.Tensor"]),
    "-x * inf": (algebra.neg_times, lambda x, y: y - -x * math.inf, ["mul.Tensor", "sub.Tensor"]),
}


@pytest.mark.sliced(20)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("form", [*SIGNS, *FLOAT_SIGNS])
def test_signs_cancel_with_the_same_bits(form, dtype):
    item, model, ops = (SIGNS | FLOAT_SIGNS)[form]
    x = specials(2, N, dtype=dtype)
    check_fires(item, model, (x, other(x)), ops=ops, exact=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8], ids=str)
@pytest.mark.parametrize("form", SIGNS)
def test_signs_cancel_where_integers_wrap(form, dtype):
    item, model, ops = SIGNS[form]
    x = SMALL.to(dtype)
    check_fires(item, model, (x, other(x)), ops=ops, exact=True)


@pytest.mark.parametrize("shape", [(0, 3), (1,), (2, 7), ()])
@pytest.mark.parametrize("form", SIGNS)
def test_signs_cancel_in_any_shape(form, shape):
    item, model, ops = SIGNS[form]
    check_fires(item, model, (torch.randn(shape), torch.randn(shape)), ops=ops, exact=True)


def test_signs_cancel_under_a_promotion_of_floats():
    x = specials(N)
    check_fires(algebra.add_neg, lambda x, y: x + -y, (x, other(x).half()), ops=["sub.Tensor"], exact=True)


@pytest.mark.parametrize(
    ("item", "model"),
    [
        (algebra.add_neg, lambda x, y: x + -y),
        (algebra.add_neg, lambda x, y: x * (-y + 0.5)),
        (algebra.sub_neg, lambda x, y: x - -y),
        (algebra.sub_neg, lambda x, y: x * (1.5 - -y)),
        (algebra.neg_times_neg, lambda x, y: -x * -y),
    ],
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=str)
def test_a_sign_before_a_promotion_stays(item, model, dtype):
    """-(-128) is -128 in int8 and 128 in int32; -1 is 255 in uint8."""
    y = torch.tensor([1, 128, 255, 0]).to(dtype)
    found = check(item, model, (torch.tensor([1, 2, 3, -4], dtype=torch.int32), y))
    assert found.done == set()
    assert (item.name, algebra.PROMOTES_SIGN) in found.declined


@pytest.mark.parametrize(
    "model", [lambda x, y: x + -y, lambda x, y: -y + x, lambda x, y: aten.add.Tensor(-y, True) * x]
)
def test_nothing_is_subtracted_from_booleans(model):
    """Fake tensors do not tell: only real ones refuse."""
    check_declines(algebra.add_neg, model, (torch.tensor([True, False]), torch.tensor([0.5, -0.0])), algebra.FROM_BOOL)


def test_the_sign_of_a_real_value_stays_in_a_complex_sum():
    """0j - 0j is 0j, 0j + -0j is 0j, and -0j - 0j is not -0j + -0j."""
    x, y = torch.tensor([complex(1.0, -0.0)]), torch.tensor([2.0])
    check_declines(algebra.sub_neg, lambda x, y: torch.view_as_real(x - -y), (x, y), algebra.PROMOTES_SIGN)


def test_the_signs_of_complex_values_cancel():
    x = torch.complex(specials(N), other(specials(N)))
    check_fires(algebra.add_neg, lambda x: torch.view_as_real(x + -x.flip(0)), x, exact=True)


@pytest.mark.parametrize(
    ("item", "model"),
    [
        (algebra.add_neg, lambda x: torch.add(x, -x.flip(0), alpha=2)),
        (algebra.add_neg, lambda x: x + x.flip(0)),
        (algebra.sub_neg, lambda x: -x - x.flip(0)),
        (algebra.sub_neg, lambda x: torch.sub(x, -x.flip(0), alpha=-1)),
        (algebra.neg_times_neg, lambda x: -x * x.flip(0)),
        (algebra.neg_times, lambda x: -x * x.flip(0)),
        (algebra.neg_times, lambda x: -x + 2),
        (algebra.neg_times, lambda x: aten.mul.Tensor(-x, True)),
        (algebra.neg_times, lambda x: 2 / -x),
        (algebra.neg_times, lambda x: -(x - 2)),
        (algebra.neg_times, lambda x: (-x) ** 2),
    ],
)
def test_other_signs_stay(item, model):
    check_declines(item, model, specials(N))


@pytest.mark.parametrize(
    ("x", "c"),
    [(INTS, 0.5), (torch.tensor([1, 255], dtype=torch.uint8), 2), (torch.tensor([1 + 2j]), 2.0)],
    ids=["int", "uint8", "complex"],
)
def test_a_sign_stays_where_the_literal_cannot_take_it(x, c):
    check_declines(algebra.neg_times, lambda x: -x * c, x, algebra.CASTS)


@pytest.mark.parametrize(("x", "c"), [(specials(N), 2**53 + 1), (SMALL.to(torch.int8), -128)], ids=["float", "int"])
def test_a_sign_stays_where_the_literal_would_be_another(x, c):
    check_declines(algebra.neg_times, lambda x: -x * c, x)


@pytest.mark.parametrize(
    ("item", "model"),
    [
        (algebra.add_neg, lambda x, y: (x + y.neg(), y.neg())),
        (algebra.neg_times_neg, lambda x, y: (x.neg() * y.neg(), y.neg())),
        (algebra.neg_times, lambda x, y: (y.neg() * 3, y.neg() + x)),
    ],
)
def test_a_sign_used_elsewhere_stays(item, model):
    found = check((CommonSubexpressions(), RulePass("signs", (item,))), model, (specials(N), specials(N)))
    assert item.name not in found.done
    assert (item.name, USED_ELSEWHERE) in found.declined


# ---- bounds -----------------------------------------------------------------------------------------------

POSITIVE = {
    "abs": torch.abs,
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: x.softmax(-1),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("outer", [torch.relu, torch.abs])
@pytest.mark.parametrize("inner", POSITIVE)
def test_what_is_positive_already_stays_as_it_is(inner, outer, dtype):
    x = specials(3, N, dtype=dtype)
    found = check_fires(algebra.positive_already, lambda x: outer(POSITIVE[inner](x)) + 1, x, exact=True)
    assert len(found.ops) == 2


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("op", [torch.relu, torch.abs])
def test_relu_relu_becomes_one(op, dtype):
    x = specials(N, dtype=dtype) if dtype.is_floating_point else INTS.to(dtype)
    check_fires(algebra.positive_already, lambda x: op(op(op(x))), x, ops=[op.__name__], exact=True)


def test_relu_relu_becomes_one_where_the_inner_is_used_elsewhere():
    def model(x):
        y = x.relu()
        return y.neg(), y.relu() + 1

    check_fires(algebra.positive_already, model, specials(N), ops=["relu", "neg", "add.Tensor"])


def test_relu_relu_stays_where_the_inner_is_returned():
    def model(x):
        y = x.relu()
        return y, y.relu()

    check_declines(algebra.positive_already, model, specials(N), NEW_ALIAS)


def test_abs_of_the_smallest_integer_is_negative():
    check_declines(algebra.positive_already, lambda x: x.abs().relu() + 1, INTS)


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x.relu().abs(),  # relu keeps -0.0
        lambda x: x.sqrt().relu(),
        lambda x: x.tanh().relu(),
        lambda x: x.log_softmax(-1).abs(),
        lambda x: x.neg().abs(),
    ],
)
def test_what_may_be_negative_stays(model):
    check_declines(algebra.positive_already, lambda x: model(x) + 1, specials(N))


def test_abs_of_a_complex_value_stays():
    check_declines(algebra.positive_already, lambda x: x.abs() + 1, torch.tensor([-1 + 2j]))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
def test_abs_of_relu_goes_when_rounding_is_allowed(dtype):
    x = specials(N, dtype=dtype) if dtype.is_floating_point else INTS
    check_fires(algebra.abs_relu, lambda x: x.relu().abs(), x, ops=["relu"])
    check_declines(algebra.abs_relu, lambda x: x.relu().abs(), x, level=Numerics.EXACT)


@pytest.mark.parametrize("model", [lambda x: x.abs().relu(), lambda x: F.relu6(x).abs(), lambda x: F.silu(x).abs()])
def test_other_absolute_values_stay(model):
    check_declines(algebra.abs_relu, model, specials(N))


@pytest.mark.sliced(20)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("model", "ops", "text"),
    [
        (lambda x: x.clamp(-1, 5).clamp(0, 7), ["clamp"], "0, 5)"),
        (lambda x: x.clamp(-1, 5).clamp(6, 7), ["clamp"], "6, 6)"),
        (lambda x: x.clamp(-1, 5).clamp(-3, -2), ["clamp"], "-2, -2)"),
        (lambda x: x.clamp(0.1, 0.5).clamp(-3, 2), ["clamp"], "0.1, 0.5)"),
        (lambda x: x.clamp(min=0.1).clamp(max=0.5), ["clamp"], "0.1, 0.5)"),
        (lambda x: x.clamp(min=0.1).clamp(min=0.5), ["clamp"], "0.5)"),
        (lambda x: x.clamp_min(0.1).clamp_max(0.5), ["clamp"], "0.1, 0.5)"),
        (lambda x: x.clamp_min(0.1).clamp_min(0.05), ["clamp_min"], "0.1)"),
        (lambda x: F.relu6(x).relu(), ["relu6"], ""),
        (lambda x: F.relu6(x.relu()), ["relu6"], ""),
        (lambda x: x.relu().clamp(max=6.0), ["clamp"], "0, 6.0)"),
        (lambda x: F.hardtanh(x).relu(), ["clamp"], "0, 1.0)"),
        (lambda x: F.hardtanh(F.hardtanh(x, -2, 2)), ["hardtanh"], "1.0)"),
        (lambda x: F.hardtanh(x).clamp(-2, 2), ["hardtanh"], "1.0)"),
    ],
)
def test_clamps_become_one(model, ops, text, dtype):
    found = check_fires(algebra.clamp_clamp, model, specials(2, N, dtype=dtype), ops=ops)
    assert text in found.after.text


def test_clamps_of_integers_become_one():
    check_fires(algebra.clamp_clamp, lambda x: x.clamp(-5, 7).relu(), INTS, ops=["clamp"], exact=True)


def test_a_clamp_used_elsewhere_is_enough_where_it_is_the_tighter_one():
    def model(x):
        y = F.relu6(x)
        return y.neg(), y.relu() + 1

    check_fires(algebra.clamp_clamp, model, specials(N), ops=["relu6", "neg", "add.Tensor"])


def test_a_clamp_used_elsewhere_stays_before_a_tighter_one():
    def model(x):
        y = x.relu()
        return y.neg(), F.relu6(y) + 1

    check_declines(algebra.clamp_clamp, model, specials(N), algebra.SHARED)


@pytest.mark.parametrize("model", [lambda x: x.clamp(5, -1).clamp(0, 7), lambda x: x.clamp(0, 7).clamp(5, -1)])
def test_bounds_out_of_order_stay(model):
    check_declines(algebra.clamp_clamp, model, specials(N), algebra.CROSSED)


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x.clamp(float("nan"), 5).clamp(0, 7),
        lambda x: x.relu().neg().relu(),
        lambda x: x.clamp(torch.tensor(0.0), torch.tensor(5.0)).clamp(0, 7),
        lambda x: F.leaky_relu(x).relu(),
    ],
)
def test_other_bounds_stay(model):
    found = check(algebra.clamp_clamp, model, specials(N))
    assert found.done == set()


def test_a_clamp_that_promotes_stays():
    check_declines(algebra.clamp_clamp, lambda x: x.clamp(0, 3).clamp(0.5, 7.5), INTS)
    check_declines(algebra.clamp_clamp, lambda x: x.clamp(0.5, 3.5).clamp(0, 7), INTS)


# ---- what is no identity ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "ops"),
    [
        (lambda x: x / x, ["div.Tensor"]),
        (lambda x: x - x, ["sub.Tensor"]),
        (lambda x: x * 0.0, ["mul.Tensor"]),
        (lambda x: x * 0, ["mul.Tensor"]),
        (lambda x: x.sqrt() * x.sqrt(), ["sqrt", "mul.Tensor"]),
        (lambda x: x.softmax(-1).sum(-1), ["softmax.int", "sum.dim_IntList"]),
        (lambda x: x.exp().log(), ["exp", "log"]),
        (lambda x: x / 3, ["div.Tensor"]),
        (lambda x: x.floor().floor() + x.sign(), ["floor", "floor", "sign", "add.Tensor"]),
        (lambda x: ~(x > 0), ["gt.Scalar", "bitwise_not"]),
        (lambda x: torch.where(x > 0, x, x.neg()), ["gt.Scalar", "neg", "where.self"]),
    ],
    ids=["x/x", "x-x", "x*0.0", "x*0", "sqrt", "softmax", "explog", "x/3", "floor", "not", "where"],
)
def test_what_holds_for_numbers_alone_is_left_alone(model, ops):
    """Each is an identity for ordinary numbers, and none for NaN, infinity, zero or the last bit."""
    check(STANDARD, model, specials(2, N), ops)


# ---- casts ------------------------------------------------------------------------------------------------

CASTS = (DeadCode(), RulePass("casts", (algebra.cast_cast,)))  # the first takes the checks that export puts between


def test_a_cast_through_a_wider_type_goes():
    check(CASTS, lambda x: x.double().float().neg(), specials(N), ["neg"])


def test_two_casts_become_one():
    check(CASTS, lambda x: x.double().half().neg(), specials(N), ["to.dtype", "neg"])


@pytest.mark.parametrize("target", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_float_to_integer_through_double_is_merged_only_if_the_bits_stay(target):
    """Out of range and NaN as well: EXACT is a promise for every input."""
    values = [300.0, -300.0, 3e9, -3e9, 1e19, -1e19, float("nan"), float("inf"), float("-inf"), 70000.0, -1.5, 2.0**31]
    check(CASTS, lambda x: x.double().to(target), torch.tensor(values).repeat(3), also=[])


@pytest.mark.parametrize(
    ("x", "through", "to"),
    [
        (specials(N), torch.float16, torch.float32),
        (specials(N), torch.bfloat16, torch.float32),
        (specials(N), torch.int32, torch.float32),
        (specials(N).half(), torch.bfloat16, torch.float16),
        (specials(N).bfloat16(), torch.float16, torch.bfloat16),
        (INTS, torch.float32, torch.int64),
        (INTS, torch.float64, torch.int64),
        (INTS, torch.int32, torch.int64),
        (torch.tensor([200, 3], dtype=torch.uint8), torch.int8, torch.int32),
        (torch.tensor([-2, 3], dtype=torch.int8), torch.uint8, torch.int32),
        (torch.tensor([2.5, 0.0]), torch.bool, torch.float32),
        (torch.tensor([1 + 2j]), torch.complex128, torch.complex64),
    ],
    ids=lambda v: str(v.dtype if isinstance(v, torch.Tensor) else v).removeprefix("torch."),
)
def test_a_cast_that_loses_values_stays(x, through, to):
    found = check(CASTS, lambda x: x.to(through).to(to).clone(), x)
    assert "cast_cast" not in found.done
    assert ("cast_cast", algebra.LOSES) in found.declined


def test_casts_that_cancel_stay_where_the_output_would_be_the_input():
    """x.double().float() is a new tensor in eager: who writes to it does not write to x."""
    check(CASTS, lambda x: x.double().float(), specials(N))


def test_casts_with_a_shared_middle_stay():
    def model(x):
        y = x.double()
        return y.float().neg(), y.neg()

    found = check(CASTS, model, specials(N))
    assert ("cast_cast", USED_ELSEWHERE) in found.declined


KINDS = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


@pytest.mark.parametrize("wide", KINDS)
@pytest.mark.parametrize("narrow", KINDS)
def test_holds_is_a_round_trip_of_the_extremes(wide, narrow):
    """What `holds` says is what torch does with the hardest values of the narrow type."""
    source, target = getattr(torch, narrow), getattr(torch, wide)
    if source == torch.bool:
        hard = torch.tensor([True, False])
    elif source.is_floating_point:
        limits = torch.finfo(source)
        hard = torch.tensor([limits.max, limits.tiny, 1 + limits.eps, 1.5], dtype=torch.float64).to(source)
    else:
        limits = torch.iinfo(source)
        hard = torch.tensor([limits.min, limits.max, limits.max - 1, 3], dtype=source)
    if not holds(target, narrow):
        return
    through = hard.to(target)
    assert torch.equal(through.to(source), hard)
    if through.is_floating_point() and not source.is_floating_point:
        # The largest int64 comes back from a double saturated, as if it had been held: ask Python's exact integers.
        assert [int(value) for value in through.double().tolist()] == [int(value) for value in hard.tolist()]


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [("float64", "int32"), ("float32", "int16"), ("float16", "int8"), ("bfloat16", "uint8"), ("float32", "bfloat16")],
)
def test_holds_is_not_too_careful(wide, narrow):
    assert holds(getattr(torch, wide), narrow)


# ---- powers and divisions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("c", [2, 2.0, -4.0, 0.5, 256.0, 2.0**-8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_division_by_a_power_of_two_becomes_a_product(c, dtype):
    check_fires(algebra.div_power_of_two, lambda x: x / c, specials(N).to(dtype), ops=["mul.Tensor"])


@pytest.mark.parametrize("c", [3, 0, 0.0, float("inf"), float("nan"), 512.0, 2.0**-9, 1e-45, True])
def test_division_by_anything_else_stays(c):
    check_declines(algebra.div_power_of_two, lambda x: x / c, specials(N))


@pytest.mark.parametrize("x", [INTS, torch.tensor([complex("inf"), 1 + 2j])], ids=["int", "complex"])
def test_division_of_what_is_no_float_stays(x):
    check_declines(algebra.div_power_of_two, lambda x: x / 2, x, algebra.KEEPS_FLOAT)


def test_division_by_a_tensor_stays():
    check_declines(algebra.div_power_of_two, lambda x, y: x / y, (specials(N), torch.full((N,), 2.0)))
    check_declines(algebra.div_power_of_two, lambda x: x * aten.div.Tensor(3, 2), specials(N))


@pytest.mark.parametrize(
    ("n", "ops"),
    [
        (2, ["mul.Tensor"]),
        (2.0, ["mul.Tensor"]),
        (3, ["mul.Tensor", "mul.Tensor"]),
        (0.5, ["sqrt"]),
        (-0.5, ["rsqrt"]),
        (-1, ["reciprocal"]),
        (-1.0, ["reciprocal"]),
    ],
)
def test_small_powers_become_products_and_roots(n, ops):
    found = check_fires(algebra.small_power, lambda x: x**n, specials(N).double().float(), ops=ops)
    assert found.after.numerics == Numerics.ROUNDING


def test_integer_squares_wrap_as_before():
    check_fires(algebra.small_power, lambda x: x**2, INTS, ops=["mul.Tensor"], exact=True)


@pytest.mark.parametrize("n", [4, 1.5, 0, 0.25, -2, True])
def test_other_powers_stay(n):
    check_declines(algebra.small_power, lambda x: x**n + 1, specials(N))


@pytest.mark.parametrize("n", [2.0, 0.5])
def test_a_power_that_promotes_stays(n):
    check_declines(algebra.small_power, lambda x: x**n, INTS, algebra.CASTS)


def test_powers_stay_at_level_one():
    check_declines(algebra.small_power, lambda x: x**2, specials(N), level=Numerics.EXACT)


@pytest.mark.parametrize("x", [specials(N), torch.tensor([1, 4, 0])], ids=["float", "int"])
def test_reciprocal_of_a_root_becomes_rsqrt(x):
    check_fires(algebra.reciprocal_sqrt, lambda x: x.sqrt().reciprocal(), x, ops=["rsqrt"])


def test_reciprocal_of_a_root_used_elsewhere_stays():
    def model(x):
        y = x.sqrt()
        return y.reciprocal(), y

    check_declines(algebra.reciprocal_sqrt, model, specials(N), USED_ELSEWHERE)


# ---- the table --------------------------------------------------------------------------------------------


def test_rules_work_together_and_come_to_rest():
    class Net(nn.Module):
        def forward(self, x):
            y = ((x * 1).neg().neg() - 0).relu().relu()
            return -(y**2 / 4 + 0.0) * 2

    check(ALGEBRA, Net(), specials(2, 3), ["relu", "mul.Tensor", "mul.Tensor"])


def test_every_rule_has_an_equation_and_another_name():
    assert len({item.name for item in algebra.RULES}) == len(algebra.RULES)
    assert all("->" in item.doc for item in algebra.RULES)


def test_exact_rules_alone_run_at_level_one():
    program = capture(lambda x: ((x**2) + 0.0) * 1, torch.ones(3))
    after, _ = run(program, (ALGEBRA,), Limits(Numerics.EXACT))
    assert "mul.Tensor" not in ops_of(after)[:1]
    assert after.numerics == Numerics.EXACT


@pytest.mark.parametrize("model", [lambda x: x * 1.0, lambda x: x / 1])
def test_complex_factors_of_one_decline_with_the_reason(model):
    check_declines(algebra.times_one, model, torch.tensor([1 + 2j]), algebra.COMPLEX)
