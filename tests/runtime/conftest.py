"""What several tests of the runtime share: small models, captured and optimized once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import tsopt
from tsopt.compiler.calls.example import Example
from tsopt.runtime.calling.optimized import Optimized
from tsopt.runtime.racing.environment import environment
from tsopt.runtime.racing.row import Row
from tsopt.runtime.report import Report


def make_mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


@pytest.fixture(scope="session")
def mlp() -> nn.Module:
    return make_mlp()


@pytest.fixture(scope="session")
def mlp_input() -> torch.Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="session")
def mlp_program(mlp, mlp_input):
    return tsopt.capture(mlp, mlp_input)


@pytest.fixture(scope="session")
def executables(mlp_program):
    """The small model compiled once by each backend."""
    return {name: tsopt.compile(mlp_program, name) for name in ("eager", "torchscript", "onnxruntime")}


@pytest.fixture(scope="session")
def optimized_by(mlp, mlp_input, mlp_program, executables):
    """An Optimized of the small model whose winner is the backend asked for: a race would choose by the clock."""

    def make(backend: str, *, policy: str = "capture", another=None) -> Optimized:
        report = Report(
            model="Sequential",
            rows=(Row("eager"), *([] if backend == "model" else [Row(backend, key=backend)])),
            winner_key=backend,
            why="chosen",
            nodes=(3, 3),
            environment=environment(),
        )

        def refuse(example: Example):
            raise tsopt.BackendError("no other form")

        def for_one_size(example: Example, *others: Example):
            if others:
                raise tsopt.CaptureError("specialized on its sizes")
            return (another or refuse)(example)

        executable = None if backend == "model" else executables[backend]
        return Optimized(mlp, mlp_program, executable, report, Example((mlp_input,)), for_one_size, policy)

    return make


@pytest.fixture(scope="session")
def bundles(optimized_by, tmp_path_factory):
    """One sound bundle of each backend; tests copy before they damage."""
    place = tmp_path_factory.mktemp("bundles")
    return {name: optimized_by(name).save(place / f"{name}.tsopt") for name in ("eager", "torchscript", "onnxruntime")}


@pytest.fixture
def bundle(bundles, tmp_path):
    def copied(name: str = "eager") -> Path:
        return Path(shutil.copytree(bundles[name], tmp_path / "b.tsopt"))

    return copied
