from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

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


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("then", [torch.Tensor.long, lambda count: count >= 300], ids=["cut", "compared"])
def test_a_count_is_not_rounded(then, missing):
    x = torch.ones(2, 300)
    verdict = judged(lambda x: then((x > 0).float().sum(1)), lambda x: then((x > 0).float().sum(1) - missing), x)
    assert verdict.ok == (not missing)


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


# ---- what is another number than the other decision gives ----------------------------------------------------

SHADES = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 1.2


def pixels(x):
    return (x * 255.0).clamp(0.0, 255.0).to(torch.uint8)


@pytest.mark.parametrize("model", [pixels, lambda x: (x * 255.0).round().clamp(0.0, 255.0).to(torch.uint8)])
@pytest.mark.parametrize("wrong", [0, 254, 17])
def test_a_whole_number_on_which_rounding_has_no_hold_is_not_replaced_by_any_other(model, wrong):
    verdict = judged(model, lambda x: model(x).masked_fill(model(x) == 255, wrong), SHADES)
    assert not verdict.ok
    assert "uint8 values differ" in verdict.reason


def rounded_otherwise(x, way):
    product = x.double() * 255.0
    return torch.where(product == x * 255.0, product, product * (1 + way * 1e-6))


@pytest.mark.parametrize("way", [1, -1])
@pytest.mark.parametrize("cut", [torch.trunc, torch.floor, torch.ceil, torch.round])
def test_a_number_next_to_a_jump_becomes_what_is_on_either_side_of_it_and_nothing_else(cut, way):
    middles = (torch.arange(1.0, 200.0) + (0.5 if cut is torch.round else 0.0)) / 255.0
    edges = torch.cat([middles * (1 + side * 2**-23) for side in (-1, 0, 1)])
    model = lambda x: cut(x * 255.0).clamp(0.0, 255.0).to(torch.uint8)  # noqa: E731
    near = lambda x: cut(rounded_otherwise(x, way)).clamp(0.0, 255.0).to(torch.uint8)  # noqa: E731
    assert judged(model, near, edges).test == "decision"
    assert not judged(model, lambda x: (near(x).int() + way * 2).clamp(0, 255).to(torch.uint8), edges).ok


SEVENTHS = {
    "ceil": (lambda y: y.ceil().long(), 7),
    "floor": (lambda y: y.floor().to(torch.int32), -7),
    "a cast": (lambda y: y.clamp(0, 9).to(torch.uint8), 41),
    "equal": (lambda y: y == 3, 7),
    "greater": (lambda y: y > 3, 7),
    "a part of a mask": (lambda y: ~((y > 3) & (y < 5)), 7),
    "a difference": (lambda y: (y - 1).ceil().long(), 7),
    "copies": (lambda y: F.interpolate(y[None], scale_factor=2).ceil().int(), 7),
}


@pytest.mark.parametrize("case", SEVENTHS)
def test_where_eager_gives_the_exact_quotient_another_one_is_wrong(case):
    made, divisor = SEVENTHS[case]
    x = torch.arange(1.0, 41.0).reshape(1, 40)
    model = lambda x: made(x / divisor)  # noqa: E731
    found = judged(model, lambda x: made(x * (1 / divisor)), x)
    assert not found.ok
    assert judged(model, lambda x: made(x.double() / divisor), x).ok


def test_an_exact_square_root_is_not_off_by_rounding():
    model = lambda x: (x * x).sqrt().floor().long()  # noqa: E731
    assert not judged(model, lambda x: (x * x * (1 - 2**-22)).sqrt().floor().long(), torch.arange(9.0)).ok


def test_an_exact_sum_of_many_may_be_computed_in_another_way():
    model = lambda x: (x.sum(1) / 3).ceil().long()  # noqa: E731
    x = torch.arange(24.0).reshape(4, 6)
    assert judged(model, lambda x: ((x.double() * (1 / 3)).sum(1) * (1 + 1e-7)).ceil().long(), x).test == "decision"


