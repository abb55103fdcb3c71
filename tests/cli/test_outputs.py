from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import MODEL
from tsopt.cli.options import Subject
from tsopt.cli.outputs import check_outputs


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("export m.py -o b.tsopt --report b.tsopt/r.json", "--report b.tsopt/r.json is inside of -o b.tsopt"),
        ("export m.py -o b.tsopt --html b.tsopt/deep/r.html", "is inside of -o b.tsopt"),
        ("quantize m.py -o b.tsopt --report ./x/../b.tsopt/r.json", "is inside of -o b.tsopt"),
        ("export m.py --report r.html --html r.html", "--html r.html is also --report r.html"),
        ("profile m.py -o r.html --html r.html", "--html r.html is also -o r.html"),
        ("bench m.py -o r.html --html r.html", "--html r.html is also -o r.html"),
        ("export m.py --format onnx -o m.py", "-o m.py is the model, which the command reads"),
        ("export m.py --format onnx -o link.py", "the output path is a symbolic link"),
        ("export m.py --format onnx -o d.npz --calibration d.npz", "-o d.npz is the file of --calibration"),
        ("export m.py --format onnx -o n.py --metric n.py:f", "-o n.py is the file of --metric"),
        ("export m.ts --format torchscript", "-o m.ts is the model"),
        ("inspect m.html --graph m.html", "--graph m.html is the model"),
        ("check m.py --baseline m.py --update", "--baseline m.py is the model"),
        ("check m.py --baseline b.json -o b.json", "-o b.json is the baseline"),
        ("check m.py --baseline b.json --update -o b.json", "--baseline b.json is also -o b.json"),
        ("export hf:d --report d/config.json", "--report d/config.json is the model"),
        ("export hf:d --format onnx -o d/w.safetensors", "-o d/w.safetensors would replace a file in the directory of"),
        (
            "export hf:d --format torchscript -o d/w.bin",
            "-o d/w.bin would replace a file in the directory of the model",
        ),
        ("export hf:d --format torchscript -o d/w.pt", "-o d/w.pt would replace a file in the directory of the model"),
        (
            "export hf:d --report d/deep/tokenizer.json",
            "--report d/deep/tokenizer.json would replace a file in",
        ),
        ("bench hf:d -o d/deep/tokenizer.json", "-o d/deep/tokenizer.json would replace a file in the dir"),
    ],
)
def test_an_output_replaces_nothing_that_the_command_names(tsopt, write, tmp_path, command, text):
    of_directory = ("d/config.json", "d/w.safetensors", "d/w.bin", "d/w.pt", "d/deep/tokenizer.json")
    for name in ("m.py", "n.py", "m.ts", "m.html", "d.npz", "b.json", *of_directory):
        write(MODEL, name=name)
    (tmp_path / "link.py").symlink_to("m.py")
    ran = tsopt(*command.split())
    assert ran.code == 2
    assert text in " ".join(ran.err.split()), ran.err
    assert all(path.read_text() == MODEL for path in tmp_path.rglob("*.*") if path.is_file())


def test_a_model_that_is_made_by_name_is_no_file(tsopt):
    ran = tsopt("export", "timm:none", "--format", "onnx", "-o", "none")
    assert ran.code == 2
    assert "which the command reads" not in ran.err


def test_only_a_baseline_is_replaced_by_a_baseline(tsopt, write, tmp_path):
    write()
    write('{"name": "a package"}', name="package.json")
    ran = tsopt("check", "m.py", "--baseline", "package.json", "--update")
    assert ran.code == 2
    assert "the file is not a baseline, and would be overwritten" in ran.err
    assert (tmp_path / "package.json").read_text() == '{"name": "a package"}'


@pytest.mark.parametrize("name", ["d/m.onnx", "d/deep/m.ts", "d/m.html", "d/new.json", "m.onnx", "w.bin"])
def test_what_a_model_of_transformers_does_not_read_may_be_replaced(write, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for old in ("d/config.json", "d/m.onnx", "d/deep/m.ts", "d/m.html", "m.onnx", "w.bin"):
        write("", name=old)
    is_export = not name.endswith((".html", ".json"))
    places, saved = ([Path(name)], {}) if is_export else ([], {"--report": Path(name)})
    check_outputs(Subject(model="hf:d"), None, places=places, saved=saved)
