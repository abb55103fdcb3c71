"""The GPUs of a call: waiting for them, and what is said of one that has failed."""

from __future__ import annotations

import pytest
import torch

import tsopt
from tsopt.compiler import devices
from tsopt.compiler.calls.example import Example
from tsopt.runtime.racing import contenders

GPUS = (torch.device("cuda:0"), torch.device("cuda:1"))


@pytest.fixture
def two_gpus(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for module in (devices, contenders):
        monkeypatch.setattr(module, "gpus_of", lambda example: GPUS)
    return waited


def test_the_gpus_of_a_call_are_those_of_its_tensors_each_once():
    with torch._subclasses.FakeTensorMode():
        tensors = [torch.empty(2, device=device) for device in ("cuda:1", "cpu", "cuda:0", "cuda:1")]
    assert devices.gpus_of(Example(tuple(tensors))) == (GPUS[1], GPUS[0])
    assert devices.gpus_of(Example((torch.ones(1),))) == ()


def test_a_measurement_waits_for_all_of_them(two_gpus):
    contenders.device_wait(Example())()
    assert two_gpus == list(GPUS)


def test_a_gpu_on_which_a_kernel_has_failed_is_told(two_gpus, monkeypatch):
    """The error of whatever comes next says nothing of it, and the model cannot run in eager mode either."""

    def fails(device):
        raise RuntimeError("CUDA error: device-side assert triggered\nmore lines")

    def broken(*args, **kwargs):
        fails(GPUS[0])

    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    monkeypatch.setattr("tsopt.request.race", broken)
    with pytest.raises(tsopt.BackendError, match="cuda:0 can no longer be used by this process") as caught:
        tsopt.optimize(torch.relu, torch.ones(2), cache=False)
    assert caught.value.why == "a kernel has failed there: CUDA error: device-side assert triggered"
    assert "start the process again" in caught.value.fix


def test_a_gpu_that_records_a_graph_has_not_failed(two_gpus, monkeypatch):
    def fails(device):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    devices.check_usable(Example())


def test_nothing_is_optimized_while_a_graph_is_recorded(two_gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(tsopt.UsageError, match="while a CUDA graph is being recorded"):
        tsopt.optimize(torch.relu, torch.ones(2))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    devices.check_not_recording(Example())


def test_the_report_says_that_candidates_on_a_gpu_ran_in_this_process(monkeypatch):
    monkeypatch.setattr("tsopt.request.is_on_gpu", lambda example: True)
    options = {"seconds": 0.05, "cache": False, "backends": ("eager",)}
    report = tsopt.optimize(torch.relu, torch.ones(2), **options).report
    assert "candidates ran in this process: the model is on a GPU" in report.text
    assert "in this process" not in tsopt.optimize(torch.relu, torch.ones(2), isolate=False, **options).report.text
