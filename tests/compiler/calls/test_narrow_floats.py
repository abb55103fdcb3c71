from __future__ import annotations

import pytest
import torch

from tsopt.compiler.calls.narrow_floats import widened


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu])
def test_all_values_of_one_byte_are_kept(dtype):
    every = torch.arange(256).to(torch.uint8).view(dtype)
    wide = widened(every)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.isnan(), every.isnan())
    again = wide.to(dtype).view(torch.uint8)
    assert torch.equal(again[~wide.isnan()], every.view(torch.uint8)[~wide.isnan()])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int8, torch.uint8, torch.bool, torch.complex64])
def test_others_are_as_they_are(dtype):
    value = torch.ones(2, dtype=dtype)
    assert widened(value) is value
