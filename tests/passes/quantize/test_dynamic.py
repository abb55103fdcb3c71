"""Which layers the pass quantizes, how, and that the other passes leave the quantization alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsopt
from tests.compiler.helpers import Net
from tsopt.compiler.graph import quantized
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.graph.quantized import quantized_layer, quantized_weight
from tsopt.compiler.graph.verify import verify_program
from tsopt.compiler.rewriting.pass_base import Limits
from tsopt.compiler.rewriting.pipeline import run
from tsopt.errors import NoGain
from tsopt.passes.lower_precision import in_precision
from tsopt.passes.quantize.dynamic import DynamicInt8
from tsopt.passes.quantize.layers import layers_of

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
W = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)) / 3


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8, bias=False)).eval()


def in_int8(model, *inputs):
    program = tsopt.capture(model if isinstance(model, nn.Module) else Net(model), tsopt.example(*inputs))
    made = in_precision(tsopt.transform(program), "int8")
    verify_program(made)
    return made


def layers(program):
    return [layer for node in program.calls() if (layer := quantized_layer(program, node)) is not None]


def relative_error(program, model, *inputs):
    with torch.no_grad():
        (answer,), wanted = program.module()(*inputs), model(*inputs)
    return float((answer - wanted).norm() / wanted.norm())


def test_linear_layers_are_quantized():
    program = in_int8(mlp(), X)
    assert [program.weights[layer.weight].shape for layer in layers(program)] == [(16, 8), (8, 16)]
    assert {str(program.weights[name].dtype) for name in program.used_weights()} == {
        "torch.int8",
        "torch.float32",
        "torch.int64",
    }
    assert program.numerics == Numerics.LOSSY
    assert 0 < relative_error(program, mlp(), X) < 0.02


def test_the_program_that_was_given_is_left():
    program = tsopt.capture(mlp(), X)
    text, names = program.text, set(program.weights)
    in_precision(program, "int8")
    assert (program.text, set(program.weights)) == (text, names)


def test_what_several_layers_read_is_quantized_once():
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(8, 4), nn.Linear(8, 6)

        def forward(self, x):
            return self.q(x), self.k(x)

    found = layers(in_int8(Heads().eval(), X))
    assert len(found) == 2
    assert len({layer.dequantized for layer in found}) == 1


def test_a_weight_that_two_layers_share_is_stored_once():
    weight = nn.Parameter(W.clone())
    program = in_int8(lambda self, x: F.linear(F.linear(x, weight).relu(), weight), X)
    assert len({layer.weight for layer in layers(program)}) == 1
    assert len(layers(program)) == 2


def test_each_layer_takes_fuel_and_is_told_by_its_place():
    made, (record,) = run(tsopt.capture(mlp(), X), (DynamicInt8(),), Limits(Numerics.LOSSY, fuel=1))
    assert [(done.rule, done.where[:1]) for done in record.done] == [("quantize_layer", "0")]
    assert len(layers(made)) == 1


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (2, 4, 9)),
        (nn.Conv3d(2, 4, 3, padding=1), (1, 2, 5, 4, 3)),
        (nn.Linear(16, 8), (2, 3, 5, 16)),
    ],
    ids=str,
)
def test_layers_of_any_rank_are_quantized(model, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    program = in_int8(model.eval(), x)
    assert len(layers(program)) == 1
    assert 0 < relative_error(program, model, x) < 0.02


def test_only_the_chosen_layers_are_quantized():
    program = tsopt.capture(mlp(), X)
    first, last = layers_of(program)
    made, _ = run(program, (DynamicInt8(only=frozenset({last.name})),), Limits(Numerics.LOSSY))
    assert [layer.node.meta["module"] for layer in layers(made)] == [last.meta["module"]]
    assert first.meta["module"] != last.meta["module"]


def test_convolutions_are_quantized():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(4, 4, 3, 2, groups=2)).eval()
    x = torch.randn(2, 3, 8, 8)
    program = in_int8(model, x)
    assert [program.weights[layer.weight].shape for layer in layers(program)] == [(4, 3, 3, 3), (4, 2, 3, 3)]
    assert 0 < relative_error(program, model, x) < 0.02


KERNEL = torch.randn(8, 8, 1, 1, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize(
    "model",
    [
        lambda self, x: F.conv2d(x[:, :, None, None], x[:, :, None, None]),
        lambda self, x: F.conv2d(x.t()[:, :, None], KERNEL),
        lambda self, x: F.conv1d(x.t(), KERNEL[..., 0]),
        lambda self, x: F.conv_transpose2d(x[:, :, None, None], KERNEL),
        lambda self, x: F.linear(x, x),
        lambda self, x: F.linear(x[0], W),
        lambda self, x: F.linear(x.double(), W.double()),
        lambda self, x: F.linear(x[:0], W),
        lambda self, x: F.linear(x, W, W[:1]),
        lambda self, x: F.linear(x, W, W[0, :1]),
        lambda self, x: F.linear(x, torch.cat([W[:7], W[7:] * float("inf")])),
    ],
    ids=[
        "computed kernel",
        "one image",
        "one sequence",
        "transposed convolution",
        "computed weight",
        "vector",
        "float64",
        "empty",
        "bias of two axes",
        "bias for all outputs",
        "infinite weight",
    ],
)
def test_other_layers_stay_as_they_are(model):
    with pytest.raises(NoGain, match="no float32 linear layer or convolution"):
        in_int8(model, X)


@pytest.mark.parametrize("largest", [127, 64])
def test_weights_are_rounded_to_the_nearest_of_their_row(largest):
    weight = torch.randn(5, 9, generator=torch.Generator().manual_seed(2)) * torch.tensor(
        [[1e-30], [1], [1e3], [0], [1e30]]
    )
    integers, scales = quantized_weight(weight, largest)
    assert integers.dtype == torch.int8
    assert integers.abs().amax(1).tolist() == [largest, largest, largest, 0, largest]
    assert ((integers * scales[:, None] - weight).abs() <= 0.501 * scales[:, None]).all()


def test_denormal_weights_do_not_divide_by_zero():
    integers, scales = quantized_weight(torch.full((1, 4), 1e-44), 127)
    assert (integers * scales[:, None]).isfinite().all()


def test_weights_are_smaller_where_sums_of_16_bits_could_saturate(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    program = in_int8(mlp(), X)
    assert {int(program.weights[layer.weight].abs().max()) for layer in layers(program)} == {64}
    assert 2 * 255 * quantized.LARGEST_WITHOUT_VNNI < 2**15


@pytest.mark.parametrize("inputs", [torch.zeros(3, 8), torch.full((3, 8), 3.0), -X.abs(), X * 1e-40, X.abs() + 100])
def test_inputs_of_any_range_keep_their_accuracy(inputs):
    assert relative_error(in_int8(mlp(), X), mlp(), inputs) < 0.02


def test_the_standard_passes_leave_a_quantized_program_as_it_is():
    """Folding would undo the weights, and rules for products would take the scales for factors."""
    made = in_int8(mlp(), X)
    after = tsopt.transform(made)
    assert len(layers(after)) == len(layers(made)) == 2
    assert set(after.used_weights()) == set(made.used_weights())
    assert torch.equal(after.module()(X)[0], made.module()(X)[0])


def test_a_layer_whose_sums_do_not_fit_in_32_bits_stays_as_it_is():
    long = torch.ones(2, 70_000)
    program = in_int8(lambda self, x, y: F.linear(x, W).sum() + F.linear(y, long), X, torch.rand(1, 70_000))
    assert [program.weights[layer.weight].shape for layer in layers(program)] == [(8, 8)]
