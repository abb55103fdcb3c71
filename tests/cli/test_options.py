"""Options that several commands have."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize("text", ["x", "x:0", "x=b", ":0=b", "x:y=b", "x:=b"])
def test_texts_that_are_no_sizes(text):
    with pytest.raises(UsageError, match=r"(?s)--dynamic .*fix: --dynamic x:0=batch"):
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
        ("parts", "a model in parts cannot be saved"),
    ],
)
def test_who_cannot_read_it(tsopt, write, name, message):
    write(NUMPY)
    done = tsopt("export", "m.py", "--frontend", name)
    assert done.code == 2
    assert message in done.err
    assert not done.out
