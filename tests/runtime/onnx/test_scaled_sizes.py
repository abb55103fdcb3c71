"""Upsampling by a scale: of the size and on the grid that PyTorch makes of it, or refused."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

import tsopt
from tests.runtime.onnx.in_a_block import InABlock
from tsopt.runtime.backends.backend import get_backend

ENGINES = ["onnxruntime", "openvino"]
MODES = {"linear": 1, "bilinear": 2, "bicubic": 2, "trilinear": 3}
OTHER_SIZE = 100  # int(100 * 1.15) is 114, and 115 in float32


def image(mode, size):
    shape = (1, 2, size, *[8] * (MODES[mode] - 1))
    return torch.rand(shape, generator=torch.Generator().manual_seed(size))


def captured(model, x, *, dynamic):
    sizes = {"x": {2: "h[32..128]"}} if dynamic else None
    return tsopt.capture(lambda x: model(x), x, dynamic=sizes)


@pytest.mark.parametrize("factor", [1.15, 0.29, 0.57, 1.3])
@pytest.mark.parametrize("mode", MODES)
def test_a_scale_that_float32_rounds_is_refused_at_dynamic_sizes(mode, factor):
    program = captured(functools.partial(F.interpolate, scale_factor=factor, mode=mode), image(mode, 64), dynamic=True)
    for engine in ENGINES:
        (found,) = get_backend(engine).unsupported(program)
        assert f"by the scale of aten.upsample_{mode}" in found.why
        assert found.where


@pytest.mark.parametrize("factor", [0.5, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("mode", MODES)
def test_other_scales_make_the_size_that_pytorch_makes(mode, factor):
    model = functools.partial(F.interpolate, scale_factor=factor, mode=mode)
    program = captured(model, image(mode, 64), dynamic=True)
    for engine in ENGINES:
        run = tsopt.compile(program, engine)
        for size in (33, OTHER_SIZE, 127):
            x = image(mode, size)
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [96, OTHER_SIZE])
def test_at_a_fixed_size_only_that_size_matters(size, mode):
    model = functools.partial(F.interpolate, scale_factor=1.15, mode=mode)
    x = image(mode, size)
    program = captured(model, x, dynamic=False)
    for engine in ENGINES:
        refused = get_backend(engine).unsupported(program)
        assert bool(refused) == (size == OTHER_SIZE and mode != "linear")
        if not refused:
            torch.testing.assert_close(tsopt.compile(program, engine)(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("size", "factor"), [(35, 1.3), (33, 0.5), (40, 1.5), (33, 2.0)])
def test_antialiasing_by_a_scale_that_makes_no_whole_size_is_refused(size, factor, mode):
    model = functools.partial(F.interpolate, scale_factor=(factor, 1.0), mode=mode, antialias=True)
    x = image(mode, size)
    program = captured(model, x, dynamic=False)
    refused = get_backend("onnxruntime").unsupported(program)
    assert [f"leaves out the scale of aten._upsample_{mode}2d_aa" in found.why for found in refused] == (
        [] if size * factor % 1 == 0 else [True]
    )
    if not refused:
        torch.testing.assert_close(tsopt.compile(program, "onnxruntime")(x), model(x), rtol=1e-4, atol=1e-4)
    dynamic = get_backend("onnxruntime").unsupported(captured(model, image(mode, 64), dynamic=True))
    assert bool(dynamic) == (factor != 2.0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sizes", [None, {"x": {2: "h[2..128]"}}], ids=["fixed", "dynamic"])
def test_a_scale_that_leaves_a_size_as_it_is_is_refused(sizes, mode):
    program = tsopt.capture(lambda x: F.interpolate(x, scale_factor=1.25, mode=mode), image(mode, 3), dynamic=sizes)
    for engine in ENGINES:
        (found,) = get_backend(engine).unsupported(program)
        assert "skip an axis" in found.why
    taken = tsopt.capture(lambda x: F.interpolate(x, scale_factor=1.0, mode=mode), image(mode, 3))
    assert not any(get_backend(engine).unsupported(taken) for engine in ENGINES)


def test_the_size_of_a_computed_image_counts():
    model = InABlock(lambda x: F.interpolate(x[:, :, 1:], scale_factor=1.15, mode="bilinear"))
    (found,) = get_backend("onnxruntime").unsupported(tsopt.capture(model, image("bilinear", OTHER_SIZE + 1)))
    assert "block" in found.where
    assert not get_backend("onnxruntime").unsupported(tsopt.capture(model, image("bilinear", OTHER_SIZE)))
