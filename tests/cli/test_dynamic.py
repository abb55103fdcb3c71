"""`--dynamic`: sizes that differ from call to call, from a shell."""

from __future__ import annotations

import pytest

HASTY = ("--seconds", "0.1", "--no-isolate", "--no-cache", "--backends", "onnxruntime")


def test_a_bundle_for_many_sizes(tsopt, write):
    write()
    done = tsopt("export", "m.py", "--dynamic", "input:0=batch[1..32]", *HASTY, "--json")
    assert done.code == 0, done.err
    assert done.json["sizes"] == "batch: 1..32, checked at 1, 2, 7, 32"
    assert tsopt("verify", "m.tsopt", "--model", "m.py").code == 0
    assert tsopt("verify", "m.tsopt").code == 0


def test_the_program_says_its_sizes(tsopt, write):
    write()
    assert "# batch: 1.." in tsopt("inspect", "m.py", "--dynamic", "input:0=batch").out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("inpt:0=n", "there is no input 'inpt'"),
        ("input=n", "--dynamic 'input=n'"),
        ("input:1=n", "axis 1 of input must be 4"),
        ("input:0=n[3..2]", "invalid range"),
    ],
)
def test_a_wrong_option_is_told_what_to_write(tsopt, write, tmp_path, text, words):
    write()
    done = tsopt("export", "m.py", "--dynamic", text)
    assert done.code == 2
    assert words in done.err
    assert "fix:" in done.err
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["m.py"]
