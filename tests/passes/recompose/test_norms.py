"""User-written norms as layer_norm and rms_norm."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.passes.helpers import RulePass, aten, call, check, check_declines, check_fires, find
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.rewriting.rewrite import USED_ELSEWHERE
from tsopt.passes import RECOMPOSE, STANDARD
from tsopt.passes.cse import CommonSubexpressions
from tsopt.passes.dce import DeadCode
from tsopt.passes.recompose import norms

N = 7
NORMS = (RulePass("norms", norms.RULES),)
ARGS = dict(dim=-1, keepdim=True)


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + 1


X, VECTOR = values(2, 3, N), values(N)


def mean(x):
    return x.mean(**ARGS)


LAYER = {
    "power": lambda x: (x - mean(x)) / torch.sqrt((x - mean(x)).pow(2).mean(**ARGS) + 1e-5),
    "square": lambda x: (x - mean(x)) / torch.sqrt((x - mean(x)).square().mean(**ARGS) + 1e-5),
    "product": lambda x: (x - mean(x)) * torch.rsqrt(((x - mean(x)) * (x - mean(x))).mean(**ARGS) + 1e-5),
    "root as a power": lambda x: (x - mean(x)) / (((x - mean(x)) ** 2).mean(**ARGS) + 1e-5) ** 0.5,
    "inverse root as a power": lambda x: (x - mean(x)) * (x.var(-1, False, True) + 1e-5) ** -0.5,
    "var": lambda x: (x - mean(x)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5),
    "correction": lambda x: (x - mean(x)) / torch.sqrt(x.var(-1, correction=0, keepdim=True) + 1e-5),
    "var of the centred": lambda x: (x - mean(x)) / ((x - mean(x)).var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt(),
    "unbiased": lambda x: (x - mean(x)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-2),
    "mean of squares": lambda x: (x - mean(x)) / torch.sqrt((x**2).mean(**ARGS) - mean(x) ** 2 + 1e-5),
    "reciprocal": lambda x: (x - mean(x)) * (1 / torch.sqrt((x - mean(x)).pow(2).mean(**ARGS) + 1e-5)),
    "axis given back": lambda x: (
        (x - x.mean(-1).unsqueeze(-1)) / torch.sqrt(((x - x.mean(-1).unsqueeze(-1)) ** 2).mean(-1).unsqueeze(-1) + 1e-5)
    ),
    "sum": lambda x: (x - x.sum(**ARGS) / N) / torch.sqrt(((x - x.sum(**ARGS) / N) ** 2).sum(**ARGS) * (1 / N) + 1e-5),
    "eps first": lambda x: (x - mean(x)) / torch.sqrt(1e-5 + (x - mean(x)).pow(2).mean(**ARGS)),
}


def _var_mean(x):
    var, m = torch.var_mean(x, -1, correction=0, keepdim=True)
    return (x - m) / torch.sqrt(var + 1e-5)


LAYER["var_mean"] = _var_mean
RMS = {
    "power": lambda x: x * torch.rsqrt(x.pow(2).mean(**ARGS) + 1e-6),
    "product": lambda x: x * torch.rsqrt((x * x).mean(**ARGS) + 1e-6),
    "quotient": lambda x: x / torch.sqrt(x.pow(2).mean(**ARGS) + 1e-6),
    "sum": lambda x: x / ((x**2).sum(**ARGS) / N + 1e-6).sqrt(),
}


class Affine(nn.Module):
    """A norm with a scale and a shift, in one of the orders that people write."""

    def __init__(self, form, order, shape=(N,)):
        super().__init__()
        self.form, self.order = form, order
        self.g, self.b = nn.Parameter(values(*shape, seed=1)), nn.Parameter(values(*shape, seed=2))

    def forward(self, x):
        if self.order == "before the root":
            return self.g * (x - mean(x)) / torch.sqrt((x - mean(x)).pow(2).mean(**ARGS) + 1e-5) + self.b
        y = self.form(x)
        forms = {
            "scale": lambda: self.g * y,
            "shift": lambda: y + self.b,
            "scale, shift": lambda: y * self.g + self.b,
            "shift last": lambda: self.b + self.g * y,
        }
        return forms[self.order]()


def rule_of(form):
    return norms.rms_norm_formula if form in RMS.values() else norms.layer_norm_formula


@pytest.mark.parametrize("form", LAYER)
def test_a_layer_norm_is_one_op(form):
    found = check(STANDARD, LAYER[form], X, ["layer_norm"])
    assert found.after.numerics == Numerics.ROUNDING


@pytest.mark.parametrize("form", RMS)
def test_an_rms_norm_is_one_op(form):
    check(STANDARD, RMS[form], X, ["rms_norm"])


@pytest.mark.parametrize("axes", [None, [], (0, 1, 2)], ids=str)
def test_a_norm_over_all_axes(axes):
    def model(x):
        centred = x - aten.mean.dim(x, axes, True)
        return centred / torch.sqrt(aten.mean.dim(centred**2, axes, True) + 1e-5)

    check(STANDARD, model, X, ["layer_norm"])


@pytest.mark.parametrize("order", ["scale", "shift", "scale, shift", "shift last", "before the root"])
def test_scale_and_shift_are_parameters_of_the_layer_norm(order):
    check(STANDARD, Affine(LAYER["power"], order), X, ["layer_norm"])


def test_the_unbiased_variance_becomes_a_scale():
    """var * (n - 1) / n is the biased one, so eps and the result are scaled; the scale meets the user's own."""
    found = check(STANDARD, Affine(LAYER["unbiased"], "scale, shift"), X, ["layer_norm"])
    assert len(found.after.used_weights()) == 2


