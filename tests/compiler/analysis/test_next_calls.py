"""Where the next call of a model reads what a call has written."""

from __future__ import annotations

import torch
from torch import nn

import tsopt
from tests.passes.helpers import find
from tsopt.compiler.analysis.next_calls import read_again

X = torch.ones(3)


class Counting(nn.Module):
    """Keeps a sum, and returns what it writes into one of its inputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", X.clone())

    def forward(self, x, into):
        self.total.add_(x)
        into.copy_(x.cos())
        return into * 2, x.sin()


def test_what_is_written_is_read_again_and_what_is_returned_is_not():
    program = tsopt.capture(Counting(), (X, X.clone()))
    x, into, total = (node for node in program.graph.nodes if node.op == "placeholder")
    written = {item.writes: value for value, item in zip(program.outputs, program.signature.outputs, strict=True)}
    assert read_again(program, written["total"]) == [total]
    assert read_again(program, written["into"]) == [into]
    assert not any(read_again(program, value) for value in (x, find(program, "sin"), find(program, "mul.Tensor")))
