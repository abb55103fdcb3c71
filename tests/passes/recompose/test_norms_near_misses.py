"""What looks like a norm and is not one, and parameters that a norm cannot take."""

from __future__ import annotations

import pytest
import torch

from tests.passes.helpers import RulePass, aten, check, check_declines, check_fires
from tests.passes.recompose.norm_forms import ARGS, LAYER, RMS, VECTOR, Affine, N, X, mean, rule_of, values
from tsopt.compiler.rewriting.rewrite import USED_ELSEWHERE
from tsopt.passes import RECOMPOSE, STANDARD
from tsopt.passes.constants import OUT_OF_RANGE
from tsopt.passes.cse import CommonSubexpressions
from tsopt.passes.recompose import norms

NORMS = (RulePass("norms", norms.RULES),)


@pytest.mark.parametrize(
    "model",
    [
        lambda x: (x - mean(x)) / (x.std(**ARGS) + 1e-6),
        lambda x: (x - mean(x)) / (x.std(-1, unbiased=False, keepdim=True) + 1e-6),
        lambda x: (x - mean(x)) / (x.var(-1, unbiased=False, keepdim=True).sqrt() + 1e-6),
    ],
)
def test_eps_beside_the_deviation_is_another_function(model):
    check_declines(norms.layer_norm_formula, model, X, norms.EPS_OUTSIDE)


