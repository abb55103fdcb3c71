"""Statically quantized layers: form, sharing, bias correction, and that other passes do not change them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsopt
from tests.compiler.helpers import Net
from tests.passes.quantize.models import Residual, calibrated_pass, images, seeded
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.fake_quantized import simulated
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.graph.quantized import QParams, quantized, quantized_layer
from tsopt.compiler.graph.verify import verify_program
from tsopt.compiler.rewriting.pass_base import Limits
from tsopt.compiler.rewriting.pipeline import run
from tsopt.passes.quantize.layers import layers_of
from tsopt.passes.quantize.sensitivity import by_qparams, losses_of
from tsopt.passes.quantize.static import StaticInt8


def calibrated(model, *calls, fuel=None, **options):
    """The model in int8, with parameters from these calls; and the program that was given."""
    program = tsopt.transform(tsopt.capture(model if isinstance(model, nn.Module) else Net(model), calls[0]))
    change = calibrated_pass(program, [(x,) for x in calls], **options)
    made, _ = run(program, (change,), Limits(Numerics.LOSSY, fuel=fuel))
    verify_program(made)
    return made, program


def layers(program):
    return [layer for node in program.calls() if (layer := quantized_layer(program, node)) is not None]


def relative_error(program, model, x):
    with torch.no_grad():
        (answer,), wanted = program.module()(x), model(x)
    return float((answer - wanted).norm() / wanted.norm())


def test_all_layers_are_quantized_by_known_parameters():
    model, calls = Residual().eval(), images(4)
    made, _ = calibrated(model, *calls)
    assert len(layers(made)) == 3
    assert all(layer.by is not None for layer in layers(made))
    assert made.numerics == Numerics.LOSSY
    assert 0 < relative_error(made, model, calls[0]) < 0.03


def test_a_value_is_quantized_once_for_all_who_read_it():
    made, _ = calibrated(Residual().eval(), *images(2))
    relu = next(node for node in made.calls() if node.target is aten.relu.default)
    (only,) = relu.users
    assert only.target is quantized.quantize_per_tensor.default


def test_other_calls_get_the_same_parameters():
    model, calls = Residual().eval(), images(2)
    made, _ = calibrated(model, *calls)
    run_it = made.module()
    with torch.no_grad():
        far = run_it(calls[0] * 1000)[0]
        assert torch.equal(far, run_it(calls[0] * 2000)[0]), "what is beyond the range is cut"


def test_only_the_chosen_layers_are_quantized():
    program = tsopt.transform(tsopt.capture(Residual().eval(), images(1)[0]))
    first, *_ = layers_of(program)
    made, _ = calibrated(Residual().eval(), *images(2), only=frozenset({first.name}))
    (layer,) = layers(made)
    assert layer.node.meta["module"] == "stem"


class Kept(nn.Module):
    """Its last convolution reads the first one, be it moved; so may the second one."""

    def __init__(self, move, shared):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.move, self.shared = move, shared

    def forward(self, x):
        y = self.move(self.first(x).relu())
        last = self.last(y)
        return (last, self.second(y)) if self.shared else last


@pytest.mark.parametrize(
    "move",
    [lambda y: y, lambda y: F.max_pool2d(y, 2), lambda y: F.max_pool2d(y.mT, 2)],
    ids=["as it is", "moved", "moved twice"],
)
@pytest.mark.parametrize("shared", [False, True])
def test_a_layer_that_is_to_read_floats_does(move, shared):
    model, calls = Kept(move, shared).eval(), images(2)
    program = tsopt.transform(tsopt.capture(model, calls[0]))
    chosen = frozenset(layer.name for layer in layers_of(program) if layer.meta["module"] != "last")
    others = frozenset(layer.name for layer in layers_of(program)) - chosen
    made, _ = calibrated(model, *calls, only=chosen, in_float=others)
    (last,) = [node for node in made.calls() if node.target is aten.conv2d.default and node.meta["module"] == "last"]
    behind = last.all_input_nodes[0]
    while behind.target is not aten.conv2d.default:
        assert behind.target is not quantized.dequantize_per_tensor.default
        behind = behind.all_input_nodes[0]
    assert [layer.node.meta["module"] for layer in layers(made)] == ["first", "second"][: len(chosen)]
    for engine in ("onnxruntime", "openvino"):
        found, (wanted, *_) = tsopt.compile(made, engine)(calls[0]), simulated(made).module()(calls[0])
        torch.testing.assert_close(found[0] if shared else found, wanted, rtol=1e-3, atol=0.02)


def test_a_layer_whose_input_has_no_parameters_stays_as_it_is():
    program = tsopt.capture(nn.Linear(4, 2).eval(), torch.ones(1, 4))
    made, _ = run(program, (StaticInt8({}),), Limits(Numerics.LOSSY))
    assert made.numerics == Numerics.EXACT
    assert not layers(made)


def test_a_result_that_has_no_parameters_stays_in_float():
    """As one that is not finite on the data: its convolution is quantized, and what reads it reads floats."""
    program = tsopt.transform(tsopt.capture(Residual().eval(), images(1)[0]))
    change = calibrated_pass(program, [(x,) for x in images(2)])
    inputs = {ops.bind(layer)["input"].name for layer in layers_of(program)}
    known = {name: by for name, by in change.qparams.items() if name in inputs}
    assert len(known) < len(change.qparams)
    made, _ = run(program, (StaticInt8(known),), Limits(Numerics.LOSSY))
    verify_program(made)
    assert len(layers(made)) == 3

    rounded = [node for node in made.calls() if node.target is quantized.quantize_per_tensor.default]
    assert len(rounded) == len(known)


def test_each_layer_takes_fuel():
    assert len(layers(calibrated(Residual().eval(), *images(1), fuel=2)[0])) == 2


@pytest.mark.parametrize("bias", [True, False])
def test_the_mean_error_is_taken_off_by_the_bias(bias):
    torch.manual_seed(1)
    model = nn.Linear(64, 8, bias=bias).eval()
    with torch.no_grad():
        model.weight += 0.3  # errors of the weights add up to a mean for inputs that are not centered
    x = torch.rand(256, 64, generator=seeded(0))
    _, program = calibrated(model, x)
    (layer,) = layers_of(program)
    by = {node.name: QParams.of_range(0, 1) for node in program.graph.nodes if node.op == "placeholder"}
    loss = losses_of(program, [layer], [(x,)], rounding=by_qparams(by), largest=15, progress=lambda text: None)[
        layer.name
    ]
    shifts = {layer.name: loss.shift}
    errors = []
    for given in ({}, shifts):
        made, _ = calibrated(model, x, shifts=given, largest=15)
        with torch.no_grad():
            errors.append((made.module()(x)[0] - model(x)).mean(0).abs().max())
    assert errors[1] < errors[0] / 20


@pytest.mark.parametrize(
    ("model", "shape"),
    [(nn.Linear(16, 6), (2, 3, 5, 16)), (nn.Conv1d(16, 6, 3), (2, 16, 9)), (nn.Conv3d(3, 6, 2), (1, 3, 4, 5, 6))],
    ids=["linear on images", "conv1d", "conv3d"],
)
def test_errors_are_those_of_output_channels(model, shape):
    x = torch.rand(shape, generator=seeded(0))
    made, program = calibrated(model.eval(), x)
    (layer,) = layers_of(program)
    by = by_qparams(calibrated_pass(program, [(x,)]).qparams)
    found = losses_of(program, [layer], [(x,)], rounding=by, largest=127, progress=lambda text: None)[layer.name]
    assert found.shift.shape == (6,)
    with torch.no_grad():
        error = made.module()(x)[0] - model(x)
    mean = error.movedim(-1 if isinstance(model, nn.Linear) else 1, 0).flatten(1).mean(1)
    torch.testing.assert_close(-found.shift, mean, rtol=1e-2, atol=5e-5)  # ties are rounded by other kernels
    shifted, _ = calibrated(model, x, shifts={layer.name: found.shift})
    with torch.no_grad():
        assert float((shifted.module()(x)[0] - model(x)).mean().abs()) <= float(error.mean().abs()) + 1e-6


def test_a_computed_bias_is_left():
    rows = torch.randn(2, 4, generator=seeded(3))
    x = torch.randn(1, 4, generator=seeded(4))
    model = Net(lambda self, x: F.linear(x, rows, x[0, :2]))
    program = tsopt.capture(model, x)
    (layer,) = layers_of(program)
    made, _ = calibrated(model, x, shifts={layer.name: torch.ones(2)})
    assert relative_error(made, model, x) < 0.05


def test_a_weight_that_two_layers_share_is_stored_once():
    weight = torch.randn(8, 8, generator=seeded(0)) / 3
    made, _ = calibrated(
        lambda self, x: F.linear(F.linear(x, weight).relu(), weight), torch.randn(3, 8, generator=seeded(1))
    )
    assert len({layer.weight for layer in layers(made)}) == 1
    assert len(layers(made)) == 2


def test_later_passes_do_not_change_quantized_weights():
    model, calls = Residual().eval(), images(2)
    made, _ = calibrated(model, *calls)
    again = tsopt.transform(made)
    assert [layer.weight for layer in layers(again)] == [layer.weight for layer in layers(made)]


def test_the_same_in_float32_operations():
    model, calls = Residual().eval(), images(2)
    made, _ = calibrated(model, *calls)
    fast = simulated(made)
    verify_program(fast)
    assert not any("quantized_decomposed" in str(node.target) for node in fast.calls())
    with torch.no_grad():
        mine, theirs = fast.module()(calls[1])[0], made.module()(calls[1])[0]
    assert float((mine - theirs).norm() / theirs.norm()) < 0.02
    assert layers(made), "the program that was given is left"


def test_zero_padding_is_exact():
    kernel = torch.randn(4, 3, 3, 3, generator=seeded(0))
    x = torch.rand(1, 3, 6, 6, generator=seeded(1)) + 5  # far from 0, which still has to be one of the steps
    made, _ = calibrated(lambda self, x: F.conv2d(x, kernel, padding=2), x)
    model = Net(lambda self, x: F.conv2d(x, kernel, padding=2))
    assert relative_error(made, model, x) < 0.02


@pytest.mark.parametrize(
    "model",
    [
        lambda self, x: F.conv2d(x, torch.ones(2, 3, 1, 1).zero_()),
        lambda self, x: F.conv2d(x * 0, KERNEL),
        lambda self, x: F.conv2d(x * 1e-42, KERNEL),
    ],
    ids=["weights of 0", "values of 0", "denormal values"],
)
def test_nothing_but_zeros_is_no_nan(model):
    made, _ = calibrated(model, *images(1))
    with torch.no_grad():
        assert made.module()(images(1)[0])[0].isfinite().all()


KERNEL = torch.randn(2, 3, 1, 1, generator=seeded(5))


def test_rounding_is_to_the_nearest_even_and_the_ends_hold():
    """At exact halves, and beyond the last step, as torch and ONNX define it."""
    x = torch.tensor([[0.5, 1.5, 2.5, 254.5, 255.5, 300.0, -1.0, 0.0]])
    eye = torch.eye(8)
    program = tsopt.capture(Net(lambda self, x: F.linear(x, eye)), x)
    by = {node.name: QParams(1.0, 0) for node in program.graph.nodes if node.op == "placeholder"}
    made, _ = run(program, (StaticInt8(by),), Limits(Numerics.LOSSY))
    wanted = torch.tensor([[0.0, 2.0, 2.0, 254.0, 255.0, 255.0, 0.0, 0.0]])
    for program in (made, simulated(made)):
        with torch.no_grad():
            assert torch.equal(program.module()(x)[0].round(), wanted)


def test_a_layer_whose_sums_do_not_fit_in_32_bits_stays_as_it_is():
    short, long = torch.ones(2, 64), torch.ones(2, 70_000)
    made, _ = calibrated(lambda self, x: F.linear(x[:, :64], short) + F.linear(x, long), torch.rand(1, 70_000))
    (only,) = layers(made)
    assert made.weights[only.weight].shape == (2, 64)


def test_a_bias_beside_hardly_any_weight_fits_in_steps_of_both_scales():
    kernel = torch.randn(4, 3, 3, 3, generator=seeded(0))
    kernel[0], kernel[1] = 0.0, kernel[1] * 1e-12
    bias = torch.tensor([1.0, -2.0, 1.0, 0.0])
    made, _ = calibrated(lambda self, x: F.conv2d(x, kernel, bias), images(1)[0])
    (layer,) = layers(made)
    assert float((bias / (made.weights[layer.scales] * layer.by.scale)).abs().max()) <= 2**24 + 1
    assert relative_error(made, lambda x: F.conv2d(x, kernel, bias), images(1)[0]) < 0.02
