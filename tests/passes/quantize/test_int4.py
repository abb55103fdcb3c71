"""Weights in 4 bits with scales for groups: form, error, which layers, and what engines make of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsopt
from tests.compiler.helpers import Net
from tests.passes.quantize.models import mlp, relative_error, seeded, with_outliers
from tsopt.compiler.graph.fake_quantized import simulated
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.graph.quantized import (
    dequantized_groups,
    float_weight,
    group_of,
    largest_magnitude,
    quantized_layer,
    quantized_layers,
)
from tsopt.compiler.graph.serialize import read_program, write_program
from tsopt.compiler.graph.verify import verify_program
from tsopt.compiler.graph.weight_groups import in_groups
from tsopt.compiler.rewriting.pass_base import Limits
from tsopt.compiler.rewriting.pipeline import run
from tsopt.passes.quantize.layers import layers_of
from tsopt.passes.quantize.weights import Int4Weights
from tsopt.runtime.backends.backend import compile as compile_by

W = torch.randn(64, 64, generator=seeded(1)) / 8
ENGINES = ["onnxruntime", "openvino"]


def in_int4(model, x, **options):
    program = tsopt.transform(tsopt.capture(model if isinstance(model, nn.Module) else Net(model), x))
    made, _ = run(program, (Int4Weights(**options),), Limits(Numerics.LOSSY))
    verify_program(made)
    return made


def groups(made):
    return [layer.group for layer in quantized_layers(made)]


def test_linear_layers_get_int4_weights_and_keep_float_inputs():
    x = torch.randn(3, 64, generator=seeded(0))
    made = in_int4(mlp(64, 96, 8), x)
    found = list(quantized_layers(made))
    assert [made.weights[layer.weight].shape for layer in found] == [(96, 64), (8, 96)]
    assert [made.weights[layer.scales].shape for layer in found] == [(96, 2), (8, 3)]
    assert groups(made) == [32, 32]
    assert all(layer.has_float_input and layer.by is None for layer in found)
    assert all(int(made.weights[layer.weight].max()) == 15 for layer in found)
    assert (group_of(made), largest_magnitude(made)) == (32, 15)
    assert made.numerics == Numerics.LOSSY
    with torch.no_grad():
        assert 0.01 < relative_error(made.module()(x)[0], mlp(64, 96, 8)(x)) < 0.15


@pytest.mark.parametrize("group", [32, 64, 128])
def test_zeros_are_exact_and_the_error_is_bounded(group):
    weight = torch.randn(8, 256, generator=seeded(0))
    weight[:, ::3] = 0
    weight[3] = 0
    weight[4] = weight[4].abs() + 3  # ranges include 0 all the same
    weight[5] *= 1e-30
    integers, scales, zeros = in_groups(weight, group)
    found = dequantized_groups(integers, scales, zeros)
    assert integers.dtype == torch.uint8
    assert (int(integers.max()), int(integers.min())) == (15, 0)
    assert bool((found[weight == 0] == 0).all())
    assert scales.shape == zeros.shape == (8, 256 // group)
    spread = (weight.unflatten(1, (-1, group)).amax(2).clamp(min=0) - weight.unflatten(1, (-1, group)).amin(2)).clamp(
        min=0
    )
    worst = (found - weight).unflatten(1, (-1, group)).abs().amax(2)
    assert bool((worst <= 0.42 * spread + 1e-30).all()), "clipping costs at most two fifths of the range"


def test_clipping_a_little_loses_less_than_the_whole_range():
    weight = torch.randn(64, 256, generator=seeded(0))
    grouped = weight.unflatten(1, (-1, 32))
    low, high = grouped.amin(2, keepdim=True), grouped.amax(2, keepdim=True)
    scale = (high - low) / 15
    zero = (-low / scale).round()
    plain = (((grouped / scale).round() + zero).clamp(0, 15) - zero) * scale
    found = dequantized_groups(*in_groups(weight, 32))
    assert (found - weight).norm() < 0.985 * (plain.flatten(1) - weight).norm()


def test_weights_are_rounded_in_parts_as_a_whole(monkeypatch):
    weight = torch.randn(10, 64, generator=seeded(0))
    whole = in_groups(weight, 32)
    monkeypatch.setattr("tsopt.compiler.graph.weight_groups.AT_ONCE", 3 * 64)
    assert all(torch.equal(*pair) for pair in zip(whole, in_groups(weight, 32), strict=True))


def test_rows_that_groups_do_not_divide_have_eight_bits():
    made = in_int4(mlp(64, 40, 8), torch.randn(3, 64, generator=seeded(0)))
    assert groups(made) == [32, None]
    assert largest_magnitude(made) == 127


def test_only_the_named_layers_and_some_of_them_wider():
    program = tsopt.transform(tsopt.capture(mlp(64, 64, 64, 64), torch.randn(3, 64, generator=seeded(0))))
    first, second, _ = (layer.name for layer in layers_of(program))
    chosen = Int4Weights(only=frozenset({first, second}), wider=frozenset({second}))
    made, _ = run(program, (chosen,), Limits(Numerics.LOSSY))
    assert [(layer.node.name, layer.group) for layer in quantized_layers(made)] == [(first, 32), (second, None)]


def test_they_are_stored_as_they_are(tmp_path):
    x = torch.randn(3, 64, generator=seeded(0))
    made = in_int4(mlp(64, 32, 8), x)
    write_program(made, tmp_path)
    again = read_program(tmp_path)
    assert groups(again) == [32, 32]
    with torch.no_grad():
        assert torch.equal(again.module()(x)[0], made.module()(x)[0])


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("weight", lambda value: value + 1),  # 16 does not fit in 4 bits
        ("weight", lambda value: value.to(torch.int8)),
        ("zeros", lambda value: value - 16),
        ("zeros", lambda value: value.to(torch.int32)),
        ("scales", lambda value: value.double()),
        ("scales", lambda value: value.flatten()),
        ("scales", lambda value: value[:, :1].repeat(1, 64)),  # groups of one
    ],
)
def test_another_form_is_not_taken_for_ours(part, change):
    made = in_int4(mlp(64, 8), torch.randn(3, 64, generator=seeded(0)))
    (layer,) = quantized_layers(made)
    name = getattr(layer, part)
    made.weights[name] = change(made.weights[name])
    assert quantized_layer(made, layer.node) is None


@pytest.mark.sliced(3)
@pytest.mark.parametrize(
    ("size", "lead", "bias", "group"),
    [
        (32, (1,), True, 32),
        (96, (5,), False, 32),
        (128, (2, 3), True, 64),
        (160, (1,), True, 32),
        (384, (5,), True, 128),
        (48, (5,), True, 16),
        (512, (3,), True, 256),
        (1024, (2, 3), False, 32),
    ],
)
def test_the_simulation_rounds_as_onnx_runtime_does(size, lead, bias, group):
    torch.manual_seed(0)
    model, x = nn.Linear(size, 24, bias=bias).eval(), with_outliers(size, *lead)
    made = in_int4(model, x, group=group)
    assert groups(made) == [group]
    with torch.no_grad():
        wanted, found, exact = simulated(made).module()(x)[0], compile_by(made, "onnxruntime")(x), model(x)
    assert relative_error(found, wanted) < 0.05 * relative_error(found, exact)


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_compute_what_the_simulation_says_of_a_model(engine):
    model, x = mlp(256, 512, 64), torch.randn(4, 7, 256, generator=seeded(0))
    made = in_int4(model, x)
    with torch.no_grad():
        found, wanted, exact = compile_by(made, engine)(x), simulated(made).module()(x)[0], model(x)
    assert relative_error(found, exact) < 1.1 * relative_error(wanted, exact)
    assert relative_error(found, wanted) < 0.2 * relative_error(wanted, exact)


@pytest.mark.parametrize("engine", ENGINES)
def test_any_batch(engine):
    model, x = mlp(64, 96, 32), torch.randn(2, 64, generator=seeded(0))
    program = tsopt.transform(tsopt.capture(model, x, dynamic={"input": {0: "batch[1..8]"}}))
    made, _ = run(program, (Int4Weights(),), Limits(Numerics.LOSSY))
    fast, wanted = compile_by(made, engine), simulated(made).module()
    with torch.no_grad():
        for count in (1, 3, 8):
            x = torch.randn(count, 64, generator=seeded(count))
            assert relative_error(fast(x), wanted(x)[0]) < 0.02


def test_onnx_runtime_without_its_other_operators():
    model, x = mlp(64, 96, 32), torch.randn(2, 64, generator=seeded(0))
    made = in_int4(model, x)
    with torch.no_grad():
        found, wanted = compile_by(made, "onnxruntime", fused=False)(x), simulated(made).module()(x)[0]
    assert relative_error(found, wanted) < 0.02


@pytest.mark.parametrize("engine", ENGINES)
def test_a_weight_that_one_layer_reads_in_four_bits_and_another_in_eight(engine):
    x = torch.randn(3, 64, generator=seeded(0))
    program = tsopt.transform(tsopt.capture(Net(lambda self, x: F.linear(F.linear(x, W).relu(), W)), x))
    _, last = (layer.name for layer in layers_of(program))
    made, _ = run(program, (Int4Weights(wider=frozenset({last})),), Limits(Numerics.LOSSY))
    assert groups(made) == [32, None]
    found, wanted = compile_by(made, engine)(x), simulated(made).module()(x)[0]
    assert relative_error(found, wanted) < 0.02


@pytest.mark.parametrize("engine", ENGINES)
def test_layers_with_four_and_with_eight_bits_together(engine):
    model, x = mlp(64, 40, 96, 8), torch.randn(4, 64, generator=seeded(0))
    made = in_int4(model, x)
    assert groups(made) == [32, None, 32]
    with torch.no_grad():
        found, wanted, exact = compile_by(made, engine)(x), simulated(made).module()(x)[0], model(x)
    assert relative_error(found, wanted) < 0.2 * relative_error(wanted, exact)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", [(96, 5), (64, 1), (32, 3)])
def test_every_integer_is_where_it_belongs(engine, shape):
    """Rows that say which weight an engine has read: all other weights of theirs are 0."""
    size, count = shape
    weight = torch.zeros(count, size)
    for row in range(count):
        weight[row, (7 * row + 3) % size], weight[row, (11 * row + size // 2) % size] = 1.0 + row, -2.0
    model = nn.Linear(size, count, bias=False).eval()
    with torch.no_grad():
        model.weight.copy_(weight)
        made = in_int4(model, torch.ones(1, size))
        (layer,) = quantized_layers(made)
        stands_for, found = float_weight(made, layer), compile_by(made, engine)
        for place in range(size):
            x = torch.zeros(1, size)
            x[0, place] = 1.0
            assert torch.allclose(found(x)[0], stands_for[:, place], atol=1e-2, rtol=1e-2)
