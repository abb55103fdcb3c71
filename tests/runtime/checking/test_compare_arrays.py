"""Arrays are compared as tensors are, where torch is not installed."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tsopt.runtime.checking import accuracy, compare, compare_arrays
from tsopt.runtime.checking.compare_arrays import compare_arrays as compared

DTYPES = ("float16", "float32", "float64", "complex64", "int64", "uint8", "bool")


def test_the_tolerances_are_those_of_tensors():
    known = {str(dtype).removeprefix("torch."): item[:2] for dtype, item in compare.TOLERANCES.items()}
    known.pop("bfloat16")  # numpy has none
    assert known == compare_arrays.TOLERANCES
    assert (accuracy.LIMITS, compare.FLIPPED) == (compare_arrays.LIMITS, compare_arrays.FLIPPED)


@given(st.data(), st.sampled_from(DTYPES), st.sampled_from([None, 0.01, 0.03]))
@settings(max_examples=150, deadline=None, database=None, derandomize=True)
def test_the_verdict_is_that_on_tensors(data, dtype, limit):
    made = arrays.arrays(dtype, (data.draw(st.integers(0, 6)),))
    reference = data.draw(made)
    result = data.draw(st.one_of(made.filter(lambda value: value.shape == reference.shape), st.just(reference.copy())))
    with np.errstate(all="ignore"):
        if data.draw(st.booleans()) and reference.dtype.kind in "fc":
            result = (reference * reference.dtype.type(1 + 1e-5)).astype(dtype)
        mine = compared(result, reference, limit=limit)
    theirs = compare.compare(torch.from_numpy(result.copy()), torch.from_numpy(reference.copy()), limit=limit)
    assert mine.ok == theirs.ok, (result, reference, mine, theirs)


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (np.ones((1, 3), np.float32), r"float32 \[1, 3\], expected float32"),
        (np.ones(3, np.float64), "float64"),
        (np.array([1, 1, np.nan], np.float32), "NaN"),
        (np.array([1, 1, 1.01], np.float32), "1 of 3 values"),
    ],
)
def test_what_differs_is_said(result, reason):
    found = compared(result, np.ones(3, np.float32))
    assert not found.ok
    assert re.search(reason, found.reason)


@pytest.mark.parametrize(("limit", "places"), [(None, (0, 1, 2)), (0.01, (0, 1))])
def test_huge_numbers_do_not_hide_others(limit, places):
    reference = np.array([1e300, -1e300, 2.0])
    assert compared(reference * (1 + 1e-9), reference, limit=limit).ok
    for place in places:
        other = reference.copy()
        other[place] *= 1.5
        assert not compared(other, reference, limit=limit).ok
