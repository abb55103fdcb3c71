"""Ops that the exporter of torch does not know, or does not get right, through ONNX Runtime and OpenVINO."""

from __future__ import annotations

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  registers an op
from torch import nn

import tsopt
from tsopt.runtime.backends.backend import get_backend
from tsopt.runtime.onnx.export import to_onnx

GROUPS = {
    "each": [2, 5, 6, 10],
    "an empty one": [0, 4, 4, 10],
    "all in one": [10, 10, 10, 10],
    "all in the last": [0, 0, 0, 10],
    "none": [0, 0, 0, 0],
    "rows left over": [1, 3, 6, 7],
}
X = torch.randn(10, 16, generator=torch.Generator().manual_seed(0))
W = torch.randn(4, 16, 24, generator=torch.Generator().manual_seed(1))
ENDS = {name: torch.tensor(ends, dtype=torch.int32) for name, ends in GROUPS.items()}


class Experts(nn.Module):
    """Products of experts; torch's own op is captured in bfloat16 alone."""

    def __init__(self, narrow, turned):
        super().__init__()
        weight = W.mT.contiguous().mT if turned else W
        self.weight = nn.Parameter(weight.bfloat16() if narrow else weight, requires_grad=False)
        self.narrow = narrow

    def forward(self, x, offs):
        if self.narrow:
            return torch._grouped_mm(x.bfloat16(), self.weight, offs=offs).float()
        return torch.ops.transformers.grouped_mm_fallback(x, self.weight, offs=offs)


@pytest.mark.sliced(2)
@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("turned", [False, True], ids=["as it is", "transposed"])
def test_products_in_groups(backend, narrow, turned):
    model = Experts(narrow, turned)
    run = tsopt.compile(tsopt.capture(model, (X, ENDS["each"])), backend)
    for ends in ENDS.values():
        # What torch's own op leaves in the rows behind the last group is anything.
        used = int(ends[-1]) if narrow else len(X)
        close = {"rtol": 2**-7, "atol": 1e-2} if narrow else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(run(X, ends)[:used], model(X, ends)[:used], **close)


def test_other_forms_of_the_product_are_refused_by_name():
    class Net(nn.Module):
        def forward(self, x, w):
            return torch._grouped_mm(x, w).float()

    program = tsopt.capture(Net(), (torch.randn(2, 8, 16).bfloat16(), torch.randn(2, 16, 8).bfloat16()))
    with pytest.raises(tsopt.BackendError, match="_grouped_mm"):
        to_onnx(program)


def test_an_op_that_only_computes_is_dropped_and_shared():
    def model(x, offs):
        unused = torch.ops.transformers.grouped_mm_fallback(x, W, offs=offs)
        twice = [torch.ops.transformers.grouped_mm_fallback(x + 0, W, offs=offs) for _ in range(2)]
        return twice[0] + twice[1] + unused.shape[0]

    program = tsopt.transform(tsopt.capture(model, (X, ENDS["each"])))
    assert sum("grouped_mm" in str(node.target) for node in program.calls()) == 1


@pytest.mark.sliced(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.uint8, torch.bool], ids=str)
def test_signbit_tells_minus_zero_from_zero(dtype):
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e30, -1e30, 1e-30, -1e-30, torch.inf, -torch.inf])
    x = values.to(dtype) if dtype.is_floating_point else values[:3].to(dtype)
    found = tsopt.compile(tsopt.capture(torch.signbit, x), "onnxruntime")(x)
    assert torch.equal(found, torch.signbit(x))


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
@pytest.mark.parametrize(("low", "high"), [(0.5, 2), (-1, 1.5), (1e-6, 1), (0, 6), (0.5, 2.5), (None, 2), (1, None)])
def test_bounds_may_be_of_different_types(backend, low, high):
    class Net(nn.Module):
        def forward(self, x, i):
            return x.clamp(low, high), i.clamp(min=low, max=high) * 1.0

    x, i = torch.linspace(-4, 8, 24).view(4, 6), torch.arange(-4, 8)
    found = tsopt.compile(tsopt.transform(tsopt.capture(Net(), (x, i))), backend)(x, i)
    assert all(map(torch.equal, found, Net()(x, i)))


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_atan2_takes_sides_by_the_signs_of_zeros(backend, dtype):
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e30, -1e30, 1e-30, -1e-30, 3.0, -2.0])
    values = values if dtype.is_floating_point else torch.arange(-2, 3)
    y, x = values.view(-1, 1), values
    found = tsopt.compile(tsopt.capture(torch.atan2, (y, x)), backend)(y, x)
    torch.testing.assert_close(found, torch.atan2(y, x), rtol=0, atol=1e-6)


class Shifted(nn.Module):
    """Positions from the middle of a table: before it for rows longer than that."""

    def forward(self, x):
        n = x.shape[1]
        places = torch.arange(n)
        return x + (places + (64 - n) // 2), x + (places + n // -3 + (7 - n) % 3)


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_quotients_of_sizes_are_rounded_down(backend):
    program = tsopt.transform(tsopt.capture(Shifted(), torch.randn(2, 48), dynamic={"x": {1: "n[2..80]"}}))
    run = tsopt.compile(program, backend)
    for size in (2, 63, 64, 65, 71, 72, 80):
        x = torch.randn(2, size, generator=torch.Generator().manual_seed(size))
        torch.testing.assert_close(run(x), Shifted()(x))


LARGE = torch.cat([torch.tensor([2.0**30, -(2.0**30)]), torch.ones(14)]).expand(3, 16).contiguous()
WHOLE = torch.arange(12).view(3, 4)
IN_ANOTHER_DTYPE = {
    "mean": (lambda x: x.mean(-1, dtype=torch.float64).float(), LARGE),
    "mean of float16": (lambda x: x.half().mean(-1, dtype=torch.float32), LARGE.clamp(-1, 2048)),
    "mean of integers": (lambda x: x.mean(1, dtype=torch.float32), WHOLE),
    "sum": (lambda x: x.sum(-1, dtype=torch.float64).float(), LARGE[:, [0, 2, 1]]),
    "sum of integers": (lambda x: (x.int() * 2**28).sum(-1, dtype=torch.int64), WHOLE % 4),
    "softmax of integers": (lambda x: x.softmax(-1, dtype=torch.float32), WHOLE),
    "log_softmax of integers": (lambda x: x.log_softmax(-1, dtype=torch.float32), WHOLE),
    "special softmax": (lambda x: torch.special.softmax(x, -1, dtype=torch.float32), WHOLE),
    "special log_softmax": (lambda x: torch.special.log_softmax(x, -1, dtype=torch.float32), WHOLE),
    "softmax": (lambda x: x.softmax(-1, dtype=torch.float64), torch.linspace(-3, 3, 12).view(3, 4)),
}


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("name", IN_ANOTHER_DTYPE)
def test_results_of_another_dtype_are_computed_in_that_dtype(name, backend):
    model, x = IN_ANOTHER_DTYPE[name]
    wanted = model(x)
    program = tsopt.capture(model, x)
    if backend == "openvino" and get_backend(backend).unsupported(program):  # float64
        assert name in ("mean", "sum", "softmax", "sum of integers")
        return
    close = {"rtol": 1e-12, "atol": 0} if wanted.dtype == torch.float64 else {}
    torch.testing.assert_close(tsopt.compile(program, backend)(x), wanted, **close)
