"""How long threads take to meet."""

from __future__ import annotations

from tsopt.regression import machine_state
from tsopt.regression.machine_state import Meeting


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
