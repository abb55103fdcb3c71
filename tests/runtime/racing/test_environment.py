"""The machine and the versions of a measurement."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from tsopt.runtime.racing import environment as module
from tsopt.runtime.racing.environment import environment, versions


@pytest.mark.parametrize(
    ("distributions", "said"),
    [
        ({"onnxruntime": "1.31"}, {"onnxruntime": "1.31"}),
        ({"onnxruntime-gpu": "1.30"}, {"onnxruntime-gpu": "1.30"}),
        ({"onnxruntime": "1.31", "onnxruntime-gpu": "1.30"}, {"onnxruntime": "1.31", "onnxruntime-gpu": "1.30"}),
        ({}, {"onnxruntime": "installed"}),
    ],
    ids=["cpu", "gpu", "both", "built by hand"],
)
def test_the_version_is_that_of_the_distribution_that_is_installed(monkeypatch, distributions, said):
    """If both are installed, one has overwritten files of the other; the report shows both."""

    def version(name):
        if name not in distributions:
            raise importlib.metadata.PackageNotFoundError(name)
        return distributions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(module, "is_installed", lambda name: name == "onnxruntime")
    assert versions() == said


@pytest.mark.parametrize(("tf32", "said"), [(False, "H100, CUDA 13.0"), (True, "H100, CUDA 13.0 (TF32 on)")])
def test_a_gpu_is_named_with_what_computes_on_it(monkeypatch, tf32, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32  # an attribute that cannot be deleted, as monkeypatch does
    try:
        assert environment().gpu == said
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert environment().gpu == ""
