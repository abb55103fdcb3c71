"""Calls with other strides than before: no other signature, unless the model asks for them."""

from __future__ import annotations

import torch

import tsopt
from tsopt.runtime.calling import specializations


def strided(length):
    """The same sizes with strides that depend on a length, as the last of so many tokens has."""
    return torch.randn(5, length, 6)[:, -1]


def test_strides_do_not_count_where_nothing_is_faster_than_the_model(optimized_by, mlp):
    asked = []

    def slow(example):
        asked.append(example)
        raise tsopt.AccuracyError("no candidate wins for this signature")

    fast = optimized_by("eager", another=slow)
    for length in range(1, 8):
        x = strided(length)
        torch.testing.assert_close(fast(x), mlp(x).detach())
    assert len(asked) == 1


def test_strides_do_not_count_for_what_is_called_now_and_then(optimized_by, mlp):
    asked = []

    def another(example):
        asked.append(example)
        return tsopt.compile(tsopt.capture(mlp, example), "eager")

    fast = optimized_by("eager", another=another)
    others = [torch.randn(*range(3, 3 + more), 6) for more in range(2, 2 + specializations.RECENT)]
    for length in range(1, 4):
        for x in (strided(length), *others):
            torch.testing.assert_close(fast(x), mlp(x).detach())
    assert len(asked) == 1 + len(others)


def test_strides_that_the_model_does_not_take_are_no_reason_to_refuse_others(optimized_by):
    asked = []

    def another(example):
        asked.append(example)
        if not example.args[0].is_contiguous():
            raise tsopt.CaptureError("the model views its input")
        return tsopt.compile(tsopt.capture(lambda input: input.reshape(-1, 3), example), "eager")

    fast = optimized_by("eager", another=another)
    for length in (3, 4, 5, 6, 7):
        fast(strided(length))
    assert len(asked) == 1 + specializations.MAX_LAYOUTS
    fast = optimized_by("eager", another=another)
    fast(strided(3))
    assert fast.serving((torch.randn(5, 6),), {}) is None
    assert fast(torch.randn(5, 6)).shape == (10, 3)


def test_strides_count_where_the_model_asks_for_them(optimized_by):
    def by_stride(input):
        return input * 2 if input.is_contiguous() else input - 1

    def another(example):
        return tsopt.compile(tsopt.capture(by_stride, example), "eager")

    fast = optimized_by("eager", another=another)
    for x in (torch.randn(6, 5).T, torch.randn(5, 6), torch.randn(6, 5).T):
        torch.testing.assert_close(fast(x), by_stride(x))
        assert fast.serving((x,), {}) is not None
