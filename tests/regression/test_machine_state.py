"""How long threads take to meet, and fixed layers."""

from __future__ import annotations

import pytest
import torch

from tsopt.regression import machine_state
from tsopt.regression.machine_state import FixedLayers, Meeting, SmallLayers


def test_it_is_a_time_of_several_threads(torch_threads):
    torch_threads(2)
    found = Meeting().microseconds()
    assert found is not None
    assert found > 0


def test_a_single_thread_meets_none(torch_threads):
    torch_threads(1)
    assert Meeting().microseconds() is None


def test_without_onnx_runtime_it_is_not_known(torch_threads, monkeypatch):
    torch_threads(2)

    def missing(*_):
        raise machine_state.TsoptError("onnxruntime is not installed")

    monkeypatch.setattr(machine_state, "compile", missing)
    assert Meeting().microseconds() is None


def test_fixed_layers_can_be_timed_more_than_once(torch_threads, monkeypatch):
    torch_threads(2)
    monkeypatch.setattr(machine_state, "SECONDS", 0.0)
    layers = FixedLayers()
    for _ in range(2):
        found = layers.milliseconds()
        assert found is not None
        assert found > 0


def test_fixed_layers_are_a_yardstick_of_several_threads_in_onnx_runtime(torch_threads, monkeypatch):
    torch_threads(1)
    assert FixedLayers().milliseconds() is None

    def missing(*_):
        raise machine_state.TsoptError("onnxruntime is not installed")

    torch_threads(2)
    monkeypatch.setattr(machine_state, "compile", missing)
    assert FixedLayers().milliseconds() is None


@pytest.mark.parametrize("threads", [1, 2])
def test_small_layers_are_called_like_any_model(torch_threads, threads):
    torch_threads(threads)
    call = SmallLayers().opened()
    assert call(torch.ones(2), key=1).tolist() == [[1.0] * 128]


def test_there_are_no_small_layers_without_onnx_runtime(monkeypatch):
    def missing(*_):
        raise machine_state.TsoptError("onnxruntime is not installed")

    monkeypatch.setattr(machine_state, "compile", missing)
    assert SmallLayers().opened() is None
