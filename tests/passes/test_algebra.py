"""The algebraic identities: where they fire, and the near misses where they must not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.passes.helpers import SPECIAL, Limits, aten, capture, check, check_declines, check_fires, ops_of, specials
from tsopt.compiler.pipeline import run
from tsopt.compiler.program import Numerics
from tsopt.compiler.rewrite import NEW_ALIAS, OTHER_LAYOUT, USED_ELSEWHERE, RulePass
from tsopt.passes import ALGEBRA, DeadCode, algebra
from tsopt.passes.algebra import holds

N = len(SPECIAL)
INTS = torch.tensor([0, 1, -1, 7, 2**31, -(2**63)], dtype=torch.int64)


# ---- x * 1, x - 0, x + 0 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("one", [1, 1.0])
@pytest.mark.parametrize(
    "op", [aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.pow.Tensor_Scalar], ids=str
)
def test_times_one_goes(op, one):
    check_fires(algebra.times_one, lambda x: op(x, one).relu(), specials(N), ops=["relu"])


def test_times_one_goes_for_integers_with_an_integer_literal():
    check_fires(algebra.times_one, lambda x: (x * 1).neg(), INTS, ops=["neg"])


@pytest.mark.parametrize("op", [aten.div.Tensor, lambda x, _: x * 1.0, lambda x, _: x**1.0], ids=["div", "mul", "pow"])
def test_one_keeps_a_promoting_literal(op):
    """int / 1 is a float."""
    check_declines(algebra.times_one, lambda x: op(x, 1), INTS, algebra.CASTS)


@pytest.mark.parametrize("op", [aten.mul.Tensor, aten.mul.Scalar], ids=str)
def test_bool_times_one_is_an_integer(op):
    check_declines(algebra.times_one, lambda x: op(x, 1), torch.tensor([True, False]), algebra.CASTS)


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


@pytest.mark.parametrize(
    "model",
    [
        lambda x: (x - 0).neg(),
        lambda x: (x - 0.0).neg(),
        lambda x: aten.sub.Scalar(x, 0).neg(),
        lambda x: aten.sub.Scalar(x, 0.0).neg(),
        lambda x: (x + -0.0).neg(),
        lambda x: aten.add.Scalar(x, -0.0).neg(),
    ],
)
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


@pytest.mark.parametrize("op", [aten.add.Tensor, aten.add.Scalar], ids=str)
def test_integer_plus_zero_goes_at_level_one(op):
    check_fires(algebra.plus_zero_integer, lambda x: op(x, 0).neg(), INTS, ops=["neg"], level=Numerics.EXACT)


@pytest.mark.parametrize("op", [aten.add.Tensor, aten.add.Scalar], ids=str)
def test_float_plus_zero_is_not_exact(op):
    check_declines(algebra.plus_zero_integer, lambda x: op(x, 0).neg(), specials(N), "-0.0 + 0 is 0.0")


def test_bool_plus_zero_is_an_integer():
    check_declines(algebra.plus_zero_integer, lambda x: x + 0, torch.tensor([True, False]), algebra.CASTS)


@pytest.mark.parametrize("zero", [0, 0.0])
@pytest.mark.parametrize("op", [aten.add.Tensor, aten.add.Scalar], ids=str)
def test_float_plus_zero_goes_when_rounding_is_allowed(op, zero):
    found = check_fires(algebra.plus_zero, lambda x: op(x, zero).neg(), specials(N), ops=["neg"])
    assert found.after.numerics == Numerics.ROUNDING


@pytest.mark.parametrize("zero", [0, 0.0])
def test_float_plus_zero_stays_at_level_one(zero):
    check_declines(algebra.plus_zero, lambda x: (x + zero).neg(), specials(N), level=Numerics.EXACT)


def test_plus_zero_keeps_a_promoting_literal():
    check_declines(algebra.plus_zero, lambda x: x + 0.0, INTS, algebra.CASTS)


@pytest.mark.parametrize("literal", [1, 0.5, False])
def test_plus_something_stays(literal):
    check_declines(algebra.plus_zero, lambda x: (x + literal).neg(), specials(N))


# ---- chains -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x", [specials(N), INTS], ids=["float", "int"])
def test_neg_neg_goes(x):
    check_fires(algebra.neg_neg, lambda x: x.neg().neg().abs(), x, ops=["abs"])


def test_neg_neg_stays_where_the_inner_is_used_elsewhere():
    def model(x):
        y = -x
        return (-y).abs(), y

    check_declines(algebra.neg_neg, model, specials(N), USED_ELSEWHERE)


def test_relu_relu_becomes_one():
    check_fires(algebra.relu_relu, lambda x: x.relu().relu(), specials(N), ops=["relu"])


def test_relu_relu_relu_becomes_one():
    check_fires(algebra.relu_relu, lambda x: x.relu().relu().relu(), specials(N), ops=["relu"])


def test_relu_relu_stays_where_the_inner_is_returned():
    def model(x):
        y = x.relu()
        return y, y.relu()

    check_declines(algebra.relu_relu, model, specials(N), USED_ELSEWHERE)


def test_permute_permute_becomes_one():
    found = check_fires(
        algebra.permute_permute,
        lambda x: x.permute(1, 2, 0).permute(-1, 1, 0).relu(),
        specials(2, 3, 4),
        ops=["permute", "relu"],
    )
    assert "[0, 2, 1]" in found.after.text


def test_permutes_that_cancel_go():
    check_fires(
        algebra.permute_permute, lambda x: x.permute(1, 2, 0).permute(2, 0, 1).relu(), specials(2, 3, 4), ops=["relu"]
    )


def test_a_square_permute_is_no_identity():
    """[3, 3, 3] stays [3, 3, 3] under any permutation; the values move."""
    check_fires(
        algebra.permute_permute, lambda x: x.permute(1, 2, 0).permute(1, 2, 0), specials(3, 3, 3), ops=["permute"]
    )
    check_declines(algebra.permute_nothing, lambda x: x.permute(1, 2, 0) + 1, specials(3, 3, 3))
    check_declines(algebra.permute_nothing, lambda x: x.transpose(0, 1) + 1, specials(3, 3))


def test_permutes_with_a_shared_middle_stay():
    def model(x):
        y = x.permute(1, 0, 2)
        return y.permute(2, 0, 1).relu(), y + 1

    check_declines(algebra.permute_permute, model, specials(2, 3, 4), USED_ELSEWHERE)


@pytest.mark.parametrize("again", [(0, 2), (2, 0), (-1, -3)])
def test_transposes_that_cancel_go(again):
    check_fires(
        algebra.transpose_transpose,
        lambda x: x.transpose(0, 2).transpose(*again).relu(),
        specials(2, 3, 4),
        ops=["relu"],
    )


def test_other_transposes_become_one_permute():
    check_fires(
        algebra.transpose_transpose,
        lambda x: x.transpose(0, 2).transpose(-2, 0).relu(),
        specials(2, 3, 4),
        ops=["permute", "relu"],
    )


def test_transposes_of_a_scalar_do_not_stop_the_pass():
    check(algebra.transpose_transpose, lambda x: x.transpose(0, 0).transpose(-1, 0) + 1, torch.tensor(2.0))


def test_t_t_goes():
    check_fires(algebra.t_t, lambda x: x.t().t().relu(), specials(2, 3), ops=["relu"])


@pytest.mark.parametrize(
    "model",
    [lambda x: x.permute(0, 1, 2) + 1, lambda x: x.permute(0, -2, -1) + 1, lambda x: x.transpose(1, -2) + 1],
)
def test_a_permute_that_moves_nothing_goes(model):
    check_fires(algebra.permute_nothing, model, specials(2, 3, 4), ops=["add.Tensor"])


def test_a_permute_of_a_scalar_goes():
    check_fires(algebra.permute_nothing, lambda x: x.permute(()) + 1, torch.tensor(2.0), ops=["add.Tensor"])


@pytest.mark.parametrize(
    "model",
    [
        lambda x: aten.view.default(aten.view.default(x, [6, 4]), [3, 8]) + 1,
        lambda x: aten.reshape.default(aten.view.default(x, [6, -1]), [3, -1]) + 1,
        lambda x: aten.reshape.default(aten.reshape.default(x, [6, 4]), [3, 8]) + 1,
        lambda x: aten.view.default(aten.reshape.default(x, [6, 4]), [3, 8]) + 1,
        lambda x: aten.view.default(aten.unsqueeze.default(x, 1), [3, 8]) + 1,
        lambda x: aten.reshape.default(aten.unsqueeze.default(x, -1), [3, 8]) + 1,
    ],
)
def test_reshape_reshape_becomes_one(model):
    check_fires(algebra.reshape_reshape, model, specials(2, 3, 4), ops=["reshape", "add.Tensor"])


def test_reshapes_that_cancel_go():
    """A reshape to the shape at hand would be left for a second run of the pipeline."""
    check_fires(algebra.reshape_reshape, lambda x: x.view(6).view(2, 3).neg(), specials(2, 3), ops=["neg"])


def test_a_reshape_that_copies_is_not_merged_into_a_view_of_other_layout():
    """x.t() must be copied to become flat; [2, 3] straight from x.t() has other strides."""
    check_declines(algebra.reshape_reshape, lambda x: x.t().reshape(6).view(2, 3), specials(3, 2), OTHER_LAYOUT)


def test_reshapes_with_a_shared_middle_stay():
    def model(x):
        y = x.reshape(6)
        return y.reshape(3, 2) + 1, y * 2

    check_declines(algebra.reshape_reshape, model, specials(2, 3), USED_ELSEWHERE)


# ---- casts ------------------------------------------------------------------------------------------------

CASTS = (DeadCode(), RulePass("casts", (algebra.cast_cast,)))  # the first takes the checks that export puts between


def test_a_cast_through_a_wider_type_goes():
    check(CASTS, lambda x: x.double().float().neg(), specials(N), ["neg"])


@pytest.mark.parametrize(
    "op",
    [
        lambda x, d, e: aten.to.dtype(aten.to.dtype(x, d), e),
        lambda x, d, e: aten._to_copy.default(aten._to_copy.default(x, dtype=d), dtype=e),
        lambda x, d, e: aten.to.dtype(aten._to_copy.default(x, dtype=d), e),
    ],
)
def test_two_casts_become_one(op):
    check(CASTS, lambda x: op(x, torch.float64, torch.float16).neg(), specials(N), ["to.dtype", "neg"])


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


@pytest.mark.parametrize("op", [aten.div.Tensor, aten.div.Scalar], ids=str)
@pytest.mark.parametrize("c", [2, 2.0, -4.0, 0.5, 256.0, 2.0**-8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_division_by_a_power_of_two_becomes_a_product(op, c, dtype):
    check_fires(algebra.div_power_of_two, lambda x: op(x, c), specials(N).to(dtype), ops=["mul.Tensor"])


@pytest.mark.parametrize("c", [3, 0, 0.0, float("inf"), float("nan"), 512.0, 2.0**-9, 1e-45])
def test_division_by_anything_else_stays(c):
    check_declines(algebra.div_power_of_two, lambda x: x / c, specials(N))


def test_division_of_integers_stays():
    check_declines(algebra.div_power_of_two, lambda x: x / 2, INTS, algebra.KEEPS_FLOAT)


def test_division_by_a_tensor_stays():
    check_declines(algebra.div_power_of_two, lambda x, y: x / y, (specials(N), torch.full((N,), 2.0)))


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
            y = ((x * 1).t().t() - 0).view(-1).view(2, 3).relu().relu()
            return (y**2 / 4 + 0.0).permute(0, 1).neg()

    check(ALGEBRA, Net(), specials(2, 3), ["relu", "mul.Tensor", "mul.Tensor", "neg"])


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
