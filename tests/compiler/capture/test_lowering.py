"""Names of inputs, state and weights: each means one thing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tsopt.compiler.capture.lowering import unique

X = torch.ones(4, 3)


@pytest.mark.parametrize(
    ("names", "made"),
    [
        (["x", "y"], ["x", "y"]),
        (["x", "x", "x"], ["x", "x_2", "x_3"]),
        (["x", "x_2", "x"], ["x", "x_2", "x_3"]),
        (["x", "x", "x_2"], ["x", "x_3", "x_2"]),
        (["x", "x_2", "x_2", "x"], ["x", "x_2", "x_2_2", "x_3"]),
    ],
)
def test_no_two_names_are_the_same(names, made):
    assert unique(names) == made


class Counts(nn.Module):
    """Its state is called like its input."""

    def __init__(self, writes=False):
        super().__init__()
        self.register_buffer("x", torch.zeros(1))
        self.writes = writes

    def forward(self, x, x_2):
        self.x.add_(1)
        if self.writes:
            x_2.mul_(2)
        return x + x_2 * self.x


def test_state_is_not_taken_for_an_input():
    program = tsopt.capture(Counts().eval(), (X, torch.ones(1, 3).expand(4, 3)))
    assert [item.name for item in program.signature.inputs] == ["x", "x_2", "x_3"]


def test_what_is_written_goes_where_it_belongs():
    model, other = Counts(writes=True).eval(), torch.ones(4, 3)
    out = tsopt.compile(tsopt.capture(model, (X, torch.ones(4, 3))), "eager")(X, other)
    assert torch.equal(out, X + 2)
    assert torch.equal(other, X * 2)
    assert model.x.tolist() == [1.0]


class Projected(nn.Module):
    """A layer whose shapes torch cannot infer for symbolic sizes."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 6, batch_first=True, proj_size=4)

    def forward(self, x):
        return self.lstm(x)[0]


def test_an_op_without_shapes_for_symbolic_sizes_is_refused():
    model, inputs = Projected().eval(), [torch.randn(2, 5, 8), torch.randn(3, 7, 8)]
    with pytest.raises(tsopt.CaptureError, match=r"lstm\S* is not supported with dynamic sizes\n  where: .*test_lower"):
        tsopt.capture(model, inputs)
    fast = tsopt.compile(tsopt.capture(model, inputs[1]), "eager")
    torch.testing.assert_close(fast(inputs[1]), model(inputs[1]))
