"""Scales that go before the moves of what they scale."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.passes.helpers import SPECIAL, check, specials
from tsopt.compiler.rewriting.rewrite import RulePass
from tsopt.passes import CANONICALIZE, DATA_MOVEMENT, FUSE, DeadCode, data_movement

N = len(SPECIAL)


def with_forms(item):
    """The rule after the forms it is written for."""
    return (DeadCode(), CANONICALIZE, RulePass(item.name, (item,)), DeadCode("dce-again"))


# ---- scales -----------------------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.linear, self.conv = nn.Linear(4, 6), nn.Conv2d(3, 4, 1)
        self.up, self.table = nn.ConvTranspose2d(3, 4, 2), nn.Parameter(torch.randn(4, 6))
        self.eval()

    def forward(self, *xs):
        return self.function(self, *xs)


COUNTS = torch.arange(24).view(6, 4)  # as weights: no fraction can be folded into them
SCALES = {
    "linear": lambda m, x: m.linear(x).view(2, 3, 2, 3).transpose(1, 2) * 0.5,
    "linear div": lambda m, x: m.linear(x).permute(2, 0, 1) / 3,
    "conv": lambda m, x: m.conv(x.view(1, 3, 2, 4)).flatten(2).transpose(1, 2) * -2,
    "conv_transpose": lambda m, x: m.up(x.view(1, 3, 2, 4)).flatten(2) * 0.125,
    "matmul": lambda m, x: (x @ m.table).view(2, 3, 2, 3) * 0.5,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", SCALES)
def test_a_scale_goes_before_the_moves_with_the_same_bits(name, dtype):
    model, x = Layers(SCALES[name]).to(dtype), torch.randn(2, 3, 4, dtype=dtype)
    found = check(
        with_forms(data_movement.scale_before_moves), model, x, exact=True, also=[specials(2, 3, 4, dtype=dtype)]
    )
    assert "scale_before_moves" in found.done
    layer = next(i for i, op in enumerate(found.ops) if op.startswith(("linear", "conv", "matmul")))
    assert found.ops[layer + 1].startswith(("mul", "div"))


@pytest.mark.parametrize("name", ["linear", "conv", "conv_transpose"])
def test_a_scale_before_the_moves_is_folded(name):
    """A batch of one has an axis less to stride over, and nothing changes the layout."""
    found = check((DeadCode(), CANONICALIZE, DATA_MOVEMENT, FUSE), Layers(SCALES[name]), torch.randn(2, 3, 4))
    assert "mul.Tensor" not in found.ops


@pytest.mark.parametrize(
    "model",
    [
        lambda m, x: m.linear(x) * 0.5,
        lambda m, x: m.linear(x).relu().transpose(1, 2) * 0.5,
        lambda m, x: m.linear(x).transpose(1, 2) * m.table[0, 0],
        lambda m, x: m.linear(x).transpose(1, 2) + 0.5,
        lambda m, x: m.linear(x).transpose(1, 2) * True,
        lambda m, x: (x @ x.mT).transpose(1, 2) * 0.5,
        lambda m, x: F.linear(x, m.table.t() * x[0, 0]).transpose(1, 2) * 0.5,
        lambda m, x: x.transpose(1, 2) * 0.5,
        lambda m, x: m.linear(x).transpose(1, 2)[:1] * 0.5,
        lambda m, x: F.linear(x.long(), COUNTS).transpose(1, 2) * 0.5,
    ],
)
def test_other_scales_stay(model):
    found = check(with_forms(data_movement.scale_before_moves), Layers(model), torch.randn(2, 3, 4))
    assert "scale_before_moves" not in found.done


def test_a_scale_of_a_shared_layer_stays():
    def model(m, x):
        y = m.linear(x)
        return y.transpose(1, 2) * 0.5, y + 1

    found = check(with_forms(data_movement.scale_before_moves), Layers(model), torch.randn(2, 3, 4))
    assert ("scale_before_moves", data_movement.SHARED) in found.declined


def test_a_scale_of_a_shared_move_stays():
    def model(m, x):
        y = m.linear(x).transpose(1, 2)
        return y * 0.5, y + 1

    found = check(with_forms(data_movement.scale_before_moves), Layers(model), torch.randn(2, 3, 4))
    assert "scale_before_moves" not in found.done