DOUBLE = torch.tensor([1e-5], dtype=torch.float64)
HIGHER = DOUBLE.float().view(1, 1, 1, 1)
NEAR = {
    "no eps": lambda x: (x - mean(x)) / x.std(**ARGS),
    "no eps below the root": lambda x: (x - mean(x)) / x.var(-1, unbiased=False, keepdim=True).sqrt(),
    "negative eps": lambda x: (x - mean(x)) / torch.sqrt(x.var(**ARGS) - 1e-5),
    "variance over other axes": lambda x: (x - mean(x)) / torch.sqrt(x.var(1, unbiased=False, keepdim=True) + 1e-5),
    "squares over other axes": lambda x: (x - mean(x)) / torch.sqrt((x - mean(x)).pow(2).mean(1, keepdim=True) + 1e-5),
    "centred on another axis": lambda x: (
        (x - x.mean(1, keepdim=True)) / torch.sqrt((x - x.mean(1, keepdim=True)).var(-1, False, True) + 1e-5)
    ),
    "variance of another value": lambda x: (x - mean(x)) / torch.sqrt((x - 1).abs().var(-1, False, True) + 1e-5),
    "scaled variance": lambda x: (x - mean(x)) / torch.sqrt(2 * x.var(-1, False, True) + 1e-5),
    "no root": lambda x: (x - mean(x)) / (x.var(-1, False, True) + 1e-5),
    "not centred": lambda x: x / torch.sqrt(x.var(-1, False, True) + 1e-5),
    "centred elsewhere": lambda x: (x - mean(x.flip(0))) / torch.sqrt(x.var(-1, False, True) + 1e-5),
    "another value centred": lambda x: (x.flip(0) - mean(x)) / torch.sqrt(x.var(-1, False, True) + 1e-5),
    "less than the mean": lambda x: (x - mean(x) * 2) / torch.sqrt(x.var(-1, False, True) + 1e-5),
    "centred over a mean of squares": lambda x: (x - mean(x)) / torch.sqrt((x**2).mean(**ARGS) + 1e-5),
    "mean with alpha": lambda x: torch.sub(x, mean(x), alpha=2) / torch.sqrt(x.var(-1, False, True) + 1e-5),
    "mean of cubes": lambda x: x * torch.rsqrt((x.abs() ** 3).mean(**ARGS) + 1e-6),
    "root of another value": lambda x: x * torch.rsqrt((x.flip(0) ** 2).mean(**ARGS) + 1e-6),
    "eps in float64": lambda x: (x - mean(x)) / torch.sqrt(x.var(-1, False, True) + DOUBLE),
    "eps with more axes": lambda x: (x - mean(x)) / torch.sqrt(x.var(-1, False, True) + HIGHER),
    "mean of fourth powers": lambda x: x * torch.rsqrt((x**4).mean(**ARGS) + 1e-6),
    "mean of products": lambda x: x * torch.rsqrt((x * (x + 9)).mean(**ARGS) + 99),
    "sum of squares and a number": lambda x: x * torch.rsqrt(((x**2).sum(**ARGS) + 5) / N + 1e-6),
    "sum over another number": lambda x: x * torch.rsqrt((x**2).sum(**ARGS) / 8 + 1e-6),
    "scaled mean of squares": lambda x: x * torch.rsqrt(2 * (x**2).mean(**ARGS) + 1e-6),
    "norm": lambda x: x / torch.clamp(x.norm(dim=-1, keepdim=True), min=1e-12),
    "squares of another value": lambda x: (x - mean(x)) / ((x.flip(0) ** 2).mean(**ARGS) - mean(x) ** 2 + 99).sqrt(),
    "squares of other axes": lambda x: (x - mean(x)) / ((x**2).mean(1, keepdim=True) - mean(x) ** 2 + 99).sqrt(),
    "squares that are no mean": lambda x: (x - mean(x)) / (x**2 - mean(x) ** 2 + 999).sqrt(),
    "no square of a mean": lambda x: (x - mean(x)) / ((x**2).mean(**ARGS) - x + 99).sqrt(),
    "difference of other means": lambda x: (x - mean(x)) / ((x**2).mean(**ARGS) - mean(x.abs()) ** 2 + 9).sqrt(),
    "mean less a square": lambda x: (x - mean(x)) / ((x**2).mean(**ARGS) - x**2 + 99).sqrt(),
    "means over two axes": lambda x: (
        (x - x.mean(1, keepdim=True)) / ((x**2).mean(**ARGS) - x.mean(1, keepdim=True) ** 2 + 99).sqrt()
    ),
    "a difference with alpha": lambda x: (
        (x - mean(x)) / (torch.sub((x**2).mean(**ARGS), mean(x) ** 2, alpha=0.5) + 1e-5).sqrt()
    ),
    "mean of rounded squares": lambda x: x * torch.rsqrt(x.bfloat16().float().pow(2).mean(**ARGS) + 1e-6),
    "mean that is rounded": lambda x: x * torch.rsqrt((x**2).mean(**ARGS) + 12582912.0 - 12582912.0 + 1e-6),
    "another value over the deviation": lambda x: (x.flip(0) - mean(x)) / torch.sqrt(x.var(-1, False, True) + 1e-5),
    "centred over mean of squares": lambda x: (x - mean(x)) * torch.rsqrt((x**2).mean(**ARGS) + 1e-6),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_stay(name):
    found = check((CommonSubexpressions(), *NORMS), NEAR[name], X)
    assert not found.done & {rule.name for rule in norms.RULES}


@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.parametrize("correction", [N, N + 1])
def test_a_variance_that_divides_by_no_value_is_none(correction):
    model = lambda x: (x - mean(x)) / (x.var(-1, correction=correction, keepdim=True) + 1e-5).sqrt()  # noqa: E731
    check_declines(norms.layer_norm_formula, model, X)


def test_a_sum_over_nearly_its_count_is_not_a_mean():
    model = lambda x: x * torch.rsqrt((x**2).sum(**ARGS) / (N + 1e-6) + 1e-6)  # noqa: E731
    check_declines(norms.rms_norm_formula, model, X.double())


def test_the_sum_of_nothing_is_no_mean():
    """A division by how many there are would end the pass."""
    model = lambda x: x * torch.rsqrt((x**2).sum(**ARGS) / N + 1e-6)  # noqa: E731
    check_declines(norms.rms_norm_formula, model, torch.ones(2, 0))


def test_another_constant_than_a_vector_of_features_stays_beside_the_norm():
    for constant in (values(3, 1), values(2, 3, N), values(1), values(1, 1, 1, 1, N)):
        found = check(NORMS, lambda x, c=constant: LAYER["var"](x) * c + c, X)
        assert found.ops == ["layer_norm", "mul.Tensor", "add.Tensor"]


def test_a_scale_and_shift_with_leading_ones_are_the_same_memory():
    model = Affine(LAYER["var"], "scale, shift", (1, 1, N))
    found = check(NORMS, model, X, ["layer_norm"])
    memory = {weight.data_ptr() for weight in found.after.weights.values()}
    assert memory == {model.g.data_ptr(), model.b.data_ptr()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32], ids=str)
