"""Options that several commands have."""

from __future__ import annotations

import pytest

from tsopt.api import FRONTENDS
from tsopt.cli.options import read_sizes
from tsopt.errors import UsageError

NUMPY = """
import numpy as np
import torch

def model(x):
    return torch.from_numpy(np.maximum(x.numpy(), 0)) + 1

example_input = torch.ones(2, 3)
"""


def test_sizes_of_the_command_line():
    assert read_sizes(["x:0=b[1..4]", "x:-1=n", "a.b:1=n"]) == {"x": {0: "b[1..4]", -1: "n"}, "a.b": {1: "n"}}


@pytest.mark.parametrize(
    "text", ["x", "x:0", "x=b", ":0=b", "x:y=b", "x:=b", "x:--1=b", "x:\u00b2=b", "x:9999999999=b"]
)
def test_texts_that_are_no_sizes(text):
    with pytest.raises(UsageError, match=r"(?s)--dynamic .*fix: write --dynamic x:0=batch"):
        read_sizes([text])


def test_who_reads_the_model(tsopt, write):
    write(NUMPY)
    refused = tsopt("export", "m.py")
    assert refused.code == 2
    assert 'frontend="strict"' in refused.err
    options = ("--seconds", "0.1", "--backends", "eager", "--no-isolate", "--no-cache")
    done = tsopt("export", "m.py", "--frontend", "strict", *options)
    assert done.code == 0, done.err
    assert "captured by torch.export in strict mode" in done.out
    assert "aten.maximum" in tsopt("inspect", "m.py", "--frontend", "strict").out
    asked = tsopt("export", "m.py", "--frontend", "fx")
    assert asked.code == 2
    assert "torch.fx cannot trace the model" in asked.err
    assert "m.py:6" in asked.err
    assert tsopt("inspect", "m.py", "--frontend", "one-graph").code == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("magic", "one of: auto, one-graph, export, strict, fx, torchscript, parts"),
        ("parts", "a partitioned model cannot be saved"),
    ],
)
def test_who_cannot_read_it(tsopt, write, name, message):
    write(NUMPY)
    done = tsopt("export", "m.py", "--frontend", name)
    assert done.code == 2
    assert message in done.err
    assert not done.out


@pytest.mark.parametrize("command", ["export", "bench", "inspect"])
def test_the_help_lists_every_front_end(tsopt, command):
    text = " ".join(tsopt(command, "--help").out.split())
    assert f"auto, {', '.join(FRONTENDS[1:-1])} or {FRONTENDS[-1]}." in text


def test_an_axis_is_named_once():
    with pytest.raises(UsageError, match="--dynamic x:0 was given twice"):
        read_sizes(["x:0=a", "x:0=b"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--dynamic", "y:0=b"], "there is no input 'y'"),
        (["--dynamic", "input:7=b"], "'input' has no axis 7"),
        (["--dynamic", "input:0=b[9..1]"], "invalid range"),
        (["--dynamic", "input:0=b]"], "invalid dimension"),
        (["--input", "input:1x4:f31"], "unsupported dtype 'f31'"),
        (["--input", "1x4x:f32"], "cannot parse --input '1x4x:f32'"),
        (["--input", ""], "cannot parse --input ''"),
        (["--input", "99999999999999x99999999999"], "cannot create a tensor of that shape"),
        (["--without", "no_such_rule"], "unknown rule or pass"),
    ],
)
def test_an_option_that_does_not_fit_the_model_is_blamed_itself(tsopt, write, arguments, text):
    write()
    ran = tsopt("inspect", "m.py", *arguments)
    assert ran.code == 2
    assert text in ran.err
    assert "fix: " in ran.err
