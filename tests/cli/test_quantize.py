from __future__ import annotations

import json

import numpy as np
import pytest

import tsopt as package
from tests.cli.conftest import MODEL
from tests.runtime.racing.helpers import fast_timings

pytestmark = pytest.mark.usefixtures("quick")

QUICKLY = ("--backends", "openvino", "--no-isolate")
WITH_DATA = f"""{MODEL}
data = [torch.tensor([[-1.0, -0.3, 0.4, 1.0]]).roll(i, 1) for i in range(8)]  # of one range, whichever are held out
def made():
    return data
def broken():
    raise RuntimeError("no disk")
def accuracy(model):
    return 1.0 if float(model(torch.ones(1, 4)).sum()) else 0.0
"""


@pytest.mark.sliced(1)
@pytest.mark.parametrize("data", ["m.py:data", "m.py:made", "data.npz", "8"])
def test_the_layers_are_shown_and_a_bundle_is_written(tsopt, write, tmp_path, data):
    write(WITH_DATA)
    np.savez(tmp_path / "data.npz", np.random.default_rng(0).normal(size=(8, 4)).astype("float32"))
    ran = tsopt("quantize", "m.py", *QUICKLY, "--calibration", data, "--report", "q.md")
    assert ran.code == 0, ran.err
    assert "calibration: 8 inputs" in ran.out
    *_, header, first, second = ran.out.splitlines()
    assert header.split()[:3] == ["layer", "op", "SQNR"]
    assert {first.split()[0], second.split()[0]} == {"0", "2"}
    assert "| layer | op | SQNR dB | output dB |" in (tmp_path / "q.md").read_text()
    assert package.load(tmp_path / "m.tsopt").signature.inputs


def test_new_directories_are_named(tsopt, write):
    write(WITH_DATA)
    ran = tsopt("quantize", "m.py", *QUICKLY, "--calibration", "8", "-o", "new/m.tsopt", "--report", "other/q.md")
    assert ran.code == 0, ran.err
    assert "created the directory new" in ran.out
    assert "created the directory other" in ran.out


def test_json_has_the_layers(tsopt, write, tmp_path):
    write(WITH_DATA)
    ran = tsopt(
        "quantize", "m.py", *QUICKLY, "--calibration", "m.py:data", "--keep-float", "2", "--json", "--report", "q.json"
    )
    assert ran.code == 0, ran.err
    assert [(item["name"], item["kept"]) for item in ran.json["quantization"]] == [("0", ""), ("2", "keep_float '2'")]
    assert json.loads((tmp_path / "q.json").read_text())["quantization"] == ran.json["quantization"]


@pytest.mark.slow
def test_layers_have_their_times_in_float32_and_in_int8(tsopt, write, tmp_path, monkeypatch):
    fast_timings(monkeypatch, wins="OpenVINO, precision int8-static")
    monkeypatch.setattr("tsopt.runtime.racing.preparation.HOPELESS", 1e9)
    write(WITH_DATA)
    ran = tsopt("quantize", "m.py", *QUICKLY, "--calibration", "m.py:data", "--report", "q.json")
    assert ran.code == 0, ran.err
    *_, header, _, _ = ran.out.splitlines()
    assert "ms fp32" in header
    assert "ms int8" in header
    layers = json.loads((tmp_path / "q.json").read_text())["quantization"]
    timed = [layer for layer in layers if layer["ms_float"] and layer["ms_int8"]]
    assert timed, "OpenVINO may fuse both layers into one kernel"


def test_export_takes_the_same_options(tsopt, write):
    write(WITH_DATA)
    options = ("--precision", "int8", "--calibration", "m.py:data", "--metric", "m.py:accuracy", "--max-drop", "0.5")
    ran = tsopt("export", "m.py", *QUICKLY, *options)
    assert ran.code == 0, ran.err
    assert "2 of 2 layers in int8" in ran.out
    assert "precision int8-static" in ran.out


@pytest.mark.slow
def test_bench_takes_the_same_options(tsopt, write):
    write(WITH_DATA)
    ran = tsopt("bench", "m.py", *QUICKLY, "--precision", "auto", "--calibration", "m.py:data", "--max-drop", "0.5")
    assert ran.code == 0, ran.err
    assert "precision int8-static" in ran.out


def test_a_dry_run_takes_them_too(tsopt, write):
    write(WITH_DATA)
    dry = ("export", "m.py", "--dry-run", "--precision", "int8", "--backends", "openvino")
    assert tsopt(*dry, "--calibration", "m.py:data").code == tsopt(*dry).code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--calibration", "0"), "calibration must be at least 1, got 0"),
        (("--calibration", "nothing.npz"), "calibration cannot be read: nothing.npz"),
        (("--calibration", "m.py"), "--calibration m.py names a file but no object in it"),
        (("--calibration", "m.py:dat"), "m.py defines no 'dat'"),
        (("--calibration", "m.py:broken"), "broken() in m.py raises RuntimeError"),
        (("--calibration", "other.py:data"), "no such file: other.py"),
        (("--metric", "f1"), "unknown metric 'f1'"),
        (("--metric", "m.py:data"), "unknown metric ["),
        (("--max-drop", "-1"), "max_drop must be 0 or more"),
        (("--calibration", "2", "--keep-float", "body"), "keep_float 'body' matches no layer"),
        (("--report", "q.txt"), "--report q.txt has an unknown suffix"),
        (("--report", "m.py/q.md"), "the output cannot be written"),
        (("--precision", "int9"), "unknown precision 'int9'"),
        *((("--precision", name), f"--precision {name} has no integers in it") for name in ("fp32", "tf32", "bf16")),
        (("--frontend", "parts"), "a partitioned model cannot be saved"),
    ],
)
def test_what_cannot_be_used_leaves_no_file(tsopt, write, tmp_path, options, message):
    write(WITH_DATA)
    ran = tsopt("quantize", "m.py", *QUICKLY, *options)
    assert ran.code == 2
    assert message in ran.err
    assert not (tmp_path / "m.tsopt").exists()
