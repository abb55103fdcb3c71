"""The exporter's registry: made once, and never changed by an export."""

from __future__ import annotations

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
