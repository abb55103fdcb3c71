"""Tensors as bytes, whatever their strides."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tsopt.compiler.tensor_bytes import bytes_in


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(12.0).reshape(3, 4), torch.arange(36.0).reshape(4, 9)[2:3, 5], torch.zeros(0, 3), torch.tensor(7)],
    ids=["a matrix", "one element with another stride", "none", "a number"],
)
def test_they_are_those_in_memory(tensor):
    assert bytes(bytes_in(tensor).tolist()) == tensor.numpy().tobytes()


def test_a_model_may_hold_one_element_with_another_stride(always_faster, tmp_path):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("scale", torch.rand(4, 9)[:1, 0])

        def forward(self, x):
            return self.layer(x) * self.scale

    model, x = Scaled().eval(), torch.randn(2, 4)
    assert model.scale.stride() == (9,)
    fast = tsopt.optimize(model, x, seconds=0.05, backends=("torchscript",), cache=False)
    assert fast.report.winner == "TorchScript"
    for called in (fast, tsopt.load(fast.save(tmp_path / "m.tsopt"), trust=True)):
        with torch.no_grad():
            torch.testing.assert_close(called(x), model(x))
