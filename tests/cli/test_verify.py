from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch

import tsopt as package
from tests.runtime.helpers import save, sign
from tsopt.cli import verify
from tsopt.runtime.bundles import store


@pytest.fixture
def place(exported, tmp_path):
    for name in ("m.py", "m.tsopt"):
        source = exported / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    return tmp_path


def test_a_sound_bundle_is_whole(tsopt, place):
    ran = tsopt("verify", "m.tsopt")
    assert ran.code == 0, ran.err
    assert ran.out.startswith("m.tsopt: intact, outputs match the model's reference outputs")


def test_a_sound_bundle_equals_its_model_on_fresh_inputs(tsopt, place):
    ran = tsopt("verify", "m.tsopt", "--model", "m.py")
    assert ran.code == 0, ran.err
    assert "input sets" in ran.out


@pytest.mark.parametrize("option", [("--input", "1x4"), ("--seed", "1"), ("--eval",)])
def test_what_says_how_a_model_is_called_needs_a_model(tsopt, place, option):
    ran = tsopt("verify", "m.tsopt", *option)
    assert ran.code == 2
    assert f"{option[0]} needs --model" in ran.err
    assert tsopt("verify", "m.tsopt", *option, "--model", "m.py").code == 0


def test_the_record_of_a_buffer_that_is_returned_is_what_the_call_has_left(tsopt, tmp_path):
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(2))

        def forward(self, x):
            self.count.add_(x)
            return self.count

    model, example = Counting(), torch.ones(2)
    save(package.compile(package.capture(model, example), "eager"), tmp_path / "c.tsopt", model, example)
    ran = tsopt("verify", "c.tsopt")
    assert ran.code == 0, ran.err


def test_json_says_ok(tsopt, place):
    found = tsopt("verify", "m.tsopt", "--json").json
    assert found["ok"] is True
    assert found["bundle"] == "m.tsopt"
    assert 0 < found["load_seconds"] < 60


def test_the_time_to_load_is_part_of_the_answer(tsopt, place, monkeypatch):
    clock = iter((1.0, 3.5))
    monkeypatch.setattr(verify, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert "; loaded in 2.50 s" in tsopt("verify", "m.tsopt").out


def test_a_tampered_bundle_exits_with_2(tsopt, place):
    raw = bytearray((place / "m.tsopt" / "weights.safetensors").read_bytes())
    raw[-1] ^= 1
    (place / "m.tsopt" / "weights.safetensors").write_bytes(raw)
    ran = tsopt("verify", "m.tsopt")
    assert ran.code == 2
    assert "'weights.safetensors' was modified" in ran.err
    assert ran.out == ""


def test_other_weights_exit_with_1_although_the_bundle_is_whole(tsopt, place):
    from safetensors.torch import load_file, save_file

    file = place / "m.tsopt" / "weights.safetensors"
    save_file({name: value + 1 for name, value in load_file(file).items()}, file)
    sign(place / "m.tsopt")
    ran = tsopt("verify", "m.tsopt")
    assert ran.code == 1
    assert "outputs differ from the model's reference outputs" in ran.err


def test_another_model_exits_with_1(tsopt, place, write):
    write((place / "m.py").read_text().replace("manual_seed(0)", "manual_seed(1)"), name="other.py")
    ran = tsopt("verify", "m.tsopt", "--model", "other.py")
    assert ran.code == 1
    assert "does not compute the same values as the model" in ran.err


def test_a_model_of_another_shape_is_no_traceback(tsopt, place, write):
    write((place / "m.py").read_text().replace("ones(1, 4)", "ones(3, 4)"), name="other.py")
    ran = tsopt("verify", "m.tsopt", "--model", "other.py")
    assert ran.code == 2
    assert "shape [3, 4]" in ran.err


@pytest.mark.parametrize("path", ["none.tsopt", "m.py", ".", "n" * 300])
def test_what_is_no_bundle_exits_with_2(tsopt, place, path):
    ran = tsopt("verify", path)
    assert ran.code == 2
    assert "error: " in ran.err


DAMAGE = {
    "missing": "cannot be read",
    "empty": "cannot be read",
    "junk": "cannot be read",
    "other keys": "it has 0 inputs, but the signature has 1",
    "other number": "input.0 is missing",
    "other shape": "has shape [1, 5]",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_bundle_without_a_sound_record_is_no_traceback(tsopt, place, damage):
    from safetensors.torch import save_file

    file = place / "m.tsopt" / "check.safetensors"
    if damage == "missing":
        file.unlink()
    elif damage in ("empty", "junk"):
        file.write_bytes(b"" if damage == "empty" else b"\xff" * 100)
    elif damage == "other keys":
        save_file({"x": torch.ones(1)}, file)
    else:
        key = "input.0" if damage == "other shape" else "input.7"
        save_file({key: torch.ones(1, 5), "output.0": torch.ones(1, 2)}, file)
    sign(place / "m.tsopt", lambda manifest: file.exists() or manifest["members"].pop(file.name))
    ran = tsopt("verify", "m.tsopt")
    assert ran.code == 2
    assert "error: " in ran.err
    assert DAMAGE[damage] in ran.err


def test_a_bundle_that_fails_is_no_traceback(tsopt, place, monkeypatch):
    def fail(self, leaves):
        raise RuntimeError("illegal instruction")

    monkeypatch.setattr("tsopt.runtime.calling.executable.Executable.run_flat", fail)
    ran = tsopt("verify", "m.tsopt")
    assert ran.code == 2
    assert "fails on its own reference inputs" in ran.err
    assert "illegal instruction" in ran.err


def test_code_needs_trust(tsopt, place, write):
    from tsopt.cli.model_file import load_model_file
    from tsopt.compiler.calls.example import as_example
    from tsopt.runtime.racing.environment import environment
    from tsopt.runtime.racing.row import Row
    from tsopt.runtime.report import Report

    loaded = load_model_file(str(place / "m.py"), [], 0)
    made = package.compile(package.capture(loaded.model, loaded.example_input), "torchscript")
    report = Report(
        model="M", rows=(Row("eager"),), winner_key="model", why="", nodes=(1, 1), environment=environment()
    )
    store.save(made, place / "s.tsopt", loaded.model, as_example(loaded.example_input), report)
    ran = tsopt("verify", "s.tsopt")
    assert ran.code == 2
    assert "executes code (TorchScript)" in ran.err
    ran = tsopt("verify", "s.tsopt", "--trust")
    assert ran.code == 0, ran.err
