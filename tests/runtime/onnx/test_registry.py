"""The exporter's registry: made once, and never changed by an export."""

from __future__ import annotations

import threading

import onnxscript
import pytest
import torch

import tsopt
from tsopt.runtime.onnx import registry
from tsopt.runtime.onnx.export import to_onnx

exporter = pytest.importorskip("torch.onnx._internal.exporter._registration")


@pytest.fixture
def made(monkeypatch):
    """Counts how often torch makes a registry."""
    monkeypatch.setattr(registry, "_KEPT", {})
    seen, real = [], exporter.ONNXRegistry.from_torchlib

    def counted(*args, **options):
        seen.append(options)
        return real(*args, **options)

    monkeypatch.setattr(exporter.ONNXRegistry, "from_torchlib", counted)
    return seen


def test_exports_share_a_registry(made):
    program = tsopt.capture(torch.nn.ReLU(), torch.ones(2))
    registry.prepare()
    first, second = (to_onnx(program).model for _ in range(2))
    assert len(made) == 1
    assert [node.op_type for node in first.graph] == [node.op_type for node in second.graph] == ["Relu"]


def test_what_an_export_adds_is_its_own(made):
    with registry.made_once():
        mine = exporter.ONNXRegistry.from_torchlib(opset_version=18)
        target = next(iter(mine.functions))
        mine.functions[target].clear()
        other = exporter.ONNXRegistry.from_torchlib(opset_version=18)
    assert other.functions[target]
    assert len(made) == 1


def test_ops_that_are_registered_later_are_translated(made, monkeypatch):
    names = torch._C._dispatch_get_all_op_names()
    with registry.made_once():
        exporter.ONNXRegistry.from_torchlib(opset_version=18)
        monkeypatch.setattr(torch._C, "_dispatch_get_all_op_names", lambda: [*names, "mine::op"])
        exporter.ONNXRegistry.from_torchlib(opset_version=18)
    assert len(made) == 2


def test_torch_makes_its_own_outside(made):
    with registry.made_once():
        exporter.ONNXRegistry.from_torchlib(opset_version=18)
    exporter.ONNXRegistry.from_torchlib(opset_version=18)
    assert len(made) == 2


def test_no_source_is_parsed_for_it(made, monkeypatch):
    parsed, real = [], onnxscript.TracedOnnxFunction.function_ir

    def counted(function):
        parsed.append(function.name)
        return real.__get__(function)

    monkeypatch.setattr(onnxscript.TracedOnnxFunction, "function_ir", property(counted))
    with registry.made_once():
        mine = exporter.ONNXRegistry.from_torchlib(opset_version=18)
    assert not parsed
    torchs = exporter.ONNXRegistry.from_torchlib(opset_version=18)
    assert parsed
    assert list(mine.functions) == list(torchs.functions)
    for target, known in mine.functions.items():
        assert [meta.signature for meta in known] == [meta.signature for meta in torchs.functions[target]]


def test_other_threads_get_the_parsed_source(made, monkeypatch):
    function = torchlib_function()
    seen = []

    def registered(real):
        def from_torchlib(*args, **options):
            seen.append(function.function_ir)
            thread = threading.Thread(target=lambda: seen.append(function.function_ir))
            thread.start()
            thread.join()
            return real(*args, **options)

        return from_torchlib

    monkeypatch.setattr(exporter.ONNXRegistry, "from_torchlib", registered(exporter.ONNXRegistry.from_torchlib))
    registry.prepare()
    here, elsewhere = seen
    assert here.domain == elsewhere.domain == function.opset.domain
    assert elsewhere.name == function.name
    assert not hasattr(here, "name")


def torchlib_function():
    from onnxscript.function_libs.torch_lib.ops import core

    return next(value for value in vars(core).values() if isinstance(value, onnxscript.TracedOnnxFunction))
