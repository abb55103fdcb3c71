"""A race in the cache: its winner is opened from the files it was compiled to, if the weights are the same."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.racing.cached import PACES, X, make, optimize, set_paces
from tsopt.runtime.onnx import ort
from tsopt.runtime.racing import cache, kept_files


@pytest.fixture(autouse=True)
def _paced(monkeypatch):
    set_paces(monkeypatch)


@pytest.fixture
def exports(monkeypatch):
    """The models that this process exports for ONNX Runtime, which is the fastest."""
    seen, real = [], ort.OnnxRuntimeBackend._exported

    def counted(self, program):
        seen.append(program.name)
        return real(self, program)

    monkeypatch.setattr(ort.OnnxRuntimeBackend, "_exported", counted)
    monkeypatch.setitem(PACES, "ONNX Runtime", 0.5)
    return seen


def test_what_the_winner_was_compiled_to_is_opened(once_as_shipped, exports):
    optimize(backends=("onnxruntime",))
    again = optimize(backends=("onnxruntime",))
    assert (again.report.winner, exports) == ("ONNX Runtime", [])
    assert again.report.cached
    torch.testing.assert_close(again(X), make()(X).detach())


def test_what_was_compiled_for_other_weights_is_not_opened(once_as_shipped, exports):
    optimize(backends=("onnxruntime",))
    other = optimize(make(seed=1), backends=("onnxruntime",))
    assert (len(exports), other.report.winner) == (1, "ONNX Runtime")
    assert other.report.cached
    torch.testing.assert_close(other(X), make(seed=1)(X).detach())


@pytest.mark.sliced(1)
@pytest.mark.parametrize("damage", [lambda raw: raw[:-200], lambda raw: raw.replace(b"Gemm", b"Mmeg"), lambda raw: b""])
def test_damaged_files_of_a_winner_are_not_opened(once_as_shipped, exports, damage):
    optimize(backends=("onnxruntime",))
    (path,) = cache.directory().glob("*.files")
    path.write_bytes(damage(path.read_bytes()))
    again = optimize(backends=("onnxruntime",))
    assert (len(exports), again.report.winner) == (1, "ONNX Runtime")
    torch.testing.assert_close(again(X), make()(X).detach())


def test_where_there_is_no_room_the_winner_is_compiled_again(once_as_shipped, exports, monkeypatch):
    optimize(backends=("onnxruntime",))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_files, "write_weights", full)
    again = optimize(backends=("onnxruntime",))
    assert (len(exports), again.report.winner) == (1, "ONNX Runtime")
    assert again.report.cached
