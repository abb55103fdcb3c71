"""One name for each op that has several."""

from __future__ import annotations

import pytest
import torch

from tests.passes.examples import N, X
from tests.passes.helpers import (
    aten,
    check,
    check_declines,
    check_fires,
    specials,
)
from tsopt.passes import canonicalize

NAMES = {
    "minimum": [torch.min],
    "maximum": [torch.max],
    "sub.Tensor": [
        lambda x, y: torch.subtract(x, y),
        lambda x, y: aten.subtract.Scalar(x, 2),
        lambda x, y: aten.sub.Scalar(x, 2),
    ],
    "add.Tensor": [lambda x, y: aten.add.Scalar(x, 2)],
    "mul.Tensor": [
        lambda x, y: torch.multiply(x, y),
        lambda x, y: aten.multiply.Scalar(x, 2),
        lambda x, y: aten.mul.Scalar(x, 2),
    ],
    "div.Tensor": [
        lambda x, y: torch.divide(x, y),
        lambda x, y: torch.true_divide(x, y),
        lambda x, y: aten.divide.Scalar(x, 2),
        lambda x, y: aten.true_divide.Scalar(x, 2),
        lambda x, y: aten.div.Scalar(x, 2),
    ],
    "div.Scalar_mode": [lambda x, y: aten.divide.Scalar_mode(x, 2, rounding_mode="trunc")],
    "div.Tensor_mode": [lambda x, y: torch.divide(x, y, rounding_mode="floor")],
    "neg": [lambda x, y: torch.negative(x)],
    "abs": [lambda x, y: torch.absolute(x)],
    "trunc": [lambda x, y: torch.fix(x)],
    "atan": [lambda x, y: torch.arctan(x)],
    "atan2": [lambda x, y: torch.arctan2(x, y)],
    "atanh": [lambda x, y: torch.arctanh(x)],
    "acos": [lambda x, y: torch.arccos(x)],
    "acosh": [lambda x, y: torch.arccosh(x)],
    "asin": [lambda x, y: torch.arcsin(x)],
    "asinh": [lambda x, y: torch.arcsinh(x)],
    "erfc": [lambda x, y: torch.special.erfc(x)],
    "erfinv": [lambda x, y: torch.special.erfinv(x)],
    "logit": [lambda x, y: torch.special.logit(x), lambda x, y: torch.special.logit(x, eps=0.1)],
    "logsumexp": [lambda x, y: torch.special.logsumexp(x, 0, True)],
    "sinc": [lambda x, y: torch.special.sinc(x)],
    "i0": [lambda x, y: torch.special.i0(x)],
    "digamma": [lambda x, y: torch.special.digamma(x), lambda x, y: torch.special.psi(x)],
    "polygamma": [lambda x, y: torch.special.polygamma(1, x)],
    "lgamma": [lambda x, y: torch.special.gammaln(x)],
    "mvlgamma": [lambda x, y: torch.special.multigammaln(x, 2)],
    "igamma": [lambda x, y: torch.special.gammainc(x, y)],
    "igammac": [lambda x, y: torch.special.gammaincc(x, y)],
    "xlogy.Tensor": [lambda x, y: torch.special.xlogy(x, y)],
    "xlogy.Scalar_Self": [lambda x, y: torch.special.xlogy(2.0, x)],
    "xlogy.Scalar_Other": [lambda x, y: torch.special.xlogy(x, 2.0)],
    "sigmoid": [lambda x, y: torch.special.expit(x)],
    "erf": [lambda x, y: torch.special.erf(x)],
    "exp2": [lambda x, y: torch.special.exp2(x)],
    "expm1": [lambda x, y: torch.special.expm1(x)],
    "log1p": [lambda x, y: torch.special.log1p(x)],
    "softmax.int": [
        lambda x, y: torch.special.softmax(x, -1),
        lambda x, y: torch.special.softmax(x, 0, dtype=torch.float64),
    ],
    "log_softmax.int": [lambda x, y: torch.special.log_softmax(x, -1)],
    "cat": [lambda x, y: torch.concat([x, y]), lambda x, y: torch.concatenate([x, y], 1)],
    "clamp": [lambda x, y: torch.clip(x, 0, 1), lambda x, y: x.clip(max=1)],
    "clamp.Tensor": [lambda x, y: torch.clip(x, y)],
    "gt.Tensor": [lambda x, y: torch.greater(x, y)],
    "ge.Tensor": [lambda x, y: torch.greater_equal(x, y)],
    "lt.Tensor": [lambda x, y: torch.less(x, y)],
    "le.Tensor": [lambda x, y: torch.less_equal(x, y)],
    "ne.Tensor": [lambda x, y: torch.not_equal(x, y)],
    "gt.Scalar": [lambda x, y: torch.greater(x, 0.5)],
    "ge.Scalar": [lambda x, y: torch.greater_equal(x, 0.5)],
    "lt.Scalar": [lambda x, y: torch.less(x, 0.5)],
    "le.Scalar": [lambda x, y: torch.less_equal(x, 0.5)],
    "ne.Scalar": [lambda x, y: torch.not_equal(x, 0.5)],
}


