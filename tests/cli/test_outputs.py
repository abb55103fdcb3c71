from __future__ import annotations

import pytest

from tests.cli.conftest import MODEL


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
    ],
)
def test_an_output_replaces_nothing_that_the_command_names(tsopt, write, tmp_path, command, text):
    for name in ("m.py", "n.py", "m.ts", "m.html", "d.npz", "b.json", "d/config.json"):
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
