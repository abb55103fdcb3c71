"""The algebraic identities: where they fire, and the near misses where they must not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.passes.examples import INTS, N
from tests.passes.helpers import Limits, aten, capture, check, check_declines, check_fires, ops_of, specials
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.rewriting.pipeline import run
from tsopt.compiler.rewriting.rewrite import NEW_ALIAS, OTHER_LAYOUT, USED_ELSEWHERE
from tsopt.passes import ALGEBRA, STANDARD, algebra

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


# ---- pooling of a whole image -----------------------------------------------------------------------------

IMAGE = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "pool",
    [
        lambda x: nn.functional.avg_pool2d(x, (4, 5)),
        lambda x: nn.functional.avg_pool2d(x, 9, ceil_mode=True),
        lambda x: nn.functional.avg_pool2d(x[0], (4, 5), count_include_pad=False),
    ],
    ids=["exact", "larger", "one image"],
)
def test_a_pool_of_the_whole_image_is_its_mean(pool):
    assert check(algebra.pool_of_all, pool, IMAGE).done == {"pool_of_all"}


@pytest.mark.parametrize(
    "pool",
    [
        lambda x: nn.functional.avg_pool2d(x, (4, 3)),
        lambda x: nn.functional.avg_pool2d(x, (4, 4), stride=9),
        lambda x: nn.functional.avg_pool2d(x, (6, 7), padding=1),
        lambda x: nn.functional.avg_pool2d(x[:, :, :3, :3], (4, 4), padding=2, stride=9),
    ],
    ids=["several", "one window of part", "padded", "padded window"],
)
def test_other_pools_stay(pool):
    assert check(algebra.pool_of_all, pool, IMAGE).done == set()


def test_a_pool_with_its_own_divisor_stays():
    check_declines(
        algebra.pool_of_all,
        lambda x: nn.functional.avg_pool2d(x, (4, 5), divisor_override=7),
        IMAGE,
        "divisor_override is set",
    )
