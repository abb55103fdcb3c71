"""Exported programs and TorchScript files as models of a command."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt as package
from tests.cli.helpers import Writing, net
from tsopt.cli.model_sources import load_model


@pytest.fixture
def pt2(tmp_path):
    x = torch.ones(2, 3, 9, 9)
    torch.export.save(torch.export.export(net().eval(), (x,)), tmp_path / "m.pt2")
    return tmp_path / "m.pt2"


@pytest.mark.filterwarnings("ignore")
def test_an_exported_program_knows_its_example(pt2):
    found = load_model(str(pt2), [], 0, trust=True)
    assert isinstance(found.model, torch.export.ExportedProgram)
    assert found.example_input.args[0].shape == (2, 3, 9, 9)


@pytest.mark.filterwarnings("ignore")
def test_trying_an_exported_program_changes_neither_its_state_nor_its_example(tmp_path):
    x = torch.ones(3)
    torch.export.save(torch.export.export(Writing().eval(), (x,)), tmp_path / "m.pt2")
    found = load_model(str(tmp_path / "m.pt2"), [], 0, trust=True)
    assert found.model.state_dict["calls"].tolist() == [0]
    assert found.example_input.args[0].tolist() == [1, 1, 1]
    assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(0)))


@pytest.fixture
def scripted(tmp_path):
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval()
    torch.jit.trace(model, torch.ones(1, 4)).save(tmp_path / "m.pt")
    return tmp_path / "m.pt"


@pytest.mark.filterwarnings("ignore")
def test_a_torchscript_file_needs_an_input(scripted):
    with pytest.raises(package.UsageError, match="does not say how it is called"):
        load_model(str(scripted), [], 0, trust=True)
    found = load_model(str(scripted), ["1x4"], 0, trust=True)
    assert found.model(*found.example_input).shape == (1, 3)


@pytest.mark.filterwarnings("ignore")
def test_the_commands_take_such_files(tsopt, scripted, tmp_path):
    options = ("--input", "1x4", "--backends", "eager", "--no-isolate", "--no-cache", "--seconds", "0.05")
    assert "--trust" in tsopt("export", scripted, *options).err
    ran = tsopt("export", scripted, *options, "--trust")
    assert ran.code == 0, ran.err
    assert (tmp_path / "m.tsopt").is_dir()


@pytest.mark.parametrize("name", ["m.pt2", "m.pt"])
@pytest.mark.filterwarnings("ignore")
def test_other_files_are_refused(tmp_path, name):
    path = tmp_path / name
    with pytest.raises(package.UsageError, match="no such file"):
        load_model(str(path), [], 0, trust=True)
    torch.save({"weight": torch.ones(2)}, path)
    with pytest.raises(package.UsageError, match="which can hold code"):
        load_model(str(path), [], 0)
    with pytest.raises(package.UsageError, match=r"is not (a program|a TorchScript)") as caught:
        load_model(str(path), [], 0, trust=True)
    assert "Python file" in caught.value.fix
