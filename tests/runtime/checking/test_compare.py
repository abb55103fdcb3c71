from __future__ import annotations

import pytest
import torch

from tsopt.runtime.checking.compare import PART, compare

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [((3, 1), (1, 3)), ((3,), (1,)), ((), (1,)), ((0, 3), (0, 5))],
)
def test_another_shape_fails_even_where_it_would_broadcast(mine, theirs):
    found = compare(torch.ones(mine), torch.ones(theirs))
    assert not found.ok
    assert found.test == "type"
    assert "shape" in found.reason


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_another_dtype_fails_although_the_values_are_equal(dtype):
    found = compare(torch.ones(3, dtype=dtype), torch.ones(3))
    assert not found.ok
    assert "dtype" in found.reason


def test_another_device_fails():
    assert "device" in compare(torch.ones(2, device="meta"), torch.ones(2)).reason


def test_none_where_eager_returns_a_tensor_fails():
    assert "NoneType" in compare(None, torch.ones(2)).reason


@pytest.mark.parametrize(
    ("mine", "theirs", "reason"),
    [
        ([NAN, NAN], [1.0, 2.0], "NaN"),
        ([1.0, 2.0], [NAN, NAN], "NaN"),
        ([NAN, 1.0, 1.0], [1.0, NAN, 1.0], "NaN"),
        ([INF, 1.0], [-INF, 1.0], "infinities"),
        ([INF, 1.0], [3e38, 1.0], "infinities"),
        ([3e38, 1.0], [INF, 1.0], "infinities"),
    ],
)
def test_nan_and_inf_at_other_places_fail(mine, theirs, reason):
    found = compare(torch.tensor(mine), torch.tensor(theirs))
    assert not found.ok
    assert reason in found.reason


def test_nan_and_inf_at_the_same_places_pass():
    value = torch.tensor([NAN, INF, -INF, 1.0])
    assert compare(value, value.clone()).test == "bits"
    assert compare(value + torch.tensor([0, 0, 0, 1e-6]), value).ok


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_the_sign_of_zero_counts_only_for_exact(dtype):
    minus, plus = torch.tensor([-0.0, 1.0]).to(dtype), torch.tensor([0.0, 1.0]).to(dtype)
    assert compare(minus, plus).ok
    assert not compare(minus, plus, exact=True).ok


def test_the_payload_of_nan_does_not_count_for_exact():
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert compare(other, torch.tensor([NAN]), exact=True).ok


def test_one_unit_in_the_last_place_fails_exact_alone():
    reference = torch.tensor([1.0, 2.0])
    near = torch.nextafter(reference, torch.tensor(INF))
    assert compare(near, reference).test == "element"
    assert not compare(near, reference, exact=True).ok


def test_equal_empty_tensors_pass():
    assert compare(torch.empty(0, 3), torch.empty(0, 3)).ok
    assert compare(torch.empty(0, 3), torch.empty(0, 3), exact=True).ok


def test_unsigned_values_are_compared_after_widening():
    found = compare(torch.tensor([200], dtype=torch.uint8), torch.tensor([201], dtype=torch.uint8))
    assert not found.ok
    assert found.max_difference == 1


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.uint8])
def test_one_other_integer_fails_and_is_counted(dtype):
    reference = torch.zeros(5, dtype=dtype)
    other = reference.clone()
    other[3] = 1
    assert compare(reference.clone(), reference).test == "bits"
    assert "1 of 5" in compare(other, reference).reason


def test_a_scaled_output_fails_although_its_cosine_is_one():
    reference = torch.randn(100)
    assert not compare(5 * reference, reference).ok


def test_one_bad_element_in_a_million_fails_both_tests():
    reference = torch.randn(1_000_000)
    bad = reference.clone()
    bad[777_777] += 0.1
    assert "1 of 1000000" in compare(bad, reference).reason
    found = compare(bad, reference, reference64=lambda: reference.double())
    assert not found.ok
    assert found.test == "float64"


