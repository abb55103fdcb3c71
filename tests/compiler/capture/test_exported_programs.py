"""What the user has exported: it has been read already, and keeps its places and its conditions on sizes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tests.compiler.capture.models import Plain, X
from tests.passes.helpers import assert_computes
from tsopt.compiler.capture.capture import capture
from tsopt.errors import UsageError

LONGER, SHORTER = (torch.ones(7), torch.ones(3)), (torch.ones(4), torch.ones(6))


def test_an_exported_program_has_been_read():
    exported = torch.export.export(Plain().eval(), (X,))
    with pytest.raises(UsageError, match="frontend='fx' does not apply to an exported program"):
        capture(exported, X, frontend="fx")


def test_an_exported_program_keeps_the_places_of_its_calls():
    exported = torch.export.export(Plain().eval(), (X,))
    assert "# layer, tests/compiler/capture/models.py:" in capture(exported, X).text


class Compares(nn.Module):
    def forward(self, x, y):
        if x.shape[0] > y.shape[0]:
            return x.sum() + y.sum() + 100
        return x.sum() - y.sum()


def guarded():
    auto = torch.export.Dim.AUTO
    return torch.export.export(Compares().eval(), LONGER, dynamic_shapes=({0: auto}, {0: auto}))


def test_sizes_for_which_a_model_was_not_exported_are_refused():
    exported = guarded()
    for sizes in (LONGER, (torch.ones(5), torch.ones(4))):
        assert torch.equal(tsopt.compile(capture(exported, sizes), "eager")(*sizes), Compares()(*sizes))
    with pytest.raises(tsopt.CaptureError, match="fails on the example") as caught:
        capture(exported, SHORTER)
    assert "Guard failed" in caught.value.why
    with pytest.raises(tsopt.CaptureError, match="Guard failed"):
        tsopt.optimize(exported, SHORTER, backends=("eager",), seconds=0.02, isolate=False, cache=False)


def test_a_call_with_such_sizes_raises_what_the_exported_program_raises():
    fast = tsopt.optimize(guarded(), LONGER, backends=("eager",), seconds=0.02, isolate=False, cache=False)
    with pytest.raises(AssertionError, match="Guard failed"):
        fast(*SHORTER)
    assert float(fast(*LONGER)) == 110


def test_sizes_are_not_dynamic_beyond_what_a_model_was_exported_for():
    with pytest.raises(tsopt.CaptureError, match="specializes on a size"):
        capture(guarded(), LONGER, dynamic={"x": {0: "a"}, "y": {0: "b"}})
    exported = torch.export.export(Plain().eval(), (X,), dynamic_shapes=({0: torch.export.Dim("n", min=2, max=64)},))
    program = capture(exported, X, dynamic={"x": {0: "n"}})
    assert_computes(program, Plain().eval(), [X, torch.ones(5, 3)], exact=True)
    assert str(program.signature.dims[0]) == "n: 1..64"
