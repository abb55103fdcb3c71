from __future__ import annotations

import pytest
import torch

import tsopt
from tsopt.runtime.checking.accuracy import Oracle, verify

SECONDS = torch.tensor([1_700_000_000, 1_700_000_256])
ROWS = torch.randn(8, 10, generator=torch.Generator().manual_seed(0))


def judged(model, other, *example, **options):
    return Oracle(model, tsopt.example(*example), tsopt.capture(model, example)).judge(other, **options)


def test_an_argmax_that_breaks_a_tie_within_rounding_passes():
    tied = torch.tensor([[1.0, 1.0 + 1e-7, 0.0]])
    verdict = judged(lambda x: (x * 3).argmax(1), lambda x: (x.double() + torch.tensor([1e-6, 0, 0])).argmax(1), tied)
    assert verdict.ok
    assert verdict.test == "decision"
    assert "ties" in str(verdict)


def test_an_argmax_beyond_rounding_is_refused():
    clear = torch.tensor([[1.0, 1.1, 0.0]])
    with pytest.raises(tsopt.AccuracyError, match="1 of 1"):
        verify(lambda x: x.argmax(1), lambda x: torch.zeros(1, dtype=torch.int64), clear)


def test_a_comparison_within_rounding_passes_and_beyond_is_refused():
    near = torch.tensor([1.0, 2.0, 3.0 - 2e-7])
    model = lambda x: x * 3 >= 9.0  # noqa: E731
    assert verify(model, lambda x: x * 3 >= 9.0 - 1e-6, near).ok
    with pytest.raises(tsopt.AccuracyError):
        verify(model, lambda x: x * 3 >= 4.5, near)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.int32])
@pytest.mark.parametrize("apart", [0, 50], ids=["the same", "others"])
def test_numbers_that_nothing_has_rounded_are_compared_as_they_are(dtype, apart):
    t = SECONDS.to(dtype)
    candidate = lambda a, b: a.float() == b.float()  # noqa: E731
    with pytest.raises(tsopt.AccuracyError):
        verify(lambda a, b: a == b, candidate, (t, t + 50))
    assert verify(lambda a, b: a == b, lambda a, b: ~(a != b), (t, t + apart)).test == "bits"


def test_float64_that_is_compared_after_arithmetic_is_held_to_its_own_digits():
    t = SECONDS.double()
    with pytest.raises(tsopt.AccuracyError):
        verify(lambda a, b: a * 2 == b, lambda a, b: (a * 2 - b).abs() < 5000, (t, t * 2 + 2000))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("scale", [1.0, 1e-9])
def test_small_values_are_chosen_among_as_large_ones_are(precision, scale):
    model = lambda x: (x * scale).argmax(-1)  # noqa: E731
    assert not judged(model, lambda x: torch.zeros(8, dtype=torch.int64), ROWS, precision=precision).ok
    assert judged(model, lambda x: (x.double() * scale).argmax(-1), ROWS, precision=precision).ok
    assert not judged(lambda x: x * scale > scale, lambda x: x > 0, ROWS, precision=precision).ok


def test_hidden_scores_do_not_say_how_the_others_are_rounded():
    hidden = torch.zeros(10).index_fill(0, torch.arange(5, 10), -1e9)
    model = lambda x: (x * 3 + hidden).argmax(-1)  # noqa: E731
    assert not judged(model, lambda x: torch.zeros(8, dtype=torch.int64), ROWS).ok


def test_what_is_left_of_values_that_cancel_is_rounding():
    x = torch.linspace(1, 2, 64)
    model = lambda x: (x / 3 + x / 7) - x * (10 / 21) > 0  # noqa: E731
    assert model(x).any()
    assert judged(model, lambda x: torch.zeros_like(x, dtype=torch.bool), x).test == "decision"
    assert not judged(lambda x: (x / 3 + x / 7) - x * (10 / 22) > 0, model, x).ok


def test_a_place_that_does_not_exist_is_refused():
    assert not judged(lambda x: x.argmax(-1), lambda x: x.argmax(-1) - 20, ROWS).ok


def test_whole_numbers_may_be_chosen_in_another_order_only_where_they_are_equal():
    x = torch.tensor([[3, 5, 5, 1]])
    model = lambda x: x.argmax(-1)  # noqa: E731
    assert judged(model, lambda x: (x.shape[-1] - 1) - x.flip(-1).argmax(-1), x).ok
    near = torch.tensor([[2**40, 2**40 + 1]])
    assert not judged(model, lambda x: x.float().argmax(-1), near).ok


def test_complex_numbers_are_compared_in_both_parts():
    x = torch.complex(torch.ones(4), torch.arange(4.0))
    assert not judged(lambda x: x * 2 == 2.0, lambda x: x.real * 2 == 2.0, x).ok
