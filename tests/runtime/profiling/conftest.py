from __future__ import annotations

import pytest
import torch

from tests.runtime.profiling.models import Cnn, optimized
from tsopt.runtime.profiling.kernels import Kernel, Timed
from tsopt.runtime.profiling.limits import Limits
from tsopt.runtime.profiling.rows import profile_of
from tsopt.runtime.profiling.work import OpWork


@pytest.fixture(scope="module")
def cnn():
    return optimized(Cnn(), torch.randn(2, 3, 32, 32))


@pytest.fixture
def made(cnn, request):
    """Two engines, the second of which has fused the first two layers, and knows nothing of one of its kernels."""
    program, inputs = cnn
    convolutions = [node for node in program.calls() if "conv" in node.name]
    (head,) = (node for node in program.calls() if "linear" in node.name)
    torch_ = Timed(
        (*(Kernel("aten.conv2d", 2.0, (node,)) for node in convolutions), Kernel("aten.linear", 1.0, (head,))), 6.0
    )
    other = Timed(
        (Kernel("fused", 3.0, tuple(convolutions)), Kernel("gemm", 0.5, (head,)), Kernel("reorder", 0.25)), 4.0
    )
    # A layer takes as many milliseconds as it has million MACs, unless a test says what the machine can do.
    limits = Limits(macs=getattr(request, "param", 1e9), moved=((1, 1e18),))
    return profile_of("Cnn", {"torch": torch_, "engine": other}, OpWork(program, inputs), limits)
