"""User-written softmaxes as one op."""

from __future__ import annotations

import math

import pytest
import torch

from tests.passes.helpers import check, check_declines, check_fires
from tsopt.compiler.rewriting.rewrite import USED_ELSEWHERE
from tsopt.passes import STANDARD
from tsopt.passes.recompose import activations

X = torch.linspace(-8, 8, 63).reshape(7, 3, 3)
HALVES = [torch.float64, torch.float16, torch.bfloat16]


def _softmax(axis, maximum, total=lambda e, axis: e.sum(axis, keepdim=True)):
    def model(x):
        e = torch.exp(x - maximum(x, axis))
        return e / total(e, axis)

    return model


SOFTMAX = {
    "amax": _softmax(-1, lambda x, axis: x.amax(axis, keepdim=True)),
    "max values": _softmax(1, lambda x, axis: x.max(axis, keepdim=True).values),
    "axis given back": _softmax(
        -1, lambda x, axis: x.max(axis)[0].unsqueeze(axis), lambda e, axis: e.sum(axis).unsqueeze(axis)
    ),
    "first axis": _softmax(0, lambda x, axis: x.amax(0, keepdim=True)),
}
LOG_SOFTMAX = {
    "logsumexp": lambda x: x - torch.logsumexp(x, -1, keepdim=True),
    "logsumexp, axis given back": lambda x: x - torch.logsumexp(x, 1).unsqueeze(1),
}


def _stable_log_softmax(x):
    s = x - x.amax(-1, keepdim=True)
    return s - torch.log(torch.exp(s).sum(-1, keepdim=True))


@pytest.mark.parametrize("form", SOFTMAX)
def test_softmax_is_one_op(form):
    check(STANDARD, SOFTMAX[form], X * 40, ["softmax.int"])


@pytest.mark.parametrize("model", [*LOG_SOFTMAX.values(), _stable_log_softmax], ids=[*LOG_SOFTMAX, "by hand"])
def test_log_softmax_is_one_op(model):
    check(STANDARD, model, X * 40, ["log_softmax.int"])


@pytest.mark.parametrize(
    ("rule", "model"),
    [
        (activations.softmax_formula, SOFTMAX["amax"]),
        (activations.log_softmax_formula, LOG_SOFTMAX["logsumexp"]),
        (activations.log_softmax_formula, _stable_log_softmax),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_softmax_of_special_values(rule, model, dtype):
    """Rows with NaN, all -inf, and with some -inf."""
    hidden = torch.full((4, 3), -math.inf)
    hidden[1, 0], hidden[2] = 1.0, torch.tensor([0.0, -math.inf, -1.0])
    check_fires(rule, model, hidden.to(dtype), also=[torch.tensor([[math.nan, 1, 2]] * 4).to(dtype)])


@pytest.mark.parametrize("shape", [(1,), (0, 3), (2, 1), (7, 2)], ids=str)
def test_softmax_of_small_shapes(shape):
    check_fires(activations.softmax_formula, SOFTMAX["amax"], torch.arange(0.0, math.prod(shape)).reshape(shape))


@pytest.mark.parametrize(
    "model",
    [
        _softmax(-1, lambda x, axis: x.amax()),
        _softmax(-1, lambda x, axis: x.amax(0, keepdim=True)),
        _softmax(-1, lambda x, axis: x.amin(axis, keepdim=True)),
        _softmax(-1, lambda x, axis: x.abs().amax(axis, keepdim=True)),
        _softmax(-1, lambda x, axis: x.amax(axis, keepdim=True), lambda e, axis: e.sqrt().sum(axis, keepdim=True)),
        lambda x: (e := torch.exp2(x - x.amax(-1, keepdim=True))) / e.sum(-1, keepdim=True),
        lambda x: (e := torch.exp(x.sub(x.amax(-1, keepdim=True), alpha=2))) / e.sum(-1, keepdim=True),
        _softmax((1, 2), lambda x, axis: x.amax(axis, keepdim=True)),
        _softmax(-1, lambda x, axis: x.amax(axis, keepdim=True), lambda e, axis: e.sum(0, keepdim=True)),
        _softmax(-1, lambda x, axis: x.amax(axis, keepdim=True), lambda e, axis: e.sum(axis, keepdim=True) + 1e-9),
        _softmax(-1, lambda x, axis: x.max(axis, keepdim=True).indices),
        _softmax(
            -1, lambda x, axis: x.amax(axis, True), lambda e, axis: e.sum(axis, keepdim=True, dtype=torch.float16)
        ),
    ],
)
def test_other_quotients_of_exponentials_stay(model):
    check_declines(activations.softmax_formula, model, X)


def test_softmax_with_exponentials_that_are_returned_stays():
    def model(x):
        e = torch.exp(x - x.amax(-1, keepdim=True))
        return e / e.sum(-1, keepdim=True), e

    check_declines(activations.softmax_formula, model, X, USED_ELSEWHERE)


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x - torch.logsumexp(x, 0),
        lambda x: x - torch.logsumexp(x, (1, 2), keepdim=True),
        lambda x: x - torch.logsumexp(2 * x, -1, keepdim=True),
        lambda x: x - torch.log(torch.exp(x).sum(-1, keepdim=True)),
        lambda x: x - torch.log(x.abs()),
        lambda x: (s := x - x.amax(-1, keepdim=True)) - torch.log((s * s).sum(-1, keepdim=True)),
        lambda x: (x - x.amax(-1, keepdim=True)) - torch.log(torch.exp(x).sum(-1, keepdim=True)),
        lambda x: (s := x - x.amax(-1, keepdim=True)) - torch.log(torch.exp(s).sum(0, keepdim=True)),
        lambda x: torch.sub(x, torch.logsumexp(x, -1, keepdim=True), alpha=2),
    ],
)
def test_other_differences_stay(model):
    found = check_declines(activations.log_softmax_formula, model, X)
    assert found.ops[-1].startswith("sub")
