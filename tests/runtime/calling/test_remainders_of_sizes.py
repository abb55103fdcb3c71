"""Calls of a model that decides by the remainder of a size: one program for each of its ways."""

from __future__ import annotations

import pytest
import torch

import tsopt
from tests.compiler.sizes.test_remainders import Windows
from tests.runtime.calling.helpers import OPTIONS, outcomes
from tsopt.runtime.calling.new_signatures import NewSignatures


@pytest.fixture
def windows(wins):
    model = Windows().eval()
    return model, tsopt.optimize(model, torch.randn(1, 77, 6), warmup=1, audit=0, **OPTIONS)


def call(windows, *lengths):
    model, fast = windows
    for length in lengths:
        x = torch.randn(1, length, 6)
        torch.testing.assert_close(fast(x), model(x).detach())


def served(windows, *lengths):
    return [windows[1].serving((torch.randn(1, length, 6),), {}) is not None for length in lengths]


def test_lengths_that_are_padded_share_a_program(windows):
    call(windows, 100, 90)
    assert outcomes(windows[1]) == ["captured for onnxruntime, x_1: 8..200"]
    assert served(windows, 50, 99, 171, 96) == [True, True, True, False]


def test_each_way_of_the_model_has_a_program_in_the_end(windows):
    """Whatever the order: that of the example, of another way, of the first one again."""
    call(windows, 80, 96, 100, 101, 50, 88, 104, 20, 64, 72, 60, 120, 128)
    made = outcomes(windows[1])
    assert len(made) == 2, made
    assert any("multiples of 8" in outcome for outcome in made)
    assert served(windows, 51, 93, 56, 112) == [True] * 4


def test_a_length_that_stays_alone_is_captured_by_itself(windows):
    call(windows, 100, 90, *[80] * 60)
    assert served(windows, 80, 88) == [True, False]


def test_what_fails_for_want_of_memory_is_tried_again(windows, monkeypatch):
    real, failed = NewSignatures._timed, []

    def short_of_memory(self, *calls):
        if len(calls) > 1 and len(failed) < 4:
            failed.append(calls)
            raise torch.OutOfMemoryError("no more")
        return real(self, *calls)

    monkeypatch.setattr(NewSignatures, "_timed", short_of_memory)
    call(windows, *range(81, 88), *range(89, 96))
    assert len(failed) == 4
    assert served(windows, 99) == [True]
