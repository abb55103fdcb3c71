"""What a layer loses: by itself, and by channel."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import tsopt
from tests.passes.quantize.models import Residual, images, mlp, seeded
from tsopt.compiler.graph.quantized import QParams
from tsopt.passes.quantize.layers import layers_of
from tsopt.passes.quantize.sensitivity import Loss, by_group, by_qparams, by_tensor, losses_of


def losses(model, calls, rounding=by_tensor, largest=127):
    program = tsopt.capture(model, calls[0])
    layers = layers_of(program)
    found = losses_of(
        *(program, layers, [(x,) for x in calls]), rounding=rounding, largest=largest, progress=lambda text: None
    )
    return program, {layer.meta["module"]: found[layer.name] for layer in layers}


def test_ordinary_layers_lose_little():
    _, found = losses(Residual().eval(), images(4))
    assert set(found) == {"stem", "inner", "head"}
    assert all(35 < loss.sqnr < 60 for loss in found.values())


def test_the_worst_layer_is_the_one_with_an_outlier_in_each_row():
    model = mlp(16, 16, 16, 16)
    with torch.no_grad():
        model[2].weight[:, 0] = 200.0  # all other weights of a row have few steps left
        model[2].weight[:, 1] = -200.0
    _, found = losses(model, [torch.randn(8, 16, generator=seeded(1))])
    assert min(found, key=lambda name: found[name].sqnr) == "2"


def test_fewer_bits_lose_more():
    wide, narrow = (
        losses(mlp(32, 32), [torch.randn(8, 32, generator=seeded(0))], largest=n)[1]["0"] for n in (127, 31)
    )
    assert wide.sqnr > narrow.sqnr + 6


def test_a_range_that_cuts_values_is_a_loss():
    x = torch.randn(64, 8, generator=seeded(0))
    model = nn.Linear(8, 4).eval()
    program = tsopt.capture(model, x)
    (layer,) = layers_of(program)
    by = {node.name: QParams.of_range(-0.5, 0.5) for node in program.graph.nodes if node.op == "placeholder"}
    found = losses_of(program, [layer], [(x,)], rounding=by_qparams(by), largest=127, progress=lambda text: None)
    assert found[layer.name].sqnr < 10


def test_the_mean_error_of_a_channel_is_its_shift():
    loss = Loss(torch.tensor([4.0, -2.0], dtype=torch.float64), squares=12.0, size=1000.0, count=2)
    assert loss.shift.tolist() == [-2.0, 1.0]
    # 12 of noise, of which 4 * 2 + 1 * 2 go with the shift
    assert loss.sqnr == pytest.approx(10 * math.log10(1000 / 2))


def test_a_layer_without_error_loses_nothing():
    assert Loss(torch.zeros(1, dtype=torch.float64), 0.0, 1.0, 1).sqnr == math.inf
    assert Loss(torch.zeros(1, dtype=torch.float64), 1.0, 0.0, 1).sqnr == -math.inf


@pytest.mark.parametrize(
    "loss", [Loss(torch.zeros(1, dtype=torch.float64), math.inf, 1.0, 1), Loss(torch.zeros(1), math.nan, 1.0, 1)]
)
def test_an_error_that_is_not_finite_is_a_total_loss(loss):
    assert loss.sqnr == -math.inf


def test_a_layer_whose_input_is_not_finite_in_one_call_is_left_out():
    x = torch.randn(2, 8, generator=seeded(0))
    for calls in ([x, x / 0], [x / 0, x]):
        program = tsopt.capture(nn.Linear(8, 2).eval(), x)
        found = losses_of(
            *(program, layers_of(program), [(call,) for call in calls]),
            rounding=by_tensor,
            largest=127,
            progress=lambda text: None,
        )
        assert found == {}


@pytest.mark.parametrize("rounding", [by_tensor, by_group])
def test_a_call_without_rows_loses_nothing(rounding):
    rows = torch.randn(4, 16, generator=seeded(0))
    model = mlp(16, 8)
    _, found = losses(model, [rows, rows[:0]], rounding)
    _, wanted = losses(model, [rows], rounding)
    assert found["0"].sqnr == wanted["0"].sqnr
