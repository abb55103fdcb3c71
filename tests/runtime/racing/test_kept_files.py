"""The files of a winner: data only, for the same weights only."""

from __future__ import annotations

import io
import zipfile

import pytest
import torch

import tsopt
from tsopt.compiler.graph.serialize import read_program, write_program
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.backends.onednn import MEASURED
from tsopt.runtime.onnx.export import to_onnx
from tsopt.runtime.onnx.onnx_model import DATA, FILE, LINK
from tsopt.runtime.racing.kept_files import DIGEST, LARGEST, OWNER, packed, unpack

ORT = Candidate("onnxruntime")


def program_of(seed: int = 0):
    torch.manual_seed(seed)
    return tsopt.capture(torch.nn.Linear(64, 64), torch.ones(2, 64))


@pytest.fixture
def saved(tmp_path):
    """A directory as a candidate in another process leaves it: the model, and a link to the weights of the program."""
    (tmp_path / "program").mkdir()
    write_program(program_of(), tmp_path / "program")
    made = tmp_path / "saved"
    made.mkdir()
    to_onnx(read_program(tmp_path / "program", own=True)).save(made)
    return made


@pytest.fixture
def place(tmp_path):
    made = tmp_path / "opened"
    made.mkdir()
    return made


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_files_come_back_beside_the_weights_of_the_program(saved, place):
    raw = packed(saved, ORT, program_of())
    assert len(raw) < (saved / LINK).stat().st_size, "the weights are not among them"
    unpack(raw, ORT, program_of(), place)
    assert contents(place) == contents(saved)


def test_other_weights_are_another_program(saved, place):
    with pytest.raises(tsopt.BundleError, match="other weights"):
        unpack(packed(saved, ORT, program_of()), ORT, program_of(seed=1), place)


def test_another_engine_does_not_open_them(saved, place):
    with pytest.raises(tsopt.BundleError, match="another candidate"):
        unpack(packed(saved, ORT, program_of()), Candidate("openvino"), program_of(), place)


def test_what_refers_to_no_weights_is_for_any(saved, place):
    for path in saved.iterdir():
        path.unlink()
    (saved / MEASURED).write_text('{"linear": true}')
    unpack(packed(saved, ORT, program_of()), ORT, program_of(seed=1), place)
    assert contents(place) == {MEASURED: b'{"linear": true}'}


@pytest.mark.parametrize("name", ["kernels.so", "model.py"])
def test_code_is_not_kept(saved, name):
    (saved / name).write_bytes(b"")
    assert packed(saved, ORT, program_of()) is None


def test_an_engine_that_has_copied_weights_is_not_kept(saved):
    (saved / DATA).write_bytes(bytes(LARGEST))
    assert packed(saved, ORT, program_of()) is None


def test_a_model_that_contains_its_weights_is_not_kept(saved):
    """As on a file system without hard links: nothing records which weights it contains."""
    (saved / LINK).unlink()
    assert packed(saved, ORT, program_of()) is None


def test_files_that_cannot_be_read_are_not_kept(tmp_path):
    assert packed(tmp_path / "gone", ORT, program_of()) is None


def archive(compression: int = zipfile.ZIP_STORED, **files: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", compression) as into:
        for name, content in {OWNER: b"onnxruntime", **files}.items():
            into.writestr(name, content)
    return made.getvalue()


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "not a zip file"),
        (b"not an archive", "not a zip file"),
        (archive(**{"../outside": b"x"}), "unknown files"),
        (archive(**{LINK: b"x"}), "unknown files"),
        (archive(zipfile.ZIP_DEFLATED, **{FILE: bytes(1 << 20)}), "compressed files"),
        (archive(**{FILE: b"not a model"}), "no digest of the weights"),
        (archive(**{DIGEST: b"0" * 64}), "other weights"),
        (archive(**{OWNER: b"openvino"}), "another candidate"),
    ],
    ids=["empty", "text", "outside", "weights", "compressed", "no digest", "digest", "owner"],
)
def test_what_was_not_packed_here_is_refused(place, raw, why):
    with pytest.raises((tsopt.BundleError, zipfile.BadZipFile), match=why):
        unpack(raw, ORT, program_of(), place)
    assert not (place.parent / "outside").exists()


def test_a_model_that_refers_to_another_file_is_refused(saved, place):
    model = saved / FILE
    model.write_bytes(model.read_bytes().replace(b"weights", b"/secret"))
    with pytest.raises(tsopt.BundleError, match="rejected"):
        unpack(packed(saved, ORT, program_of()), ORT, program_of(), place)
