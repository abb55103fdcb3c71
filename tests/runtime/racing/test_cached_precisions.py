"""What is known of a race in a lower precision: only for the same layers in it, and the same data to judge by."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.racing.cached import PACES, optimize, set_paces
from tsopt.runtime.racing import cache

DATA = [torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


@pytest.fixture(autouse=True)
def _paced(monkeypatch):
    set_paces(monkeypatch)
    monkeypatch.setitem(PACES, "eager + passes, precision bf16", 0.5)


def in_bfloat16(**options):
    optimize(**{"backends": ("eager",), "precision": "bf16", **options})


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ({}, {"keep_float": ("0",)}),
        ({"calibration": DATA}, {"calibration": [x * 2 for x in DATA]}),
        ({"calibration": DATA}, {"calibration": DATA[:3]}),
        ({"calibration": DATA}, {}),
        ({"calibration": DATA, "max_drop": 0.01}, {"calibration": DATA, "max_drop": 0.02}),
    ],
    ids=["layers", "values", "count", "none", "limit"],
)
def test_a_race_is_known_for_the_same_layers_and_data(races, first, other):
    in_bfloat16(**first)
    in_bfloat16(**first)
    assert [len(racing) for racing in races] == [2, 1], "the winner again"
    races.clear()
    in_bfloat16(**other)
    assert len(races[0]) == 2
    assert len(cache.entries()) == 2