@pytest.mark.parametrize("size", [PART - 1, PART, PART + 1, 2 * PART + 7])
@pytest.mark.parametrize("change", [0.1, float("nan"), float("inf")])
def test_what_is_compared_part_by_part_is_compared_to_the_last_element(size, change):
    reference = torch.randn(size, generator=torch.Generator().manual_seed(0))
    assert compare(reference * (1 + 1e-6), reference).ok
    for place in (0, size - 1, min(PART, size - 1)):
        bad = reference.clone()
        bad[place] += change
        found = compare(bad, reference)
        assert not found.ok
        if change == 0.1:
            assert found.max_difference == pytest.approx(0.1, rel=1e-3)
            assert found.reason.startswith(f"1 of {size} values")


def test_the_tolerance_is_of_the_whole_output_and_not_of_a_part():
    reference = torch.cat([torch.full((PART,), 1e3), torch.full((PART,), 1e-3)])
    assert compare(reference + 5e-3, reference).ok
    assert not compare(reference + 5e-2, reference).ok


def test_layout_does_not_count():
    reference = torch.randn(4, 5)
    assert compare(reference.t().contiguous().t(), reference, exact=True).ok


def test_the_element_test_takes_rounding_and_no_more():
    reference = torch.linspace(1, 2, 50)
    assert compare(reference * (1 + 5e-5), reference).test == "element"
    assert not compare(reference * (1 + 1e-3), reference).ok


def test_the_absolute_tolerance_grows_with_large_outputs():
    reference = torch.tensor([1e6, -1e6, 0.0])
    assert compare(reference + 1.0, reference).ok
    assert not compare(reference + 1e4, reference).ok


@pytest.mark.parametrize("with_truth", [False, True])
def test_huge_numbers_do_not_hide_the_others(with_truth):
    reference = torch.tensor([1e300, -1e300, 2.0, 1e3], dtype=torch.float64)
    truth = (lambda: reference) if with_truth else None
    assert compare(reference * (1 + 1e-9), reference, reference64=truth).ok
    for position in range(4):
        other = reference.clone()
        other[position] *= 1.5
        assert not compare(other, reference, reference64=truth).ok


@pytest.mark.parametrize("size", [1e300, 1e-300])
def test_where_all_numbers_are_huge_or_tiny_these_are_the_size(size):
    reference = torch.tensor([1.0, -2.0, 1e-12], dtype=torch.float64) * size
    assert compare(reference + 1e-9 * size, reference).ok
    assert not compare(reference + 1e-5 * size, reference).ok


def test_errors_in_huge_numbers_are_compared_with_eagers():
    truth = torch.full((2000,), 1e200, dtype=torch.float64)
    eager = truth * (1 + 1e-6)
    assert compare(truth * (1 - 1e-6), eager, reference64=lambda: truth).ok
    assert not compare(truth * (1 - 1e-5), eager, reference64=lambda: truth).ok


def test_the_limit_of_a_lower_precision_holds_for_huge_numbers():
    reference = torch.tensor([1e200, 1e200], dtype=torch.float64)
    assert compare(reference * 1.005, reference, limit=0.01).ok
    assert not compare(reference * 1.5, reference, limit=0.01).ok


def test_half_precision_differences_do_not_overflow():
    reference = torch.tensor([6e4, -6e4], dtype=torch.float16)
    found = compare(-reference, reference)
    assert not found.ok
    assert found.max_difference == pytest.approx(1.2e5, rel=1e-2)


@pytest.mark.parametrize("part", [torch.conj, lambda x: x.conj().imag], ids=["conjugated", "negated"])
def test_values_that_are_read_conjugated_or_negated_are_compared(part):
    x = torch.complex(torch.tensor([1.0, -0.0]), torch.tensor([2.0, 3.0]))
    plain = part(x).resolve_conj().resolve_neg()
    assert compare(part(x), plain, exact=True).test == "bits"
    assert compare(plain + 1e-7, part(x)).ok
    assert not compare(part(x), -plain).ok


