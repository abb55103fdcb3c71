"""What tests of commands share."""

from __future__ import annotations

import re

import torch
from torch import nn

HEAD = "import torch\nfrom torch import nn\nexample_input = torch.ones(1, 4)\n"


def assert_only_stages(err: str) -> None:
    """What a log has of a command that went well: a line for each stage, with the time."""
    assert all(re.fullmatch(r"m\.py: .+ \(\d+\.\d s\)", line) for line in err.splitlines()), err


def failed(ran, text):
    """A command ended with a usage error that says so; its standard error."""
    assert ran.code == 2
    assert text in ran.err, ran.err
    assert "error: " in ran.err
    assert ran.out == ""
    return ran.err


def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


class Writing(nn.Module):
    """Counts its calls, draws a number and writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls.add_(1)
        x.mul_(2)
        return x * self.calls + torch.rand(1)
