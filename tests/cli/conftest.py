"""Runs the command line in this process, on model files written for the test."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from tsopt.cli import beside
from tsopt.cli.main import main

MODEL = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
example_input = torch.ones(1, 4)
"""


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def tsopt(capsys, monkeypatch, tmp_path):
    """Runs `tsopt ARGUMENTS` in an empty directory; a traceback never reaches the user."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> Ran:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        found = capsys.readouterr()
        assert "Traceback" not in found.err + found.out
        return Ran(code, found.out, found.err)

    return run


@pytest.fixture
def write(tmp_path):
    """Writes a Python file; the text that most models share unless another is given."""

    def made(text: str = MODEL, name: str = "m.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return made


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """A model file and its bundle, made once; the race is kept to eager so that it takes no time."""
    place = tmp_path_factory.mktemp("exported")
    (place / "m.py").write_text(MODEL)
    import tsopt as package
    from tsopt.cli.model_file import load_model_file

    loaded = load_model_file(str(place / "m.py"), [], 0)
    fast = package.optimize(loaded.model, loaded.example_input, backends=("eager",), seconds=0.01, isolate=False)
    fast.save(place / "m.tsopt")
    return place


@pytest.fixture
def quick(monkeypatch):
    """Lets `optimize` race eager alone where nobody is named: for commands whose point is not the race."""
    import functools

    from tsopt import api, sweeps

    real = api.optimize

    @functools.wraps(real)
    def optimize(*args, **kwargs):
        return real(*args, **{"backends": ("eager",), **kwargs, "seconds": 0.01})

    monkeypatch.setattr(api, "optimize", optimize)
    monkeypatch.setattr(sweeps, "optimize", optimize)


@pytest.fixture(autouse=True)
def _forgotten():
    """What a command ends with, for tests that load a file without one."""
    yield
    beside.forget()
