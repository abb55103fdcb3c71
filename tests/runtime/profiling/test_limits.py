"""The limits of a machine, and what a layer needs at least."""

from __future__ import annotations

import pytest
import torch

from tsopt.runtime.profiling import limits
from tsopt.runtime.profiling.limits import Limits, measured
from tsopt.runtime.profiling.work import Work

KNOWN = Limits(macs=1e9, moved=((1000, 4e6), (10_000, 8e6), (100_000, 2e6)))


@pytest.mark.parametrize(
    ("size", "rate"), [(10, 8e6), (1000, 8e6), (9_999, 8e6), (10_000, 8e6), (99_999, 8e6), (100_000, 2e6), (10**9, 2e6)]
)
def test_a_working_set_is_moved_as_fast_as_any_that_is_not_smaller(size, rate):
    assert KNOWN.bandwidth(size) == rate


def test_a_layer_takes_as_long_as_its_products_or_its_bytes():
    assert KNOWN.seconds(Work(macs=10**9)) == 1.0
    assert KNOWN.seconds(Work(macs=1, weights=2_000_000)) == 1.0
    assert KNOWN.seconds(Work()) == 0.0


def test_what_is_measured_is_positive_and_in_order(monkeypatch):
    monkeypatch.setattr(limits, "SECONDS", 0.0)
    monkeypatch.setattr(limits, "SIDES", (8, 16))
    monkeypatch.setattr(limits, "IMAGES", ((8, 4),))
    before = torch.get_num_threads()
    found = measured(threads=1)
    assert torch.get_num_threads() == before
    assert found.macs > 0
    assert [size for size, _ in found.moved] == sorted(limits.SIZES)
    assert all(rate > 0 for _, rate in found.moved)


@pytest.mark.parametrize(("product", "convolution"), [(3e9, 2e9), (2e9, 3e9)])
def test_products_and_convolutions_count_whichever_reaches_more(monkeypatch, product, convolution):
    monkeypatch.setattr(limits, "_product", lambda side: product)
    monkeypatch.setattr(limits, "_convolution", lambda channels, side: convolution)
    monkeypatch.setattr(limits, "_copy", lambda size: 1e9)
    assert measured().macs == 3e9


def test_without_onednn_there_are_products(monkeypatch):
    monkeypatch.setattr(limits, "SECONDS", 0.0)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert limits._convolution(8, 4) == 0
    assert limits._product(8) > 0
