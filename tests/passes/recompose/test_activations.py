"""User-written activations as one op."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.passes.helpers import RulePass, aten, check, check_declines, check_fires, specials
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.rewriting.rewrite import USED_ELSEWHERE
from tsopt.passes import STANDARD
from tsopt.passes.recompose import activations

K = math.sqrt(2 / math.pi)
X = torch.linspace(-8, 8, 63).reshape(7, 3, 3)
HARD = specials(18)
HARD[HARD.abs() > 1e38] = (
    88.5  # a product that overflows is no ordinary input; inf and NaN are in `specials` all the same
)
HALVES = [torch.float64, torch.float16, torch.bfloat16]

TANH = {
    "transformers": lambda x: 0.5 * x * (1.0 + torch.tanh(K * (x + 0.044715 * torch.pow(x, 3.0)))),
    "integer power": lambda x: 0.5 * x * (1 + torch.tanh(K * (x + 0.044715 * x**3))),
    "product": lambda x: 0.5 * x * (1 + torch.tanh(K * (x + 0.044715 * (x * x * x)))),
    "products from the left": lambda x: 0.5 * x * (1 + torch.tanh(K * (x + 0.044715 * x * x * x))),
    "half last": lambda x: x * (1 + torch.tanh(K * (x + 0.044715 * x**3))) * 0.5,
    "divided by two": lambda x: x * (torch.tanh(K * (x + 0.044715 * x**3)) + 1) / 2,
    "sum first": lambda x: (1 + torch.tanh(K * (x + 0.044715 * x**3))) * (x * 0.5),
    "factored": lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    "factored squares": lambda x: 0.5 * x * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x.square()))),
    "half inside": lambda x: x * (0.5 + 0.5 * torch.tanh(K * (x + 0.044715 * x**3))),
    "constants": lambda x: x * 0.5 * (1 + torch.tanh(torch.sqrt(torch.tensor(2 / math.pi)) * (x + 0.044715 * x**3))),
    "sigmoid": lambda x: x * torch.sigmoid(2 * K * (x + 0.044715 * x**3)),
}
ERF = {
    "divided": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "multiplied": lambda x: x * 0.5 * (1.0 + torch.erf(x * math.sqrt(0.5))),
    "half first": lambda x: 0.5 * x * (torch.erf(x / math.sqrt(2.0)) + 1),
    "a share": lambda x: x * (0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))),
    "half inside": lambda x: x * (0.5 + torch.erf(x * 0.70710678) / 2),
    "divided by two": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
    "minus a minus": lambda x: x * 0.5 * (1 - torch.erf(-x / 2**0.5)),
    "erfc": lambda x: 0.5 * x * torch.erfc(-x * math.sqrt(0.5)),
    "ndtr": lambda x: x * torch.special.ndtr(x),
}
ONE_PLUS_EXP = {"plain": lambda x: 1 + torch.exp(-x), "turned": lambda x: torch.exp(-x) + 1.0}
# rule -> forms; the op is named as the rule is
FORMS = {
    activations.gelu_tanh: TANH,
    activations.gelu_erf: ERF,
    activations.sigmoid_formula: {
        "reciprocal": lambda x: torch.reciprocal(1 + torch.exp(-x)),
        "turned": lambda x: torch.reciprocal(torch.exp(-x) + 1.0),
    },
    activations.silu_formula: {
        "x first": lambda x: x * torch.sigmoid(x),
        "x last": lambda x: torch.sigmoid(x) * x,
        "quotient": lambda x: x / (1 + torch.exp(-x)),
    },
    activations.mish_formula: {
        "softplus": lambda x: x * torch.tanh(F.softplus(x)),
        "turned": lambda x: torch.tanh(F.softplus(x)) * x,
        "log": lambda x: x * torch.tanh(torch.log(1 + torch.exp(x))),
        "log1p": lambda x: x * torch.tanh(torch.log1p(torch.exp(x))),
    },
    activations.hardsigmoid_formula: {
        "relu6": lambda x: F.relu6(x + 3) / 6,
        "scaled": lambda x: F.relu6(x + 3.0) * (1 / 6),
        "clamp": lambda x: torch.clamp(x / 6 + 0.5, 0, 1),
        "clamp of a quotient": lambda x: torch.clamp((x + 3) / 6, 0.0, 1.0),
        "hardtanh": lambda x: F.hardtanh(x / 6 + 0.5, 0.0, 1.0),
    },
    activations.hardswish_formula: {
        "relu6": lambda x: x * F.relu6(x + 3) / 6,
        "hardtanh": lambda x: x * F.hardtanh(x + 3, 0, 6) / 6,
        "clamp": lambda x: x * (x + 3).clamp(0, 6) / 6,
        "relu and a limit": lambda x: x * torch.clamp(F.relu(x + 3), max=6) * (1 / 6),
        "clamp max": lambda x: x * aten.clamp_max.default(F.relu(x + 3), 6) / 6,
        "ramp": lambda x: x * torch.clamp(x / 6 + 0.5, 0, 1),
        "turned": lambda x: F.relu6(3 + x) * x / 6,
        "hardsigmoid": lambda x: x * F.hardsigmoid(x),
    },
}
CASES = [pytest.param(rule, form, id=f"{rule.name}, {form}") for rule, forms in FORMS.items() for form in forms]


def _op(rule):
    return rule.name.removesuffix("_formula").removesuffix("_erf").removesuffix("_tanh")


@pytest.mark.parametrize(("rule", "form"), CASES)
def test_a_formula_is_one_op(rule, form):
    """Through the whole pipeline: formulas are seen in the form that `canonicalize` gives them."""
    found = check(STANDARD, FORMS[rule][form], X, [_op(rule)])
    assert rule.name in found.done or _op(rule) == "hardswish"  # its ramp may be found first
    assert ("approximate='tanh'" in found.after.text) == (rule is activations.gelu_tanh)
    assert found.after.numerics == Numerics.ROUNDING


@pytest.mark.parametrize("rule", FORMS, ids=lambda rule: rule.name)
def test_as_captured_on_special_values_and_dtypes(rule):
    """Without `canonicalize`; NaN and inf are where the formula has them."""
    model = next(iter(FORMS[rule].values()))
    check_fires(rule, model, HARD, ops=[_op(rule)])
    for dtype in HALVES:
        check_fires(rule, model, X.to(dtype), ops=[_op(rule)])


@pytest.mark.parametrize("rule", FORMS, ids=lambda rule: rule.name)
@pytest.mark.parametrize("shape", [(), (0,), (1, 7), (2, 0, 3)], ids=str)
def test_shapes_do_not_matter(rule, shape):
    model = next(iter(FORMS[rule].values()))
    check_fires(rule, model, torch.randn(shape, generator=torch.Generator().manual_seed(0)), ops=[_op(rule)])


@pytest.mark.parametrize("rule", FORMS, ids=lambda rule: rule.name)
def test_integers_stay(rule):
    """The formula promotes them; few of the ops take them."""
    model = FORMS[rule].get("log", next(iter(FORMS[rule].values())))
    check_declines(rule, model, torch.tensor([1, 2, -3]))


@pytest.mark.parametrize("rule", FORMS, ids=lambda rule: rule.name)
def test_nothing_is_recomposed_at_level_one(rule):
    check_declines(rule, next(iter(FORMS[rule].values())), X, level=Numerics.EXACT)


@pytest.mark.parametrize("rule", FORMS, ids=lambda rule: rule.name)
def test_a_value_that_is_used_again_does_not_matter(rule):
    """As in a residual: it is what goes into the formula, not part of it."""
    formula = next(iter(FORMS[rule].values()))

    def model(x):
        y = x * 0.9
        return formula(y) + y

    check_fires(rule, model, X, ops=["mul.Tensor", _op(rule), "add.Tensor"])


# ---- near misses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("half", "one", "k", "c"),
    [(0.4, 1.0, K, 0.044715), (0.5, 2.0, K, 0.044715), (0.5, 1.0, 0.8, 0.044715), (0.5, 1.0, K, 0.0447)],
)
def test_other_constants_are_another_function(half, one, k, c):
    def model(x):
        return half * x * (one + torch.tanh(k * (x + c * x**3)))

    check_declines(activations.gelu_tanh, model, X, activations.OTHER_CONSTANTS)


@pytest.mark.parametrize(
    "inner",
    [
        lambda x: 0.8 * x + K * 0.044715 * x**3,
        lambda x: K * 0.044715 * x**3,
        lambda x: K * (x + 0.1 * x**2 + 0.044715 * x**3),
    ],
    ids=["slope", "no slope", "a square"],
)
def test_other_polynomials_are_another_function(inner):
    model = lambda x: 0.5 * x * (1 + torch.tanh(inner(x)))  # noqa: E731
    check_declines(activations.gelu_tanh, model, X, activations.OTHER_CONSTANTS)


@pytest.mark.parametrize("model", [lambda x: x * torch.sigmoid(x), ERF["divided"]], ids=["silu", "gelu with erf"])
def test_a_gate_without_a_cube_is_no_near_miss(model):
    assert check_declines(activations.gelu_tanh, model, X).declined == set()


@pytest.mark.parametrize(
    "model",
    [
        lambda x: 0.5 * x * (1 + torch.erf(K * (x + 0.044715 * x**3))),
        lambda x: 0.5 * x * (1 + torch.tanh(K * (x + 0.044715 * x**3 + x * x**3))),
    ],
    ids=["erf", "more than a cube"],
)
def test_another_gate_with_a_cube_is_no_near_miss(model):
    assert check_declines(activations.gelu_tanh, model, X).declined == set()


def test_a_sigmoid_of_the_other_sign_stays():
    check_declines(activations.sigmoid_formula, lambda x: torch.reciprocal(1 + torch.exp(x)), X)


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(0.5))),
        lambda x: x * 0.5 * (1.0 + torch.erf(x * math.sqrt(2.0))),
        lambda x: x * 0.5 * (1.0 + torch.erf(-x / math.sqrt(2.0))),
        lambda x: x * 0.5 * torch.erfc(x * math.sqrt(0.5)),
        lambda x: x * 0.5 * (1.0 + torch.erf(x * x * math.sqrt(0.5))),
        lambda x: x * torch.special.ndtr(2 * x),
    ],
)
def test_other_slopes_are_another_function(model):
    check_declines(activations.gelu_erf, model, X, activations.OTHER_CONSTANTS)


SIX, COMPLEX = torch.tensor(6.0), torch.tensor(1 + 1j)


def _cubic(x):
    return x + 0.044715 * x**3


NEAR = {
    "gelu of another value": lambda x: 0.5 * x * (1 + torch.tanh(K * (x + 0.044715 * x.abs() ** 3))),
    "gelu without the value": lambda x: 0.5 * (1 + torch.erf(x / 2**0.5)),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "tanh of the value": lambda x: 0.5 * x * (1 + torch.tanh(x)),
    "gate of another value": lambda x: x * torch.sigmoid(x.flip(0)),
    "twice": lambda x: 2 * x * torch.sigmoid(2 * x),
    "twice a quotient": lambda x: 2 * x / (1 + torch.exp(-x)),
    "other quotient": lambda x: x / (2 + torch.exp(-x)),
    "growing": lambda x: x / (1 + torch.exp(x)),
    "steep softplus": lambda x: x * torch.tanh(F.softplus(x, beta=2)),
    "early softplus": lambda x: x * torch.tanh(F.softplus(x, threshold=5)),
    "ramp of another slope": lambda x: torch.clamp(0.2 * x + 0.5, 0, 1),
    "ramp of another height": lambda x: x * F.relu6(x + 3) / 5,
    "ramp that ends early": lambda x: torch.clamp(x + 3, 0, 5) / 6,
    "ramp of another start": lambda x: x * F.relu6(x + 2) / 6,
    "ramp that starts below": lambda x: torch.clamp(x + 3, -1, 6) / 6,
    "ramp that is lifted": lambda x: (F.relu6(x + 3) + 1) / 6,
    "clamp without an end": lambda x: torch.clamp(x + 3, min=0) / 6,
    "ramp without an end": lambda x: x * F.relu(x + 3) / 6,
    "just a limit": lambda x: torch.clamp(x, 0, 1),
    "ramp of another value": lambda x: x * F.relu6(x.flip(0) + 2) / 6,
    "ramp of a power": lambda x: torch.clamp(torch.pow(x, 6) + 0.5, 0, 1),
    "ramp that is shifted twice": lambda x: F.relu6(torch.add(x, 3, alpha=2)) / 6,
    "ramp that falls": lambda x: F.relu6(aten.rsub.Scalar(x, 3, 2)) / 6,
    "ramp of a quotient": lambda x: torch.clamp(SIX / x + 0.5, 0, 1),
    "ramp over nothing": lambda x: torch.clamp(x / 0.0 + 0.5, 0, 1),
    "a complex number": lambda x: x.to(torch.complex64) * torch.sigmoid(x) * COMPLEX,
    "a complex number in the gate": lambda x: torch.reciprocal(SIX * 1j) * x,
    "a sum with a factor": lambda x: 0.5 * x * (1 + torch.tanh(K * torch.add(x, 0.044715 * x**3, alpha=2))),
    "a difference with a factor": lambda x: 0.5 * x * (1 + torch.tanh(aten.rsub.Scalar(K * _cubic(x), 0.0, -2))),
    "a quotient of polynomials": lambda x: 0.5 * x * (1 + torch.tanh(K * _cubic(x) / (1 + x))),
    "a polynomial over nothing": lambda x: 0.5 * x * (1 + torch.tanh(K * _cubic(x) / 0.0)),
    "a fourth power": lambda x: 0.5 * x * (1 + torch.tanh(K * (x + 0.044715 * x**4))),
    "a sign of another value": lambda x: 0.5 * x * (1 + torch.tanh(K * (0.044715 * x**3 + -x.abs()))),
    "a power of a large power": lambda x: 0.5 * x * (1 + torch.tanh(K * (x + 0.044715 * (x**2) ** 3))),
    "a cube and a truth": lambda x: 0.5 * x * (1 + torch.tanh(K * torch.add(_cubic(x), True))),
    "a ramp of integers": lambda x: torch.clamp((x + 12582915.0 - 12582912.0) / 6, 0, 1),
    "a ramp of integers, turned": lambda x: torch.clamp((12582912.0 - (12582909.0 - x)) / 6, 0, 1),
    "gelu of integers": lambda x: x * 0.5 * (1 + torch.erf((x + 12582912.0 - 12582912.0) / 2**0.5)),
    # Where these leave the range of floating point, the op does not.
    "log of softmax": lambda x: torch.log(torch.softmax(x, -1)),
    "softplus": lambda x: torch.log(1 + torch.exp(x)),
    "log of sigmoid": lambda x: torch.log(torch.sigmoid(x)),
    "softmax without a maximum": lambda x: torch.exp(x) / torch.exp(x).sum(-1, keepdim=True),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_stay(name):
    found = check(RulePass("recompose", activations.RULES), NEAR[name], X)
    assert not found.done & {
        rule.name for rule in (*FORMS, activations.softmax_formula, activations.log_softmax_formula)
    }


ROUNDED = {
    "gelu with tanh": (lambda x: 0.5 * x * (1 + torch.tanh(0.797885 * (x + 0.044715 * x**3))), "gelu"),
    "gelu": (lambda x: x * 0.5 * (1 + torch.erf(x * 0.70710678)), "gelu"),
    "hardsigmoid": (lambda x: torch.clamp(x * 0.1666667 + 0.5, 0, 1), "hardsigmoid"),
    "hardswish": (lambda x: x * F.relu6(x + 3) * 0.1666667, "hardswish"),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_constants_of_seven_digits_are_those_of_the_formula_up_to_float32(name):
    model, op = ROUNDED[name]
    recompose = RulePass("recompose", activations.RULES)
    check(recompose, model, X, [op])
    assert not check(recompose, model, X.double()).done


def test_a_tanh_that_is_returned_too_stays():
    def model(x):
        t = torch.tanh(K * (x + 0.044715 * x**3))
        return 0.5 * x * (1 + t), t

    check_declines(activations.gelu_tanh, model, X, USED_ELSEWHERE)


def test_a_sigmoid_that_is_returned_too_stays():
    def model(x):
        s = torch.sigmoid(x)
        return x * s, s

    check_declines(activations.silu_formula, model, X, USED_ELSEWHERE)


def test_a_cube_that_is_used_again_stays():
    def model(x):
        c = x**3
        return 0.5 * x * (1 + torch.tanh(K * (x + 0.044715 * c))) + c

    check_declines(activations.gelu_tanh, model, X, USED_ELSEWHERE)


def test_a_factor_that_broadcasts_is_no_gate():
    check_declines(activations.silu_formula, lambda x, y: x * torch.sigmoid(y), (X, X[:1]))


def test_a_constant_that_adds_axes_is_part_of_no_formula():
    one = torch.ones(1, 1, 1, 1, 1)
    check_declines(activations.gelu_erf, lambda x: x * 0.5 * (one + torch.erf(x / 2**0.5)), X)


def test_a_deep_chain_of_sums_is_no_formula():
    """Python's stack has an end."""

    def model(x):
        y = x
        for i in range(500):
            y = y + i * 1e-9
        return 0.5 * x * (1 + torch.erf(y))

    check_declines(activations.gelu_erf, model, X)


def test_a_long_chain_of_sums_is_read_in_reasonable_time():
    """x + x doubled thirty times is a polynomial of 2**30 terms for who reads each one."""

    def model(x):
        y = x
        for _ in range(30):
            y = y + y
        return 0.5 * x * (1 + torch.erf(y))

    check_declines(activations.gelu_erf, model, X * 1e-9, activations.OTHER_CONSTANTS)


def test_every_rule_has_an_equation_and_another_name():
    assert len({item.name for item in activations.RULES}) == len(activations.RULES)
    assert all("->" in item.doc for item in activations.RULES)