def test_a_scale_is_the_parameter_of_the_rms_norm():
    check(STANDARD, Affine(RMS["power"], "scale"), X, ["rms_norm"])


def test_a_shift_is_no_parameter_of_the_rms_norm():
    check(STANDARD, Affine(RMS["power"], "shift last"), X, ["rms_norm", "add.Tensor"])


@pytest.mark.parametrize("name", ["layer", "rms"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_as_captured_in_every_dtype(name, dtype):
    """NaN and inf spread over their row in both, where the first formula says so."""
    form = LAYER["var"] if name == "layer" else RMS["power"]
    hard = X.clone()
    hard[0, 1, 2], hard[1, 1] = float("nan"), 0.0
    check_fires(rule_of(form), form, X.to(dtype), ops=[f"{name}_norm"], also=[hard.to(dtype), X.to(dtype) * 0.01])


@pytest.mark.parametrize("form", [LAYER["product"], RMS["power"]], ids=["layer", "rms"])
@pytest.mark.parametrize("shape", [(N,), (0, N), (2, 1, 3), (1, 2)], ids=str)
def test_shapes_do_not_matter(form, shape):
    rule = rule_of(form)
    check(
        (CommonSubexpressions(), RulePass(rule.name, (rule,))),
        form,
        values(*shape),
        [rule.name.removesuffix("_formula")],
    )


@pytest.mark.parametrize("shape", [(), (2, 0), (3, 1)], ids=str)
def test_nothing_to_take_a_mean_of_stays(shape):
    check_declines(norms.layer_norm_formula, LAYER["power"], values(*shape))


# ---- axes and layouts -------------------------------------------------------------------------------------


def over(axes):
    def model(x):
        m = x.mean(axes, keepdim=True)
        return (x - m) / torch.sqrt((x - m).pow(2).mean(axes, keepdim=True) + 1e-5)

    return model


@pytest.mark.parametrize(
    ("axes", "ops"),
    [
        ((-2, -1), ["layer_norm"]),
        ((2, 3, 1), ["layer_norm"]),
        (1, ["permute", "layer_norm", "permute", "clone"]),
        ((0, 2, 3), ["permute", "layer_norm", "permute", "clone"]),
    ],
)
def test_axes_are_brought_to_the_end(axes, ops):
    check(NORMS, over(axes), values(2, 3, 4, 5), ops)


@pytest.mark.parametrize("axes", [-1, 1])
def test_the_layout_of_a_permuted_value_is_kept(axes):
    def model(x):
        return over(axes)(x.transpose(1, 2) * 1.5)

    check(NORMS, model, values(2, 3, N))


class ChannelsFirst(nn.Module):
    """The norm of ConvNeXt, over the channels of an image, and the linear layer after it."""

    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, N, 3), nn.Linear(N, 4)
        self.w, self.b = nn.Parameter(values(N, seed=1)), nn.Parameter(values(N, seed=2))

    def forward(self, x):
        x = over(1)(self.conv(x))
        x = self.w[:, None, None] * x + self.b[:, None, None]
        return self.linear(x.permute(0, 2, 3, 1))


def test_a_norm_over_channels_takes_scale_and_shift_through_the_permutes():
    found = check(STANDARD, ChannelsFirst(), values(2, 3, 5, 5))
    assert found.ops == ["conv2d", "permute", "layer_norm", "linear"]


def test_a_scale_that_is_not_over_the_channels_stays():
    scale = values(5, seed=1)

    def model(x):
        return over(1)(x) * scale

    found = check(NORMS, model, values(2, N, 4, 5))
    assert found.ops[-1] == "mul.Tensor"


def test_a_scale_with_more_axes_than_the_permuted_norm_stays():
    scale = values(1, 1, N, 1, 1)
    found = check(NORMS, lambda x: over(1)(x) * scale, values(2, N, 4, 5))
    assert found.ops[-1] == "mul.Tensor"


# ---- casts ------------------------------------------------------------------------------------------------


class Root(nn.Module):
    """RMSNorm as in the models that made it known."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.w = kind, nn.Parameter(values(N, seed=1))

    def forward(self, x):
        if self.kind == "t5":
            return self.w * (x * torch.rsqrt(x.float().pow(2).mean(**ARGS) + 1e-6)).to(x.dtype)
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(**ARGS) + 1e-6)
        return (h * (1 + self.w.float())).type_as(x) if self.kind == "gemma" else self.w * h.to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_the_casts_of_an_rms_norm_go(kind, dtype):
    """The op computes halves in float32 too, and rounds once where the formula rounds twice."""
    check(STANDARD, Root(kind).to(dtype), X.to(dtype), ["rms_norm"])


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_the_casts_of_a_norm_inside_a_residual_go(kind):
    norm, layer = Root(kind).bfloat16(), nn.Linear(N, N).bfloat16()

    def model(x):
        x = layer(x)
        return x + norm(x)

    check(STANDARD, model, X.bfloat16(), ["linear", "rms_norm", "add.Tensor"])


def test_the_casts_around_a_scale_in_float32_stay():
    found = check(STANDARD, Root("gemma").bfloat16(), X.bfloat16(), ["to.dtype", "rms_norm", "to.dtype"])
    assert find(found.after, "rms_norm").meta["val"].dtype == torch.float32


def test_the_casts_around_a_layer_norm_go():
    def model(x):
        return torch.nn.functional.layer_norm(x.float(), (N,)).to(x.dtype)

    rule = norms.norm_in_half
    found = check((DeadCode(), RulePass(rule.name, (rule,))), model, X.bfloat16(), ["layer_norm"])
    assert rule.name in found.done


@pytest.mark.parametrize(
    ("x", "to"),
    [(X.double(), torch.float64), (X, torch.float16), (X.half(), torch.float32), (X.half(), torch.bfloat16)],
)
def test_other_casts_around_a_norm_stay(x, to):
    """A float64 value loses digits in float32, on purpose or not."""
    passes = (DeadCode(), RulePass("norms", (norms.norm_in_half,)))
    found = check(passes, lambda x: aten.layer_norm.default(x.float(), [N]).to(to) + 0, x)
    assert "norm_in_half" not in found.done
    assert not found.declined


@pytest.mark.parametrize(
    ("x", "between"), [(X.half(), torch.bfloat16), (X.half(), torch.float64), (X.bfloat16(), torch.float64)]
)
def test_a_norm_between_other_casts_stays(x, between):
    """bfloat16 drops digits that the norm of float16 would have."""
    passes = (DeadCode(), RulePass("norms", (norms.norm_in_half,)))
    found = check(passes, lambda x: aten.layer_norm.default(x.to(between), [N]).to(x.dtype), x)
    assert "norm_in_half" not in found.done


def test_a_scale_of_another_dtype_is_no_parameter():
    """bfloat16 times float32 is float32, which a norm of bfloat16 does not return."""
    found = check(NORMS, lambda x: (RMS["power"](x) * VECTOR).bfloat16(), X.bfloat16())
    assert found.ops[:2] == ["rms_norm", "mul.Tensor"]


# ---- near misses ------------------------------------------------------------------------------------------


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
    "another value over the deviation": lambda x: (x.flip(0) - mean(x)) / torch.sqrt(x.var(-1, False, True) + 1e-5),
    "centred over mean of squares": lambda x: (x - mean(x)) * torch.rsqrt((x**2).mean(**ARGS) + 1e-6),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_stay(name):
    found = check((CommonSubexpressions(), *NORMS), NEAR[name], X)
    assert not found.done & {rule.name for rule in norms.RULES}


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


def test_an_rms_norm_of_a_value_that_is_near_the_limit_of_float16():
    """The formula overflows and answers 0; the op, which computes in float32, does not."""
    program = check(STANDARD, RMS["power"], X.half(), ["rms_norm"]).after
    assert torch.allclose(call(program, torch.full((2, 3, N), 1000.0).half()), torch.ones(1).half())


def test_every_rule_has_an_equation():
    assert all("->" in item.doc for item in norms.RULES)