def test_a_scale_or_shift_of_another_dtype_stays(dtype):
    vector = (9 * VECTOR).to(dtype)
    for model in (lambda x: LAYER["var"](x) * vector, lambda x: LAYER["var"](x) + vector):
        found = check(NORMS, model, X)
        assert found.ops[0] == "layer_norm"
        assert len(found.ops) == 2
        assert "rejects its arguments" not in str(found.declined)


def test_a_scale_after_a_shift_stays():
    check_declines(norms.norm_scale, lambda x, b=VECTOR: aten.layer_norm.default(x, [N], None, b) * b, X)


def test_a_scale_after_a_computed_one_stays():
    model = lambda x, w: aten.layer_norm.default(x, [N], w) * VECTOR  # noqa: E731
    check_declines(norms.norm_scale, model, (X, values(N)))


def test_a_scale_meets_one_of_float32_in_a_norm_of_halves():
    w, k = values(N, seed=1), values(N, seed=2).bfloat16()
    model = lambda x: aten.layer_norm.default(x, [N], w, None) * k  # noqa: E731
    check_fires(norms.norm_scale, model, X.bfloat16(), ops=["layer_norm"])


def test_a_value_over_its_deviation_is_no_near_miss():
    """It is not centred, so it is no layer_norm wherever eps is."""
    found = check_declines(norms.layer_norm_formula, lambda x: x / (x.std(**ARGS) + 1e-6), X)
    assert found.declined == set()


@pytest.mark.parametrize("rule", [norms.layer_norm_formula, norms.rms_norm_formula], ids=["layer", "rms"])
def test_products_of_integers_are_no_norms(rule):
    found = check_declines(rule, lambda x: x * x.flip(0), torch.arange(6))
    assert found.declined == set()


@pytest.mark.parametrize(
    "model",
    [
        lambda x, i, j: (i * j) * (x - mean(x)) / torch.sqrt(x.var(-1, False, True) + 1e-5),
        lambda x, i, j: (i * j) * x / torch.sqrt((x**2).mean(**ARGS) + 1e-6),
    ],
    ids=["layer", "rms"],
)
def test_integers_that_wrap_before_they_meet_a_norm_stay_together(model):
    """100 * 2 is -56 in int8."""
    counts, twos = torch.full((N,), 100, dtype=torch.int8), torch.full((N,), 2, dtype=torch.int8)
    check(NORMS, model, (X, counts, twos))


def test_a_second_shift_stays():
    check_declines(norms.norm_shift, lambda x, b=VECTOR: aten.layer_norm.default(x, [N], None, b) + b, X)


def test_whole_numbers_that_are_multiplied_first_stay():
    """A product of bytes has no number above 255."""
    bytes_ = torch.full((N,), 100, dtype=torch.uint8)

    def model(x, a, b):
        return x * (a * b) * torch.rsqrt(x.pow(2).mean(**ARGS) + 1e-6)

    check_declines(norms.rms_norm_formula, model, (X, bytes_, bytes_))


def test_a_second_scale_is_part_of_the_first():
    scale = values(N, seed=1)
    check_fires(norms.norm_scale, lambda x: aten.layer_norm.default(x, [N], scale) * VECTOR, X, ops=["layer_norm"])


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_a_second_scale_that_leaves_the_range_of_float16_with_the_first_stays(scale):
    k = torch.full((N,), scale).half()
    model = lambda x: aten.layer_norm.default(x, [N], k) * k  # noqa: E731
    check_declines(norms.norm_scale, model, X.half(), OUT_OF_RANGE)


def test_a_second_scale_beside_a_computed_one_stays():
    check_declines(norms.norm_scale, lambda x, k: aten.layer_norm.default(x, [N], k) * VECTOR, (X, values(N)))
    check_declines(norms.norm_scale, lambda x, k: aten.layer_norm.default(x, [N], VECTOR) * k, (X, values(N)))


def test_a_second_scale_may_be_of_another_dtype():
    """A norm of halves may have a scale in float32, and keeps it."""

    scale = values(N, seed=1).bfloat16()

    def model(x):
        return aten.layer_norm.default(x, [N], VECTOR) * scale

    found = check_fires(norms.norm_scale, model, X.bfloat16(), ops=["layer_norm"])
    assert [found.after.weights[name].dtype for name in found.after.used_weights()] == [torch.float32]