@pytest.mark.parametrize(("name", "model"), [(name, model) for name, models in NAMES.items() for model in models])
def test_an_op_has_one_name(name, model):
    x = specials(3, N)
    check_fires(canonicalize.short_name, model, (x, x.roll(5).contiguous()), ops=[name], exact=True)


@pytest.mark.parametrize("op", [aten.sub.Scalar, aten.subtract.Scalar, aten.add.Scalar], ids=str)
def test_a_scalar_overload_with_alpha_keeps_its_name(op):
    check_declines(canonicalize.short_name, lambda x: op(x, 2, 3), X)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("op", [aten.add.Scalar, aten.mul.Scalar, aten.div.Scalar], ids=str)
@pytest.mark.parametrize("literal", [3, 0.1, -0.0])
def test_both_overloads_promote_alike(op, literal, dtype):
    x = (torch.arange(18) if not dtype.is_floating_point else specials(N)).to(dtype)
    check_fires(canonicalize.short_name, lambda x: op(x, literal), x, exact=True)


@pytest.mark.parametrize("alpha", [{}, {"alpha": 3}])
def test_subtract_keeps_its_alpha(alpha):
    found = check(
        canonicalize.short_name, lambda x: torch.subtract(x, x.flip(0), **alpha), specials(N), ["flip", "sub.Tensor"]
    )
    assert ("alpha=3" in found.after.text) == bool(alpha)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("op", "left", "right"),
    [
        (torch.mm, (3, 7), (7, 2)),
        (torch.mm, (1, 7), (7, 1)),
        (torch.mm, (0, 7), (7, 2)),
        (torch.mm, (2, 0), (0, 3)),
        (torch.bmm, (2, 3, 7), (2, 7, 3)),
        (torch.bmm, (1, 3, 7), (1, 7, 1)),
        (torch.bmm, (0, 3, 7), (0, 7, 3)),
        (torch.mv, (3, 7), (7,)),
        (torch.dot, (7,), (7,)),
    ],
)
def test_matrix_products_have_one_name(op, left, right, dtype):
    x, y = (torch.randn(shape).mul(5).to(dtype) for shape in (left, right))
    check_fires(canonicalize.short_name, lambda x, y: op(x, y), (x, y), ops=["matmul"], exact=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool], ids=str)
def test_a_square_is_a_power(dtype):
    x = specials(N).nan_to_num(3, 2, 1).to(dtype)
    found = check_fires(canonicalize.square_power, lambda x: x.square(), x, ops=["pow.Tensor_Scalar"], exact=True)
    assert "aten.pow.Tensor_Scalar(%x, 2)" in found.after.text


@pytest.mark.parametrize("model", [lambda x: x * x, lambda x: x**2, lambda x: x.sqrt()])
def test_other_squares_stay(model):
    check_declines(canonicalize.square_power, model, X)


@pytest.mark.parametrize(
    ("op", "shape", "axis"),
    [(torch.hstack, (3,), 0), (torch.hstack, (3, 2), 1), (torch.vstack, (3, 2), 0), (torch.row_stack, (1, 2, 3), 0)],
)
@pytest.mark.filterwarnings("ignore")
def test_hstack_and_vstack_are_cat(op, shape, axis):
    found = check_fires(
        canonicalize.stack_cat, lambda x, y: op([x, y]), (torch.randn(shape), torch.randn(shape)), ops=["cat"]
    )
    assert f"], {axis})" in found.after.text


@pytest.mark.parametrize(("op", "shape"), [(torch.hstack, ()), (torch.vstack, (3,)), (torch.dstack, (3, 2, 1))])
def test_stacks_that_add_an_axis_stay(op, shape):
    check_declines(canonicalize.stack_cat, lambda x, y: op([x, y]), (torch.randn(shape), torch.randn(shape)))


def test_an_hstack_of_mixed_ranks_is_left_to_its_error():
    check_declines(canonicalize.stack_cat, lambda x, y: torch.hstack([x, y]), (torch.ones(1), torch.tensor(2.0)))


def test_an_hstack_with_an_empty_vector_keeps_the_axis_of_its_first_value():
    """Every vector goes along axis 0, and so does what comes after one; cat leaves the empty one out."""
    model = lambda x: torch.hstack([torch.zeros(0), x, x])  # noqa: E731
    found = check(canonicalize.stack_cat, model, torch.ones(2, 3))
    assert found.done == set()
