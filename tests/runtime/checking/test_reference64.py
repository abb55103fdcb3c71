from __future__ import annotations

import pytest
import torch

import tsopt
from tsopt.compiler.calls.example import Example
from tsopt.runtime.checking.accuracy import Oracle, verify


def test_an_argmax_that_breaks_a_tie_within_rounding_passes():
    tied = torch.tensor([[1.0, 1.0 + 1e-7, 0.0]])
    model, other = (lambda x: x.argmax(1)), (lambda x: (x.double() + torch.tensor([1e-6, 0, 0])).argmax(1))
    verdict = Oracle(model, Example((tied,)), tsopt.capture(model, tied)).judge(other)
    assert verdict.ok
    assert verdict.test == "decision"
    assert "ties" in str(verdict)


def test_an_argmax_beyond_rounding_is_refused():
    clear = torch.tensor([[1.0, 1.1, 0.0]])
    with pytest.raises(tsopt.AccuracyError, match="1 of 1"):
        verify(lambda x: x.argmax(1), lambda x: torch.zeros(1, dtype=torch.int64), clear)


def test_a_comparison_within_rounding_passes_and_beyond_is_refused():
    near = torch.tensor([1.0, 2.0, 3.0 - 2e-7])
    model = lambda x: x >= 3.0  # noqa: E731
    assert verify(model, lambda x: x >= 3.0 - 1e-6, near).ok
    with pytest.raises(tsopt.AccuracyError):
        verify(model, lambda x: x >= 1.5, near)
