"""Int8 and int4 weights with inputs that engines round in groups: which layers, and what is lost."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsopt
from tests.compiler.helpers import Net
from tests.passes.quantize.models import Residual, images, mlp, relative_error, seeded, with_outliers
from tsopt.compiler.graph.fake_quantized import simulated
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.graph.quantized import group_of, in_float, largest_magnitude, quantized_layers
from tsopt.compiler.graph.verify import verify_program
from tsopt.compiler.rewriting.pass_base import Limits
from tsopt.compiler.rewriting.pipeline import run
from tsopt.errors import NoGain
from tsopt.passes.lower_precision import in_precision
from tsopt.passes.quantize.layers import layers_of
from tsopt.passes.quantize.weights import Int4Weights, Int8Weights, share_of_linear
from tsopt.runtime.backends.backend import compile as compile_by

W = torch.randn(32, 32, generator=seeded(1)) / 6
both = pytest.mark.parametrize("kind", [Int8Weights, Int4Weights])


def quantized(model, x, kind=Int8Weights):
    program = tsopt.transform(tsopt.capture(model if isinstance(model, nn.Module) else Net(model), x))
    made, _ = run(program, (kind(),), Limits(Numerics.LOSSY))
    verify_program(made)
    return made


def test_linear_layers_get_int8_weights_and_keep_float_inputs():
    x = torch.randn(3, 16, generator=seeded(0))
    made = quantized(mlp(16, 32, 8), x)
    found = list(quantized_layers(made))
    assert [made.weights[layer.weight].shape for layer in found] == [(32, 16), (8, 32)]
    assert all(layer.has_float_input and layer.by is None for layer in found)
    assert group_of(made) == 128
    assert largest_magnitude(made) == 127
    assert made.numerics == Numerics.LOSSY
    with torch.no_grad():
        assert 0 < relative_error(made.module()(x)[0], mlp(16, 32, 8)(x)) < 0.01


@both
def test_convolutions_stay_as_they_are(kind):
    made = quantized(Residual().eval(), images(1)[0], kind)
    assert [str(layer.node.target) for layer in quantized_layers(made)] == ["aten.linear.default"]


def test_only_the_named_layers():
    x = torch.randn(3, 16, generator=seeded(0))
    program = tsopt.transform(tsopt.capture(mlp(16, 32, 8), x))
    last = layers_of(program)[-1].name
    made, _ = run(program, (Int8Weights(only=frozenset({last})),), Limits(Numerics.LOSSY))
    assert [layer.node.name for layer in quantized_layers(made)] == [last]


@both
def test_each_layer_takes_fuel(kind):
    program = tsopt.transform(tsopt.capture(mlp(32, 64, 8), torch.randn(3, 32, generator=seeded(0))))
    made, (record,) = run(program, (kind(),), Limits(Numerics.LOSSY, fuel=1))
    assert len(record.done) == len(list(quantized_layers(made))) == 1


@both
def test_a_weight_of_two_layers_is_stored_once(kind):
    made = quantized(lambda self, x: F.linear(F.linear(x, W).relu(), W), torch.ones(2, 32), kind)
    assert len({layer.weight for layer in quantized_layers(made)}) == 1
    assert len(list(quantized_layers(made))) == 2


@both
def test_the_weights_can_be_brought_back(kind):
    x = torch.randn(3, 32, generator=seeded(0))
    made = quantized(mlp(32, 64, 8), x, kind)
    back = in_float(made)
    assert not list(quantized_layers(back))
    with torch.no_grad():
        assert torch.equal(back.module()(x)[0], made.module()(x)[0])


@both
def test_other_passes_leave_them_alone(kind):
    made = quantized(mlp(32, 64, 8), torch.randn(3, 32, generator=seeded(0)), kind)
    assert len(list(quantized_layers(tsopt.transform(made)))) == 2


@pytest.mark.parametrize(("name", "group"), [("int8-weights", 128), ("int4", 32)])
def test_the_precision_has_a_name(name, group):
    program = tsopt.capture(mlp(32, 8), torch.ones(1, 32))
    assert group_of(in_precision(program, name)) == group
    with pytest.raises(NoGain, match="no float32 linear layer or convolution"):
        in_precision(tsopt.capture(nn.ReLU(), torch.ones(2)), name)


@pytest.mark.sliced(3)
@pytest.mark.parametrize(
    ("size", "lead", "bias"),
    [
        (4, (1,), True),
        (100, (5,), False),
        (128, (2, 3), True),
        (130, (1,), False),
        (256, (5,), True),
        (1000, (2, 3), False),
    ],
)
def test_the_simulation_rounds_as_onnx_runtime_does(size, lead, bias):
    torch.manual_seed(0)
    model, x = nn.Linear(size, 24, bias=bias).eval(), with_outliers(size, *lead)
    made = quantized(model, x)
    with torch.no_grad():
        wanted, found, exact = simulated(made).module()(x)[0], compile_by(made, "onnxruntime")(x), model(x)
    assert relative_error(found, wanted) < 0.05 * relative_error(found, exact)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_an_outlier_in_one_row_costs_the_others_nothing(engine):
    torch.manual_seed(0)
    model, x = nn.Linear(256, 64).eval(), torch.randn(8, 256, generator=seeded(0))
    x[0] *= 1e4
    made = quantized(model, x)
    with torch.no_grad():
        found, wanted = compile_by(made, engine)(x), model(x)
    assert relative_error(found[1:], wanted[1:]) < 0.02
    assert relative_error(found[:1], wanted[:1]) < 0.02


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_engines_compute_what_the_simulation_says_of_a_model(engine):
    model, x = mlp(256, 512, 64), torch.randn(4, 7, 256, generator=seeded(0))
    made = quantized(model, x)
    with torch.no_grad():
        found, wanted, exact = compile_by(made, engine)(x), simulated(made).module()(x)[0], model(x)
    assert relative_error(found, exact) < 1.3 * relative_error(wanted, exact)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_a_row_of_zeros_and_one_of_the_smallest_numbers(engine):
    torch.manual_seed(0)
    model, x = nn.Linear(256, 64).eval(), torch.zeros(2, 256)
    x[1] = 1e-40
    made = quantized(model, x)
    with torch.no_grad():
        found = compile_by(made, engine)(x)
        assert torch.allclose(found, model(x), rtol=1e-3, atol=1e-6)
        assert torch.allclose(simulated(made).module()(x)[0], model(x), rtol=1e-3, atol=1e-6)


def test_the_share_of_linear_layers():
    def share(model, x):
        program = tsopt.capture(model, x)
        return share_of_linear(program, layers_of(program))

    assert share(mlp(8, 8), torch.ones(1, 8)) == 1.0
    assert share(nn.ReLU(), torch.ones(1, 8)) == 0.0
    image = torch.ones(1, 3, 32, 32)
    assert share(nn.Conv2d(3, 8, 3), image) == 0.0
    wide = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 27))
    assert share(wide, image) == 0.5, "half of the weights, though hardly any multiplications"
    deep = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert share(nn.Sequential(deep, nn.Linear(64, 2)), image) < 0.01