def test_complex_values_are_compared_as_their_parts():
    reference = torch.randn(4, dtype=torch.complex64)
    assert compare(reference * (1 + 1e-6), reference).ok
    assert not compare(reference.conj().resolve_conj(), reference).ok


def test_as_close_to_float64_as_eager_passes_where_the_element_test_fails():
    truth = torch.ones(2000, dtype=torch.float64)
    eager = (truth + 0.01).float()
    mine = (truth - 0.01).float()
    assert not compare(mine, eager).ok
    found = compare(mine, eager, reference64=lambda: truth)
    assert found.ok
    assert found.test == "float64"


def test_further_from_float64_than_eager_fails():
    truth = torch.ones(2000, dtype=torch.float64)
    eager = (truth + 1e-3).float()
    assert not compare((truth + 5e-3).float(), eager, reference64=lambda: truth).ok


@pytest.mark.parametrize("truth", [None, torch.full((2,), NAN).double(), torch.ones(3).double()])
def test_the_float64_test_is_void_without_a_sound_reference(truth):
    found = compare(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), reference64=lambda: truth)
    assert not found.ok
    assert found.test == "element"


def test_float64_does_not_decide_where_eager_is_far_from_it():
    """Another branch was taken in float64, so the distance to it says nothing about rounding."""
    truth = torch.ones(2000, dtype=torch.float64)
    found = compare((truth + 0.3).float(), (truth + 0.4).float(), reference64=lambda: truth)
    assert not found.ok
    assert found.reason.endswith("; eager is too far from float64 for it to decide")


@pytest.mark.parametrize(
    ("moved", "test"), [(0.4, "undecided"), (1e-3, "float64"), (None, "float64")], ids=["far", "near", "no neighbour"]
)
def test_where_eager_is_far_from_float64_it_is_undecided_only_if_rounding_moves_it_as_far(moved, test):
    truth = torch.ones(2000, dtype=torch.float64)
    draws = [] if moved is None else [far(0.4 + moved)]
    found = compare(far(0.2), far(0.4), reference64=lambda: truth, neighbours=lambda: draws)
    assert (found.ok, found.test) == (False, test)
    assert found.reason.endswith("; eager is too far from float64 for it to decide")


def test_float64_itself_has_no_better_reference():
    reference = torch.ones(2, dtype=torch.float64)
    assert not compare(reference + 1e-5, reference, reference64=lambda: reference).ok


def test_a_float64_output_of_float32_values_is_as_good_as_eager():
    truth = torch.ones(2, dtype=torch.float64)
    found = compare(truth - 2e-7, truth + 2e-7, reference64=lambda: truth)
    assert (found.ok, found.test) == (True, "float64")
    assert not compare(truth - 2e-5, truth + 2e-7, reference64=lambda: truth).ok


def test_float64_decides_nothing_where_eager_is_far_from_it():
    truth = torch.linspace(1, 2, 2000, dtype=torch.float64)
    eager = (truth * 1.2).float()
    near = (truth * 1.19).float()
    assert not compare(near, eager, reference64=lambda: truth).ok
    close = (truth * 1.001).float()
    assert compare((truth * 1.0015).float(), close, reference64=lambda: truth).ok


def far(by, count=2000):
    """A value that is so far from ones, half of its elements above and half below."""
    signs = torch.ones(count, dtype=torch.float64)
    signs[::2] = -1
    return (1 + by * signs).float()


def test_eagers_error_is_the_largest_of_several_draws():
    truth = torch.ones(2000, dtype=torch.float64)
    mine, eager = far(5e-3), far(1e-3)
    assert not compare(mine, eager, reference64=lambda: truth).ok
    for draws, accepted in (([1e-3, 2e-3], False), ([1e-3, 3e-3], True), ([9e-3], False), ([NAN], False)):
        found = compare(mine, eager, reference64=lambda: truth, neighbours=lambda draws=draws: map(far, draws))
        assert (found.ok, found.test) == (accepted, "float64"), draws


