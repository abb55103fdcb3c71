"""`Optimized.verified`, which exports go through, judges at all sizes that the program is for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tsopt


def pooled(a0):
    """OpenVINO rounds the ends of the windows at some sizes."""
    return F.adaptive_avg_pool1d(a0, 3)


@pytest.fixture(scope="module")
def fast():
    return tsopt.optimize(
        pooled,
        torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0)),
        dynamic={"a0": {2: "s[1..32]"}},
        backends=("eager",),
        isolate=False,
        cache=False,
    )


def test_what_is_right_at_all_sizes_is_returned(fast):
    executable = fast.verified("torchscript")
    x = torch.randn(2, 6, 31)
    torch.testing.assert_close(executable(x), pooled(x))


def test_a_backend_that_is_wrong_at_other_sizes_is_refused(fast):
    with pytest.raises(tsopt.AccuracyError, match=r"openvino does not compute .* at s \d+"):
        fast.verified("openvino")
