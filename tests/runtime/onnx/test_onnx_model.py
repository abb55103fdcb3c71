"""What engines get of a model: weights as they lie in memory, mapped from the program's file where there is one."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import tsopt
from tests.compiler.helpers import Net as Other
from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.serialize import WEIGHTS, read_program, write_program
from tsopt.runtime.backends.backend import get_backend
from tsopt.runtime.onnx.export import to_onnx
from tsopt.runtime.onnx.onnx_model import OnnxModel

ENGINES = ["onnxruntime", "openvino"]
VALUE = torch.linspace(-1, 1, 3 * 64).reshape(1, 3, 64)


class Net(nn.Module):
    """One weight is read transposed, another one both ways, a third one is of four axes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied, self.conv = nn.Linear(64, 48), nn.Embedding(40, 48), nn.Conv2d(1, 32, 3, padding=1)
        self.small = nn.Linear(3, 3)

    def forward(self, x):
        y = self.first(x) + self.tied((x[..., 0] > 0).long())
        y = y @ self.tied.weight.t()
        return self.small(self.conv(y[:, None]).flatten(2).mean(-1)[:, :3])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def program(model):
    return tsopt.capture(model, VALUE)


@pytest.fixture
def from_a_file(program, tmp_path):
    """The program as a candidate's process has it: its weights are mapped from a file."""
    (tmp_path / "program").mkdir()
    write_program(replace(program, signature=program.signature.flat()), tmp_path / "program")
    return read_program(tmp_path / "program", own=True)


@pytest.fixture
def directory(tmp_path):
    made = tmp_path / "files"
    made.mkdir()
    return made


def of(program: Program, wanted: Program) -> Program:
    """A program read from a file, called like the one that was written."""
    return replace(program, signature=wanted.signature)


def weights_of(model: OnnxModel) -> dict[str, np.ndarray]:
    return {key: value.const_value.numpy() for key, value in model.model.graph.initializers.items()}


def ops_of(model: OnnxModel) -> list[str]:
    return [node.op_type for node in model.model.graph]


def answer(path: Path) -> torch.Tensor:
    session = onnxruntime.InferenceSession(path)
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: VALUE.numpy()})[0])


def test_weights_are_handed_over_without_a_copy(program):
    _, arrays = to_onnx(program).detached()
    theirs = [weight.numpy() for weight in program.weights.values()]
    assert len(arrays) == 4, "first, tied as it is, tied transposed, conv"
    for array in arrays.values():
        assert array.flags.c_contiguous
        assert any(np.shares_memory(array, weight) for weight in theirs)


@pytest.mark.parametrize("place", [".", "model.onnx"], ids=["for an engine", "one file"])
def test_what_is_written_is_read_again_as_it_was(place, program, model, directory):
    made = to_onnx(program)
    wanted, ops = weights_of(made), ops_of(made)
    made.save(directory / place)
    assert (weights_of(made).keys(), ops_of(made)) == (wanted.keys(), ops), "the model itself stays as it is"
    again = OnnxModel.read(directory / "model.onnx")
    torch.testing.assert_close(answer(directory / "model.onnx"), model(VALUE).detach())
    assert sorted(ops_of(again)) == sorted(ops)
    found = weights_of(again)
    assert found.keys() == wanted.keys()
    for key, weight in wanted.items():
        np.testing.assert_array_equal(found[key], weight)
    again.save(directory / "again.onnx")
    assert "Transpose" not in ops_of(OnnxModel.read(directory / "again.onnx"))
    torch.testing.assert_close(answer(directory / "again.onnx"), model(VALUE).detach())


def test_integers_that_lie_transposed_are_copied():
    """Engines look for constants where they compute with integers."""
    model, x = Other(lambda self, x: x @ self.y.t(), y=torch.arange(800).reshape(20, 40)), torch.ones(2, 40).long()
    made = to_onnx(tsopt.capture(model, x))
    (name,) = made.detached()[1]
    assert not name.endswith(".stored")


def test_a_name_that_somebody_has_already_is_not_taken(directory):
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.val_0 = nn.Module()
            self.val_0.stored = nn.Parameter(torch.randn(64, 64))
            self.linear = nn.Linear(64, 64)

        def forward(self, x):
            return self.linear(x) * 2 + (x @ self.val_0.stored)

    model = Named().eval()
    made = to_onnx(tsopt.capture(model, VALUE))
    assert "val_0.stored" in weights_of(made)
    made.save(directory)
    torch.testing.assert_close(answer(directory / "model.onnx"), model(VALUE).detach())
    again = weights_of(OnnxModel.read(directory / "model.onnx"))
    assert again.keys() == weights_of(made).keys()


