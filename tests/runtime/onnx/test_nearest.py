"""Nearest-neighbor upsampling through ONNX Runtime and OpenVINO reads the elements that PyTorch reads."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

import tsopt
from tsopt.runtime.onnx.export import to_onnx
from tsopt.runtime.onnx.openvino import OpenVinoBackend

ENGINES = ["onnxruntime", "openvino"]
MODES = ["nearest", "nearest-exact"]
# Where Resize reads a neighbor, or one kernel of PyTorch's another element than the next.
PAIRS = [(35, 10), (2, 41), (2, 47), (41, 41), (3, 128), (61, 7), (64, 16), (16, 64), (1, 5)]


def numbered(*shape, dtype=torch.float32):
    """Each element says where it is on the last axis."""
    return torch.arange(shape[-1]).to(dtype).expand(shape).contiguous()


@pytest.mark.sliced(2)
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_fixed_sizes(mode, rank):
    inputs = [numbered(1, 2, *[2] * (rank - 1), size) for size, _ in PAIRS]

    def model(*inputs):
        sizes = [[3] * (rank - 1) + [made] for _, made in PAIRS]
        return [F.interpolate(x, size=size, mode=mode) for x, size in zip(inputs, sizes, strict=True)]

    program = tsopt.capture(model, tuple(inputs))
    for engine in ENGINES:
        found = tsopt.compile(program, engine)(*inputs)
        for pair, ours, eager in zip(PAIRS, found, model(*inputs), strict=True):
            assert torch.equal(ours, eager), (engine, pair)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8, torch.float16], ids=str)
def test_other_dtypes(mode, dtype):
    inputs = [numbered(1, 1, 2, size, dtype=dtype) for size in (2, 7, 35)]

    def model(*inputs):
        return [F.interpolate(x, size=[3, 47], mode=mode) for x in inputs]

    found = tsopt.compile(tsopt.capture(model, tuple(inputs)), "onnxruntime")(*inputs)
    assert all(torch.equal(ours, eager) for ours, eager in zip(found, model(*inputs), strict=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [{"size": 10}, {"size": 41}, {"scale_factor": 1.3}, {"scale_factor": 2.0}, {"scale_factor": 2.9}],
    ids=str,
)
def test_a_size_that_differs_from_call_to_call(mode, options):
    model = functools.partial(F.interpolate, mode=mode, **options)
    program = tsopt.capture(lambda x: model(x), numbered(1, 2, 35), dynamic={"x": {2: "s[4..64]"}})
    refused = OpenVinoBackend().unsupported(program)
    assert bool(refused) == (options != {"scale_factor": 2.0})
    assert all("divides sizes" in item.why for item in refused)
    for engine in ENGINES[: 1 if refused else 2]:
        run = tsopt.compile(program, engine)
        for size in range(4, 65):
            x = numbered(1, 2, size)
            assert torch.equal(run(x), model(x)), (engine, size)


def test_a_batch_that_differs_from_call_to_call_is_not_refused():
    program = tsopt.capture(lambda x: F.interpolate(x, size=10), numbered(2, 2, 35), dynamic={"x": {0: "n[1..8]"}})
    assert torch.equal(
        tsopt.compile(program, "openvino")(numbered(5, 2, 35)), F.interpolate(numbered(5, 2, 35), size=10)
    )


def test_a_size_that_is_computed_from_another():
    def model(x, y):
        return F.interpolate(x, size=y.shape[2:])

    x, y = numbered(1, 1, 2, 35), torch.zeros(1, 1, 3, 10)
    run = tsopt.compile(
        tsopt.capture(model, (x, y), dynamic={"x": {3: "s[4..64]"}, "y": {3: "t[4..64]"}}), "onnxruntime"
    )
    for size, made in PAIRS[5:7]:
        x, y = numbered(1, 1, 2, size), torch.zeros(1, 1, 3, made)
        assert torch.equal(run(x, y), model(x, y))


@pytest.mark.parametrize(
    ("mode", "factor", "ops"),
    [
        ("nearest", 2, {"Resize"}),
        ("nearest", 0.5, {"Resize"}),
        ("nearest-exact", 2, {"Resize"}),
        ("nearest-exact", 0.5, {"Gather"}),
    ],
)
def test_a_power_of_two_is_one_op(mode, factor, ops):
    program = tsopt.capture(lambda x: F.interpolate(x, scale_factor=factor, mode=mode), numbered(1, 1, 8, 8))
    assert {node.op_type for node in to_onnx(program).model.graph} - {"Constant"} == ops
