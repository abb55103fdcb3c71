from __future__ import annotations

import numpy as np
import pytest
import torch

from tsopt.compiler.calls.memory import is_repeated, overlap, overlaps

BASE = torch.arange(24.0)


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        (BASE, BASE, True),
        (BASE[:9], BASE[3:12], True),
        (BASE[:9], BASE[9:], False),
        (BASE.view(4, 6), BASE.view(4, 6).t(), True),
        (BASE[::2], BASE[1::2], True),  # in between each other: taken for one memory
        (BASE, BASE.clone(), False),
        (BASE[:0], BASE, False),
        (BASE[:1].expand(24), BASE[1:], False),
    ],
)
def test_memory_that_two_tensors_share(a, b, found):
    assert overlap(a, b) == overlap(b, a) == found
    assert overlaps([a, BASE.clone(), b]) == (((0, 2),) if found else ())


def test_arrays_are_looked_at_alike():
    base = np.arange(24.0)
    assert overlap(base[:9], base[3:])
    assert not overlap(base[:9], base[9:])
    assert overlap(base.reshape(4, 6), base.reshape(4, 6).T[::-1])


def test_other_devices_share_nothing():
    assert not overlap(BASE, BASE.to("meta"))


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (BASE, False),
        (BASE.view(4, 6).t(), False),
        (BASE[:1].expand(24), True),
        (BASE[:1].expand(1), False),
        (np.broadcast_to(np.arange(3.0), (2, 3)), True),
        (np.arange(3.0), False),
    ],
)
def test_elements_that_are_one_place_in_memory(value, found):
    assert is_repeated(value) is found
