"""Engines that tsopt imports report nothing, and nothing of how that is achieved stays."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import types

import pytest

from tsopt.runtime.telemetry import SENDER, without_telemetry

IMPORTS = """
import os, sys
from pathlib import Path

class Sees:
    def find_spec(name, path=None, target=None):
        if name == {package!r}:
            print("disabled:", os.environ.get("ORT_DISABLE_TELEMETRY"))

def forked():
    print("forked")

sys.meta_path.insert(0, Sees)
os.register_at_fork(after_in_parent=forked)
import torch, tsopt
tsopt.compile(tsopt.capture(torch.nn.Linear(4, 4), torch.ones(2, 4)), {package!r})(torch.ones(2, 4))
print("home:", sorted(os.listdir(Path.home())))
"""


@pytest.mark.parametrize("package", ["onnxruntime", "openvino"])
def test_an_engine_that_is_imported_for_a_model_reports_nothing(package, tmp_path):
    pytest.importorskip(package)
    environment = {key: value for key, value in os.environ.items() if key not in ("CI", "ORT_DISABLE_TELEMETRY")}
    home = tmp_path / "home"
    home.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS.format(package=package)],
        env=environment | {"HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert "disabled: 1" in done.stdout
    assert "forked" not in done.stdout
    assert "intel" not in done.stdout.partition("home:")[2]


def test_a_block_in_another_one_and_a_package_that_the_user_has_blocked(monkeypatch):
    monkeypatch.delitem(sys.modules, SENDER, raising=False)
    with without_telemetry():
        with without_telemetry():
            assert sys.modules[SENDER] is None
        assert sys.modules[SENDER] is None
    assert SENDER not in sys.modules
    monkeypatch.setitem(sys.modules, SENDER, None)
    with without_telemetry():
        pass
    assert sys.modules[SENDER] is None


def test_what_the_user_has_set_is_kept_and_the_rest_is_not(monkeypatch):
    sender = types.ModuleType(SENDER)
    monkeypatch.setitem(sys.modules, SENDER, sender)
    monkeypatch.setenv("ORT_DISABLE_TELEMETRY", "0")
    with without_telemetry():
        assert os.environ["ORT_DISABLE_TELEMETRY"] == "0"
        with pytest.raises(ImportError):
            importlib.import_module(SENDER)
    assert sys.modules[SENDER] is sender
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY")
    monkeypatch.delitem(sys.modules, SENDER)
    with pytest.raises(ModuleNotFoundError), without_telemetry():
        importlib.import_module("an_engine_that_is_not_there")
    assert "ORT_DISABLE_TELEMETRY" not in os.environ
    assert SENDER not in sys.modules
