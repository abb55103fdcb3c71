"""Where a bundle is opened: libraries that are missing, and files that are replaced meanwhile."""

from __future__ import annotations

import os
import shutil
import sys
import types
from pathlib import Path

import pytest

import tsopt
from tests.runtime.bundles.helpers import refused
from tsopt.runtime.bundles import members, store
from tsopt.runtime.bundles.staging import ASIDE


def test_a_library_that_is_not_installed_is_named(bundle, monkeypatch):
    place = bundle("onnxruntime")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(tsopt.BackendError, match="onnxruntime, which is not installed") as caught:
        tsopt.load(place)
    assert caught.value.fix == "pip install onnxruntime"


def test_a_library_that_is_broken_is_told_as_such(bundle, monkeypatch):
    place = bundle("onnxruntime")
    monkeypatch.setitem(sys.modules, "onnxruntime", types.ModuleType("onnxruntime"))
    with pytest.raises(tsopt.BackendError, match="installed but does not work") as caught:
        tsopt.load(place)
    assert "--force-reinstall onnxruntime" in caught.value.fix


def test_a_library_that_cannot_be_imported_later_is_no_damage(bundle, monkeypatch):
    def fail(*args: object) -> None:
        raise ImportError("libsomething.so: cannot open shared object file")

    monkeypatch.setattr(store, "open_bundle", fail)
    with pytest.raises(tsopt.BackendError, match="cannot be imported") as caught:
        tsopt.load(bundle())
    assert "libsomething.so" in caught.value.why


def test_a_bundle_that_may_not_be_read_says_so(bundle, monkeypatch):
    place = bundle()

    def forbidden(*args: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(members.os, "open", forbidden)
    assert "Permission denied" in refused(place, "cannot be read").why


def test_a_bundle_that_is_replaced_while_it_is_read_is_read_again(bundles, tmp_path, monkeypatch):
    place = Path(shutil.copytree(bundles["eager"], tmp_path / "b.tsopt"))
    real, swapped = store.open_bundle, []

    def slow(directory, backend, *rest):
        if not swapped:
            swapped.append(backend)
            shutil.rmtree(place)
            shutil.copytree(bundles["onnxruntime"], place)
        return real(directory, backend, *rest)

    monkeypatch.setattr(store, "open_bundle", slow)
    assert tsopt.load(place).backend == "onnxruntime"
    assert swapped == ["eager"]


def test_a_file_that_is_written_while_it_is_read_is_noticed(bundles, tmp_path, monkeypatch):
    place = Path(shutil.copytree(bundles["eager"], tmp_path / "b.tsopt"))
    real, times = store.open_bundle, []

    def slow(*given):
        found = real(*given)
        times.append(1)
        if len(times) == 1:
            os.utime(place / "weights.safetensors", (1, 1))
        return found

    monkeypatch.setattr(store, "open_bundle", slow)
    assert tsopt.load(place).backend == "eager"
    assert len(times) == 2


def test_a_bundle_that_is_replaced_all_the_time_is_told(bundles, tmp_path, monkeypatch):
    place = Path(shutil.copytree(bundles["eager"], tmp_path / "b.tsopt"))
    times = iter(range(100))
    monkeypatch.setattr(store, "open_bundle", lambda *given: os.utime(place / "report.json", (1, next(times))))
    refused(place, "was replaced every time")


def test_a_bundle_that_was_set_aside_is_read(bundles, tmp_path):
    shutil.copytree(bundles["eager"], tmp_path / f".b.tsopt.1{ASIDE}")
    assert tsopt.load(tmp_path / "b.tsopt").backend == "eager"
