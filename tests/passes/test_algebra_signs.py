"""Signs that cancel, and those that must stay."""

from __future__ import annotations

import math

import pytest
import torch

from tests.passes.examples import FLOATS, INTS, N
from tests.passes.helpers import aten, check, check_declines, check_fires, specials
from tsopt.compiler.rewriting.rewrite import USED_ELSEWHERE, RulePass
from tsopt.passes import CommonSubexpressions, DeadCode, algebra


@pytest.mark.parametrize("x", [specials(N), INTS], ids=["float", "int"])
def test_neg_neg_goes(x):
    check_fires(algebra.neg_neg, lambda x: x.neg().neg().abs(), x, ops=["abs"])


def test_neg_neg_stays_where_the_inner_is_used_elsewhere():
    def model(x):
        y = -x
        return (-y).abs(), y

    check_declines(algebra.neg_neg, model, specials(N), USED_ELSEWHERE)


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


@pytest.mark.parametrize("number", [torch.tensor(0.1), torch.tensor(-0.0), torch.tensor(3)], ids=str)
@pytest.mark.parametrize(
    ("item", "model", "op"),
    [
        (algebra.add_neg, lambda x, n: -x + n.item(), "rsub.Scalar"),
        (algebra.sub_neg, lambda x, n: n.item() - -x, "add.Tensor"),
    ],
)
def test_signs_cancel_beside_a_number_that_the_model_computes(item, model, op, number):
    found = check((DeadCode(), RulePass(item.name, (item,))), model, (specials(N), number), exact=True)
    assert item.name in found.done
    assert found.ops == ["item", op]


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