@pytest.mark.parametrize("engine", ENGINES)
def test_no_engine_writes_weights_that_are_in_a_file_already(engine, program, from_a_file, model, directory):
    compiled = get_backend(engine).compile(of(from_a_file, program))
    compiled.save(directory)
    stored = from_a_file.weights_file
    assert stored is not None
    assert (directory / "weights").samefile(stored)
    others = sum(file.stat().st_size for file in directory.iterdir() if file.name != "weights")
    large = sum(weight.nbytes for weight in program.weights.values())
    assert others < large / 2, "the graph and small weights"
    torch.testing.assert_close(compiled(VALUE), model(VALUE).detach())
    torch.testing.assert_close(answer(directory / "model.onnx"), model(VALUE).detach())


@pytest.mark.parametrize("refuses", ["links", "maps"])
def test_where_the_system_does_not_share_files_weights_are_written(
    refuses, program, from_a_file, model, directory, monkeypatch
):
    if refuses == "links":
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "Operation not permitted")))
    else:
        monkeypatch.setattr(Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError(2, "No file")))
    to_onnx(of(from_a_file, program)).save(directory)
    monkeypatch.undo()
    assert (directory / "model.onnx.data").stat().st_size > 0
    (directory / "weights").unlink(missing_ok=True)
    torch.testing.assert_close(answer(directory / "model.onnx"), model(VALUE).detach())


def test_a_weight_that_is_not_the_one_of_the_file_is_written(program, from_a_file, directory):
    """Passes make new weights, which have the names of others at times."""
    changed = of(from_a_file, program)
    changed.weights["first.weight"] = changed.weights["first.weight"] * 2
    to_onnx(changed).save(directory)
    assert (directory / "model.onnx.data").stat().st_size == 64 * 48 * 4
    torch.testing.assert_close(answer(directory / "model.onnx"), tsopt.compile(changed, "eager")(VALUE).detach())


def test_a_program_of_somebody_elses_file_shares_nothing(program, from_a_file, tmp_path):
    assert from_a_file.weights_file == tmp_path / "program" / WEIGHTS
    assert from_a_file.copy().weights_file == from_a_file.weights_file
    assert read_program(tmp_path / "program").weights_file is None
    assert program.weights_file is None


def test_weights_of_the_file_are_taken_from_the_memory_of_a_process_that_has_them(
    program, from_a_file, model, directory
):
    to_onnx(of(from_a_file, program)).save(directory)
    again = OnnxModel.read(directory / "model.onnx", program)
    shutil.rmtree(directory)
    mine = [weight.numpy() for weight in program.weights.values()]
    large = [weight for weight in weights_of(again).values() if weight.nbytes > 1024]
    assert len(large) == 4, "first, tied as it is, tied transposed, conv"
    assert all(any(np.shares_memory(weight, own) for own in mine) for weight in large)
    again.save(directory.with_suffix(".onnx"))
    torch.testing.assert_close(answer(directory.with_suffix(".onnx")), model(VALUE).detach())


def test_weights_that_the_file_does_not_have_are_read_from_the_one_that_does(program, from_a_file, model, directory):
    changed = of(from_a_file, program)
    changed.weights["first.weight"] = changed.weights["first.weight"] * 2
    to_onnx(changed).save(directory)
    other = replace(program, weights={name: w for name, w in program.weights.items() if name != "tied.weight"})
    other.weights["conv.weight"] = torch.cat([other.weights["conv.weight"]] * 2, 1)[:, :1]  # with gaps
    found = weights_of(OnnxModel.read(directory / "model.onnx", other))
    wanted = weights_of(to_onnx(changed))
    assert found.keys() == wanted.keys()
    for key, weight in wanted.items():
        np.testing.assert_array_equal(found[key], weight)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_that_is_opened_again_needs_its_files_no_longer_and_copies_no_weights(engine, monkeypatch, tmp_path):
    read, real = [], OnnxModel.read
    monkeypatch.setattr(OnnxModel, "read", lambda *args: read.append(real(*args)) or read[-1])
    model, value = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval(), torch.ones(3, 64)
    program, backend = tsopt.capture(model, value), get_backend(engine)
    (tmp_path / "files").mkdir()
    backend.compile(program).save(tmp_path / "files")
    again = backend.reopen(program, tmp_path / "files")
    shutil.rmtree(tmp_path / "files")
    torch.testing.assert_close(again(value), model(value).detach())
    again.save(tmp_path / "again.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "again.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: value.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(value).detach())
    weights = [item.const_value.numpy() for item in read[0].model.graph.initializers.values()]
    large = [weight for weight in weights if weight.size > 1000]
    assert len(large) == 2
    assert not any(weight.flags.writeable for weight in large), "mapped for reading"