def test_no_more_is_drawn_than_it_takes():
    truth, drawn = torch.ones(2000, dtype=torch.float64), []

    def draws():
        for by in (4e-3, 1e-3):
            drawn.append(by)
            yield far(by)

    assert compare(far(5e-3), far(1e-3), reference64=lambda: truth, neighbours=draws).ok
    assert drawn == [4e-3]
    assert compare(far(5e-3), far(5e-3), reference64=lambda: truth, neighbours=draws).ok
    assert drawn == [4e-3], "no draws needed: eager's own error is large enough"


def test_complex_neighbours():
    truth = torch.ones(2000, dtype=torch.complex128)
    mine, eager = (torch.complex(far(by), torch.zeros(2000)) for by in (5e-3, 1e-3))
    near = torch.complex(far(4e-3), torch.zeros(2000))
    assert not compare(mine, eager, reference64=lambda: truth).ok
    assert compare(mine, eager, reference64=lambda: truth, neighbours=lambda: [near]).ok


@pytest.mark.parametrize(("steps", "ok"), [(0, True), (4, False)])
def test_a_neighbour_with_elements_far_away_excuses_nothing(steps, ok):
    """A few elements that rounding moves to the next level hardly change the RMSE."""
    reference = torch.rand(300_000, generator=torch.Generator().manual_seed(0)) + 1
    near, result = reference * (1 + 3e-4), reference * (1 - 3e-4)
    near[:steps] += 0.25
    found = compare(result, reference, moved=lambda: [near])
    assert (found.ok, found.test) == (ok, "rounding" if ok else "element")


@pytest.mark.parametrize(
    "change", [lambda value: value + 0.02, lambda value: value.index_fill(0, torch.tensor([7]), 9.0)]
)
def test_the_model_is_not_called_for_neighbours_that_could_not_excuse_a_result(change):
    """A call of a detector takes seconds: the outputs differ by more than any neighbour may."""
    reference = torch.rand(3000, generator=torch.Generator().manual_seed(0)) + 1
    asked = []
    assert not compare(change(reference), reference, moved=lambda: asked.append(1) or [reference]).ok
    assert asked == []
    assert not compare(reference * (1 + 1e-3), reference, moved=lambda: asked.append(1) or [reference]).ok
    assert asked == [1]


@pytest.mark.parametrize("at", [[0], [PART + 5], [3, 2 * PART + 1]])
def test_errors_in_any_part_of_a_large_tensor_count(at):
    """Large tensors are compared piece by piece."""
    reference = torch.rand(2 * PART + 100, generator=torch.Generator().manual_seed(0)) + 1
    result, truth = reference.clone(), reference.double()
    result[at] += 0.25
    found = compare(result, reference, reference64=lambda: truth)
    assert (found.ok, found.max_difference) == (False, pytest.approx(0.25, rel=1e-5))
    rmse = 0.25 * (len(at) / len(reference)) ** 0.5
    assert f"against float64: RMSE {rmse:.3g} (eager 0), largest error 0.25 (eager 0)" in found.reason
    assert compare(result, reference, limit=1e-3).ok == (rmse <= 1e-3 * float(truth.square().mean().sqrt()))


@pytest.mark.parametrize("odd", [NAN, INF, -INF])
def test_what_is_not_finite_in_any_part_of_a_large_tensor_has_its_place(odd):
    reference = torch.ones(2 * PART)
    reference[PART + 7] = odd
    assert compare(reference + 1e-7, reference).ok
    other = torch.ones(2 * PART)
    other[PART + 8] = odd
    assert compare(other, reference).test == "places"
    assert compare(reference + 0.5, reference).max_difference == 0.5