@pytest.mark.parametrize("rule", [norms.norm_scale, norms.norm_shift], ids=["scale", "shift"])
def test_a_constant_that_adds_axes_is_no_parameter(rule):
    k = values(1, 1, 1, 1, N)

    def model(x):
        y = aten.layer_norm.default(x, [N])
        return y * k if rule is norms.norm_scale else y + k

    check_declines(rule, model, X)


@pytest.mark.parametrize("name", ["layer", "rms"])
def test_an_eps_that_adds_axes_stays(name):
    eps = torch.full((1, 1, 1, 1), 1e-5)

    def model(x):
        x = x if name == "rms" else x - mean(x)
        return x * torch.rsqrt(x.square().mean(**ARGS) + eps)

    check_declines(norms.rms_norm_formula if name == "rms" else norms.layer_norm_formula, model, X)


def test_a_computed_scale_and_shift_stay():
    check_declines(norms.norm_scale, lambda x, k: aten.layer_norm.default(x, [N]) * k, (X, values(N)))
    check_declines(norms.norm_shift, lambda x, k: aten.layer_norm.default(x, [N]) + k, (X, values(N)))


@pytest.mark.parametrize("rule", [norms.norm_scale, norms.norm_shift], ids=["scale", "shift"])
def test_a_norm_that_is_used_elsewhere_keeps_its_parameters(rule):
    def model(x, k=VECTOR):
        y = aten.layer_norm.default(x, [N])
        return (y * k if rule is norms.norm_scale else y + k), y

    check_declines(rule, model, X, USED_ELSEWHERE)


@pytest.mark.parametrize("form", [LAYER["power"], RMS["power"]], ids=["layer", "rms"])
def test_a_norm_of_complex_numbers_stays(form):
    """Few backends have a kernel for it."""
    assert not check_declines(rule_of(form), form, torch.complex(X, X)).declined


def test_a_value_over_its_deviation_is_no_near_miss_of_a_norm():
    assert not check_declines(norms.layer_norm_formula, lambda x: x / (x.std(**ARGS) + 1e-6), X).declined


@pytest.mark.parametrize("form", [LAYER["power"], RMS["power"]], ids=["layer", "rms"])
def test_a_statistic_that_is_returned_too_stays(form):
    def model(x):
        s = (x - mean(x) if form is LAYER["power"] else x).pow(2).mean(**ARGS)
        d = x - mean(x) if form is LAYER["power"] else x
        return d / torch.sqrt(s + 1e-5), s

    found = check((CommonSubexpressions(), RulePass("norms", norms.RULES)), model, X)
    assert found.done & {rule.name for rule in norms.RULES} == set()
    assert (rule_of(form).name, USED_ELSEWHERE) in found.declined


def test_the_mean_of_squares_of_a_centred_value_is_no_rms_norm():
    found = check(RECOMPOSE, LAYER["power"], X)
    assert found.ops[-1] == "layer_norm"


HALF = [
    RMS["power"],
    RMS["quotient"],
    *(LAYER[key] for key in ("power", "mean of squares", "var", "unbiased", "var_mean")),
]


@pytest.mark.parametrize("form", HALF)
def test_squares_and_variances_in_float16_stay(form):
    """From 256 on they are inf, and the formula answers 0; the op, which computes in float32, does not."""
    large = 300 * X.half().sign()
    found = check((CommonSubexpressions(), *NORMS), form, X.half(), also=[large])
    assert not found.done & {rule.name for rule in norms.RULES}
    assert (rule_of(form).name, norms.HALF_SQUARES) in found.declined


def test_a_variance_in_float32_that_becomes_float16_stays():
    def model(x):
        return (x - mean(x)) * torch.rsqrt(x.float().var(**ARGS).half() + 1e-5)

    found = check((CommonSubexpressions(), *NORMS), model, X.half(), also=[300 * X.half().sign()])
    assert "layer_norm_formula" not in found.done


def layer_in_float32(x):
    h = x.float()
    return ((h - mean(h)) * torch.rsqrt(h.var(unbiased=False, **ARGS) + 1e-5)).to(x.dtype)


def rms_in_float32(x):
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(**ARGS) + 1e-6)).to(x.dtype)


@pytest.mark.parametrize(("model", "op"), [(layer_in_float32, "layer_norm"), (rms_in_float32, "rms_norm")])
def test_squares_in_float32_of_a_value_in_float16_are_those_of_the_op(model, op):
    large = 300 * X.half().sign()
    check(STANDARD, model, X.half(), [op], also=[large])
