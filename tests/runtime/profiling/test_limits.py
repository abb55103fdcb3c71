"""The limits of a machine, and what a layer needs at least."""

from __future__ import annotations

import pytest
import torch

from tsopt.runtime.profiling import limits
from tsopt.runtime.profiling.limits import Limits, measured, narrowed
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


@pytest.mark.parametrize(
    ("precision", "inputs", "weights"),
    [("fp32", 400, 4000), ("bf16", 200, 2000), ("fp16", 200, 2000), ("int8", 400, 1000), ("int8-static", 100, 1000)],
)
def test_values_of_a_lower_precision_have_fewer_bytes(precision, inputs, weights):
    found = narrowed(Work(macs=7, inputs=400, weights=4000, outputs=400), precision)
    assert found == Work(macs=7, inputs=inputs, weights=weights, outputs=inputs)


def test_a_layer_in_a_lower_precision_takes_as_long_as_products_or_bytes_in_it():
    known = Limits(KNOWN.macs, KNOWN.moved, {"bf16": 4e9})
    assert known.seconds(Work(macs=10**9), "bf16") == 0.25
    assert known.seconds(Work(macs=1, weights=4_000_000), "bf16") == 1.0
    assert known.seconds(Work(macs=1), "int8") is None


def test_what_is_measured_is_positive_and_in_order(monkeypatch):
    monkeypatch.setattr(limits, "SECONDS", 0.0)
    monkeypatch.setattr(limits, "SIDES", (8, 16))
    monkeypatch.setattr(limits, "IMAGES", ((8, 4),))
    before = torch.get_num_threads()
    found = measured(threads=1, precisions=["bf16", "fp16", "int8", "another"])
    assert torch.get_num_threads() == before
    assert found.macs > 0
    assert [size for size, _ in found.moved] == sorted(limits.SIZES)
    assert all(rate > 0 for _, rate in found.moved)
    assert list(found.lowered) == ["bf16", "fp16", "int8"]
    assert all(rate > 0 for rate in found.lowered.values())


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
    assert limits._lower_product("int8") == 0
    assert limits._lower_product("bf16") > 0
