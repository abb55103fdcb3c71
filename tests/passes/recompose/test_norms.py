"""User-written norms as layer_norm and rms_norm."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from tests.passes.helpers import RulePass, aten, check, check_declines, check_fires, find
from tests.passes.recompose.norm_forms import ARGS, LAYER, RMS, VECTOR, Affine, N, X, mean, rule_of, values
from tsopt.compiler.graph.program import Numerics
from tsopt.passes import STANDARD
from tsopt.passes.cse import CommonSubexpressions
from tsopt.passes.dce import DeadCode
from tsopt.passes.recompose import norms

NORMS = (RulePass("norms", norms.RULES),)


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


@pytest.mark.parametrize("correction", [0, 1, 2, 3.5, -1, None], ids=str)
def test_any_correction_of_the_variance_becomes_a_scale(correction):
    def model(x):
        return (x - mean(x)) / torch.sqrt(aten.var.correction(x, [-1], correction=correction, keepdim=True) + 0.1)

    check_fires(norms.layer_norm_formula, model, X)


@pytest.mark.parametrize("form", [LAYER["var"], RMS["power"]], ids=["layer", "rms"])
def test_a_norm_times_its_own_value_is_multiplied_by_it(form):
    """The value is a factor twice, and the norm takes one of them."""

    def model(x):
        y = x - mean(x) if form is LAYER["var"] else x
        below = x.var(-1, unbiased=False, keepdim=True) if form is LAYER["var"] else x.pow(2).mean(**ARGS)
        return y * y * torch.rsqrt(below + 1e-5)

    found = check((CommonSubexpressions(), *NORMS), model, X)
    assert found.ops[-1] == "mul.Tensor"
    assert rule_of(form).name in found.done


def test_a_scale_is_the_parameter_of_the_rms_norm():
    check(STANDARD, Affine(RMS["power"], "scale"), X, ["rms_norm"])


def test_a_shift_is_no_parameter_of_the_rms_norm():
    check(STANDARD, Affine(RMS["power"], "shift last"), X, ["rms_norm", "add.Tensor"])


DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@pytest.mark.parametrize(("name", "dtype"), list(itertools.product(["layer", "rms"], DTYPES)), ids=str)
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


def test_every_rule_has_an_equation():
    assert all("->" in item.doc for item in norms.RULES)
