"""Values added at indices that repeat: ONNX Runtime gets no ScatterND for them, whose threads lose terms."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tests.runtime.onnx.in_a_block import InABlock
from tsopt.runtime.onnx.export import to_onnx
from tsopt.runtime.onnx.openvino import OpenVinoBackend
from tsopt.runtime.onnx.ort import OnnxRuntimeBackend

put = torch.ops.aten.index_put
I = torch.tensor([0, 2, 2, 1])  # noqa: E741


def made(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


ALONG_ONE_AXIS = {
    "index_add": (lambda x, y, i: x.index_add(0, i, y), made(4, 6, 7), I),
    "last axis, scaled": (lambda x, y, i: x.index_add(-1, i, y, alpha=2.5), made(5, 6, 4), I),
    "int32": (lambda x, y, i: x.index_add(1, i, y), made(5, 4, 7), I.int()),
    "one index": (lambda x, y, i: x.index_add(1, i, y), made(5, 1, 7), I[1]),
    "one axis": (lambda x, y, i: x[0, 0].index_add(0, i, y), made(4), I),
    "integers": (lambda x, y, i: x.long().index_add(0, i, y.long(), alpha=3), made(4, 6, 7) * 5, I),
    "bfloat16": (lambda x, y, i: x.bfloat16().index_add(0, i, y.bfloat16()).float(), made(4, 6, 7).round(), I),
    "index_put": (lambda x, y, i: x.index_put((i,), y, accumulate=True), made(4, 6, 7), I),
    "negative": (lambda x, y, i: x.index_put((i,), y, accumulate=True), made(4, 6, 7), I - 3),
    "a row": (lambda x, y, i: x.index_put((i,), y, accumulate=True), made(7), I),
    "another axis": (lambda x, y, i: put(x, [None, i], y, True), made(5, 4, 7), I),
    "two axes of indices": (lambda x, y, i: put(x, [None, i], y, True), made(5, 2, 2, 7), I.view(2, 2)),
    "no axis of indices": (lambda x, y, i: put(x, [None, i], y, True), made(5, 7), I[1]),
}


@pytest.mark.parametrize("name", ALONG_ONE_AXIS)
def test_indices_of_one_axis(name):
    model, y, i = ALONG_ONE_AXIS[name]
    x = made(5, 6, 7).round() if name == "bfloat16" else made(5, 6, 7)
    program = tsopt.transform(tsopt.capture(model, (x, y, i)))
    kinds = {node.op_type for node in to_onnx(program).model.graph.all_nodes()}
    assert "ScatterElements" in kinds
    assert "ScatterND" not in kinds
    for backend in (OnnxRuntimeBackend(threads=2), OpenVinoBackend()):
        if not backend.unsupported(program):
            torch.testing.assert_close(backend.compile(program)(x, y, i), model(x, y, i))


class Pooled(nn.Module):
    def forward(self, x, i):
        return torch.zeros(9, 4).index_add(0, i, x), x.index_put((i,), x[:1] + 1, accumulate=True)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_sizes_that_differ_from_call_to_call(engine):
    dynamic = {"x": {0: "n[1..9]"}, "i": {0: "n[1..9]"}}
    run = tsopt.compile(
        tsopt.transform(tsopt.capture(Pooled(), (made(5, 4), I[[0, 1, 2, 3, 3]]), dynamic=dynamic)), engine
    )
    for size in (1, 2, 9):
        x, i = made(size, 4), torch.arange(size) // 2
        torch.testing.assert_close(run(x, i), Pooled()(x, i))


def test_several_indices_are_refused_in_several_threads():
    model = InABlock(lambda x: put(x, [I, I], x[:4, 0], True))
    x = made(5, 6, 7)
    program = tsopt.capture(model, x)
    (found,) = OnnxRuntimeBackend(threads=2).unsupported(program)
    assert "loses terms of aten.index_put" in found.why
    assert "block" in found.where
    assert not OpenVinoBackend().unsupported(program)
    torch.testing.assert_close(tsopt.compile(program, "onnxruntime", threads=1)(x), model(x))


def test_what_names_no_place_twice_is_taken():
    x = made(5, 6, 7)
    for model in (lambda x: put(x, [x > 0], x[0, 0, 0], True), lambda x: put(x, [I, I], x[0, 0, 0])):
        program = tsopt.capture(model, x)
        assert not OnnxRuntimeBackend(threads=2).unsupported(program)
        torch.testing.assert_close(tsopt.compile(program, "onnxruntime", threads=2)(x), model(x))
