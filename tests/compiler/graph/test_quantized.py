"""The form of quantized layers: what is recognized, what only looks like it, and the way back to float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tests.passes.quantize.models import OwnInput, OwnScores, OwnWeight
from tsopt.compiler.graph import quantized
from tsopt.compiler.graph.fake_quantized import simulated
from tsopt.compiler.graph.quantized import in_float, largest_weight, quantized_layer
from tsopt.compiler.graph.quantized_attention import with_float_scores
from tsopt.compiler.graph.serialize import read_program, write_program
from tsopt.compiler.graph.verify import verify_program
from tsopt.passes.lower_precision import in_precision

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


@pytest.fixture
def program(model):
    return in_precision(tsopt.capture(model, X), "int8")


def layers(program):
    return [layer for node in program.calls() if (layer := quantized_layer(program, node)) is not None]


def call(program, name):
    """The first call of an op of `quantized_decomposed`."""
    return next(node for node in program.calls() if f"quantized_decomposed.{name}" in str(node.target))


def test_a_stored_program_has_its_layers_still(program, tmp_path):
    write_program(program, tmp_path)
    found = read_program(tmp_path)
    assert len(layers(found)) == len(layers(program)) == 2
    assert torch.equal(found.module()(X)[0], program.module()(X)[0])


def _replace_argument(node, position, value):
    node.args = (*node.args[:position], value, *node.args[position + 1 :])


def _zero_points(program):
    name = layers(program)[0].zeros
    program.weights[name] = torch.ones_like(program.weights[name])


def _one_scale(program):
    name = layers(program)[0].scales
    program.weights[name] = program.weights[name][:1]


def _short_bias(program):
    layer = layers(program)[0]
    layer.bias.meta = {"val": layer.bias.meta["val"][:1]}


@pytest.mark.parametrize(
    "change",
    [
        lambda p: _replace_argument(call(p, "choose_qparams"), 3, 0.1),
        lambda p: _replace_argument(call(p, "quantize_per_tensor"), 4, 127),
        lambda p: _replace_argument(call(p, "quantize_per_tensor"), 1, call(p, "quantize_per_tensor").args[2]),
        lambda p: _replace_argument(call(p, "dequantize_per_tensor"), 1, call(p, "dequantize_per_tensor").args[2]),
        lambda p: _replace_argument(call(p, "dequantize_per_tensor"), 3, 1),
        lambda p: _replace_argument(call(p, "dequantize_per_channel"), 3, 1),
        lambda p: _replace_argument(call(p, "dequantize_per_channel"), 4, -128),
        lambda p: _replace_argument(call(p, "choose_qparams"), 0, layers(p)[1].x),
        _zero_points,
        _one_scale,
        _short_bias,
    ],
    ids=[
        "eps",
        "range",
        "scale",
        "other scale",
        "low",
        "axis",
        "weight range",
        "other value",
        "zeros",
        "scales",
        "bias",
    ],
)
def test_another_form_is_left_to_torch(program, change):
    """A kernel that takes the form for granted would compute something else, or read past the end of a tensor."""
    change(program)
    assert len(layers(program)) == 1


def test_another_form_is_simulated_as_it_says(program):
    _zero_points(program)
    found, wanted = (made.module()(X)[0] for made in (simulated(program), program))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_back_in_float_it_computes_with_the_rounded_weights(program, model):
    made = in_float(program)
    verify_program(made)
    assert not layers(made)
    assert not [node for node in made.calls() if "quantized" in str(node.target)]
    assert [str(made.weights[name].dtype) for name in made.used_weights()] == ["torch.float32"] * 4
    (answer,) = made.module()(X)
    assert 0 < (answer - model(X)).norm() < 0.01 * model(X).norm()
    assert len(layers(program)) == 2  # the one that was given


def test_a_program_without_such_layers_is_in_float_already(model):
    program = tsopt.capture(model, X)
    assert in_float(program) is program


@pytest.mark.parametrize(("vnni", "largest"), [(True, 127), (False, 64)])
def test_the_largest_weight_depends_on_the_instructions_of_the_processor(monkeypatch, vnni, largest):
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: vnni)
    assert largest_weight() == largest
    assert vnni or 2 * quantized.UNSIGNED[1] * largest < 2**15


def test_integers_are_dense_whatever_the_memory_order_of_the_weight():
    integers, scales = quantized.quantized_weight(torch.randn(8, 4).t(), 127)
    assert integers.is_contiguous()
    assert (integers.shape, scales.shape) == ((4, 8), (4,))


def symmetric(program):
    """The program with its first input quantized to signed integers."""
    layer = next(node for node in program.calls() if node.target is torch.ops.aten.linear.default)
    x = layer.args[0]
    rounded = quantized.quantize_value(program, x, quantized.QParams.symmetric(4.0))
    layer.replace_input_with(x, rounded)
    return rounded


def test_signed_integers_with_a_zero_point_are_another_form(model):
    program = tsopt.capture(model, X)
    rounded = symmetric(program)
    assert quantized.calibrated_input(rounded)[1].is_symmetric
    for node in (rounded, rounded.args[0]):
        _replace_argument(node, 2, 1)
    assert quantized.calibrated_input(rounded) is None


def test_a_layer_that_reads_signed_integers_is_another_form(program):
    assert len(layers(program)) == 2
    first = layers(program)[0].node
    signed = quantized.quantize_value(program, layers(program)[0].x, quantized.QParams.symmetric(4.0))
    first.replace_input_with(first.args[0], signed)
    assert len(layers(program)) == 1


@pytest.mark.parametrize(
    "model", [OwnWeight().eval(), OwnInput().eval(), OwnScores().eval()], ids=lambda m: type(m).__name__
)
def test_what_the_users_own_model_rounds_is_not_taken_for_ours(model):
    x = torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(0))
    program = tsopt.transform(tsopt.capture(model, x))
    assert any("quantized_decomposed" in str(node.target) for node in program.calls())
    assert not layers(program)
    assert not quantized.rounded_values(program)
    assert in_float(program) is quantized.without_rounded_values(program) is with_float_scores(program) is program


def test_int8_weights_that_the_model_quantized_itself_count_where_values_are_rounded():
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    of_input, of_weight = (tsopt.transform(tsopt.capture(m.eval(), x)) for m in (OwnInput(), OwnWeight()))
    assert (quantized.largest_magnitude(of_input), quantized.largest_magnitude(of_weight)) == (127, 0)


def test_the_instructions_of_the_cpu_do_not_matter_to_weights_elsewhere():
    program = tsopt.capture(OwnInput().eval(), torch.randn(3, 64, generator=torch.Generator().manual_seed(0)))
    program.weights.update({name: weight.to("meta") for name, weight in program.weights.items()})
    assert quantized.largest_magnitude(program) == 0


@pytest.mark.parametrize("end", [torch.finfo(torch.float32).max, float("inf")])
def test_no_integer_stands_for_an_infinity(end):
    for by in (
        quantized.QParams.of_range(-end, end),
        quantized.QParams.of_range(-end, 1.0),
        quantized.QParams.of_range(0.0, end),
        quantized.QParams.symmetric(end),
    ):
        low, high, _ = by.integers
        near = torch.fake_quantize_per_tensor_affine(torch.tensor([-3e38, 3e38]), by.scale, by.zero, low, high)
        assert near.isfinite().all()
        assert torch.tensor(by.range).isfinite().all()