def test_a_cast_that_wraps_is_not_taken_for_one_that_saturates():
    def model(x):
        return (x * 2147483648.0).clamp(-2147483648.0, 2147483647.0).to(torch.int32)

    x = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    x[:4] = 1.0
    wrong = lambda x: torch.where(model(x) == 2147483647, -2147483648, model(x))  # noqa: E731
    assert not judged(model, wrong, x).ok


def test_large_numbers_may_be_off_by_what_their_dtype_cannot_tell():
    x = torch.rand(64, generator=torch.Generator().manual_seed(0)) + 1
    model = lambda x: (x * 3e8).clamp(0, 1e9).to(torch.int64)  # noqa: E731
    assert judged(model, lambda x: (x.double() * 3e8).clamp(0, 1e9).to(torch.int64), x).test == "decision"
    assert not judged(model, lambda x: (x.double() * 3.01e8).clamp(0, 1e9).to(torch.int64), x).ok


NEAR_A_HALF = torch.tensor([0.1, 0.2, 0.5 - 1e-7, 0.5, 0.5 + 1e-7, 0.9]) / 3
MASKS = {
    "a cast": (lambda y, t: (y > t).long(), None),
    "not": (lambda y, t: ~(y > t), None),
    "logical not": (lambda y, t: torch.logical_not(y > t), None),
    "and": (lambda y, t: (y > t) & (y < 2), None),
    "or": (lambda y, t: (y > t) | (y > 2), None),
    "a choice of numbers": (lambda y, t: torch.where(y > t, 255, 7), 9),
    "a choice of tensors": (lambda y, t: torch.where(y > t, torch.arange(6), -torch.arange(6)), 99),
    "a choice of decisions": (lambda y, t: torch.where(y < 9, (y > t) & (y < 2), -1), -1),
    "a choice of their opposites": (lambda y, t: torch.where(y < 9, ~(y > t), 7), 7),
    "a choice that is true or false": (lambda y, t: torch.where(y < 9, y > t, False), None),
    "several": (lambda y, t: torch.where(~((y > t) & (y < 2)), 3, torch.where(y > t, 4, 5)), 6),
}


@pytest.mark.parametrize("case", MASKS)
def test_what_is_made_of_a_comparison_may_be_what_the_other_decision_gives(case):
    made, other = MASKS[case]
    model = lambda x: made(x * 3, 0.5)  # noqa: E731
    assert judged(model, lambda x: made(x.double() * 3, 0.5 - 1e-5), NEAR_A_HALF).test == "decision"
    assert not judged(model, lambda x: made(x * 3, 0.3), NEAR_A_HALF * 0.8).ok
    if other is not None:
        third = lambda x: torch.where((x * 3 - 0.5).abs() < 1e-5, other, model(x))  # noqa: E731
        assert not judged(model, third, NEAR_A_HALF).ok


def in_all_bands(y, lowest):
    inside = y > lowest
    for number in range(12):
        inside = inside & (y < 2 + number)
    return inside


class Sorts(TorchDispatchMode):
    """Counts calls that sort."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket is torch.ops.aten.sort
        return func(*args, **(kwargs or {}))


def test_of_many_decisions_each_is_looked_at_once():
    model = lambda x: in_all_bands(x * 3, 0.5)  # noqa: E731
    with Sorts() as sorts:
        verdict = judged(model, lambda x: in_all_bands(x.double() * 3, 0.5 - 1e-5), NEAR_A_HALF)
    assert verdict.test == "decision"
    assert 0 < sorts.count <= 13 * len(verdict.inputs)
    assert not judged(model, lambda x: in_all_bands(x * 3, 0.3), NEAR_A_HALF * 0.8).ok


def test_a_decision_of_numbers_that_are_compared_as_they_are_stays_one_behind_a_choice():
    model = lambda x: torch.where(x > 0.5, 1, 0)  # noqa: E731
    assert not judged(model, lambda x: torch.where(x > 0.5 - 1e-5, 1, 0), torch.tensor([0.1, 0.5, 0.9])).ok
