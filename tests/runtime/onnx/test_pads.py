"""Pads in front of pooling, in ONNX Runtime as it is by default."""

from __future__ import annotations

import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tsopt
from tsopt.runtime.onnx.export import to_onnx

X = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0)) - 3  # negative: a padding of 0 is the maximum
POOLING = {
    "maximum": lambda y: F.max_pool2d(y, 3, 2),
    "maximum with padding of its own": lambda y: F.max_pool2d(y, 3, 2, padding=1),
    "maximum, rounded up": lambda y: F.max_pool2d(y, 3, 2, ceil_mode=True),
    "mean": lambda y: F.avg_pool2d(y, 3, 2),
    "mean without its padding": lambda y: F.avg_pool2d(y, 3, 2, count_include_pad=False),
    "mean without its own padding": lambda y: F.avg_pool2d(y, 3, 2, padding=1, count_include_pad=False),
}


class Padded(nn.Module):
    def __init__(self, width: int, pool) -> None:
        super().__init__()
        self.image, self.width, self.pool = nn.Conv2d(3, 4, 1), width, pool
        self.eval()

    def forward(self, x):
        return self.pool(F.pad(self.image(x), [self.width] * 4))


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("pool", POOLING.values(), ids=POOLING)
def test_they_stay_in_front(width, pool):
    model = Padded(width, pool)
    made = tsopt.compile(tsopt.transform(tsopt.capture(model, X)), "onnxruntime")
    torch.testing.assert_close(made(X), model(X).detach())


def test_a_file_is_right_in_the_users_own_session(tmp_path):
    model = Padded(1, POOLING["maximum"])
    to_onnx(tsopt.capture(model, X)).save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    found = session.run(None, {"x": X.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(found), model(X).detach())
