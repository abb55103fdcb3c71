"""A backend of the user's own, named by its place or by an entry in the table: it races, wins, is stored and loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import tsopt
from tests.runtime.toy import FILE, Toy
from tsopt.cli.app import app
from tsopt.runtime.backends.table import BACKENDS, BackendInfo
from tsopt.runtime.racing import race as race_module
from tsopt.runtime.racing.speedup import Timing

PLACE = "tests.runtime.toy:Toy"
X = torch.linspace(-1, 1, 8).reshape(2, 4)


@pytest.fixture(autouse=True)
def _toy_is_fast(monkeypatch):
    def measured(calls, inputs, **_):
        return {name: Timing((1.0 if "oy" in name else 4.0,) * 7) for name in calls}

    monkeypatch.setattr(race_module, "measure", measured)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(4, 4).eval()


@pytest.fixture
def entry(monkeypatch):
    """The toy as one of the table."""
    monkeypatch.setitem(BACKENDS, "toy", BackendInfo("toy", PLACE, "Toy", "always"))


def optimized(model, *backends, **options):
    return tsopt.optimize(model, X, backends=backends, isolate=False, cache=False, seconds=0.01, **options)


def in_a_fresh_process(code, *arguments):
    found = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return found.returncode, found.stdout, found.stderr


@pytest.mark.usefixtures("as_shipped")
def test_one_of_the_working_directory_is_found_there_by_the_probe_of_who_trusts_it(model, tmp_path, monkeypatch):
    """As in a console."""
    (tmp_path / "toy_of_a_console.py").write_text("from tests.runtime.toy import Toy\nclass Mine(Toy): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    bundle = optimized(model, "toy_of_a_console:Mine").save("m.tsopt")
    assert tsopt.load(bundle, trust=True, probe=True).backend == "toy_of_a_console:Mine"


def test_it_wins_is_stored_with_its_place_and_loaded_in_a_fresh_process_by_who_trusts_it(model, tmp_path):
    fast = optimized(model, PLACE)
    assert (fast.backend, fast.report.winner) == ("toy", PLACE)
    bundle = fast.save(tmp_path / "m.tsopt")
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert (manifest["backend"], manifest["code"], (bundle / FILE).exists()) == (PLACE, True, True)

    load = "import sys, torch, tsopt; x = torch.linspace(-1, 1, 8).reshape(2, 4)\n"
    load += "print(tsopt.load(sys.argv[1], trust=len(sys.argv) > 2)(x).tolist())"
    code, said, _ = in_a_fresh_process(load, bundle, "trust")
    assert code == 0
    torch.testing.assert_close(torch.tensor(json.loads(said)), model(X).detach())
    code, _, told = in_a_fresh_process(load, bundle)
    assert code == 1
    assert f"loading the bundle executes code (the custom backend {PLACE})" in told


def test_what_was_loaded_can_be_stored_again(model, tmp_path):
    place = optimized(model, PLACE).save(tmp_path / "m.tsopt")
    assert tsopt.load(place, trust=True).place == PLACE


def test_its_bundle_is_verified(model, tmp_path):
    bundle = optimized(model, PLACE).save(tmp_path / "m.tsopt")
    found = CliRunner().invoke(app, ["verify", str(bundle), "--trust"])
    assert (found.exit_code, "intact" in found.output) == (0, True), found.output


def test_what_it_does_wrong_does_not_win(model):
    found = optimized(model, f"{PLACE}?scale=2")
    assert found.backend == "eager"
    assert found.report.row(f"{PLACE}, scale 2").verdict == "wrong"


def test_what_it_does_not_take_is_said(model):
    found = optimized(nn.Sequential(model, nn.Tanh()), PLACE)
    assert "only linear layers, not aten.tanh" in found.report.row(PLACE).reason


def test_one_that_no_other_process_can_import_is_not_stored(model, tmp_path):
    class Local(Toy):
        __slots__ = ()

    program = tsopt.capture(model, X)
    made = tsopt.compile(program, Local())
    fast = optimized(model, PLACE)
    fast.executable.place = made.place
    with pytest.raises(tsopt.BundleError, match="a bundle cannot refer to the backend toy"):
        fast.save(tmp_path / "m.tsopt")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("entry")
def test_with_an_entry_in_the_table_it_is_data_and_goes_by_its_name(model, tmp_path):
    fast = optimized(model, "toy")
    assert fast.report.winner == "Toy"
    bundle = fast.save(tmp_path / "m.tsopt")
    assert json.loads((bundle / "manifest.json").read_text())["backend"] == "toy"
    torch.testing.assert_close(tsopt.load(bundle, probe=False)(X), model(X).detach())


@pytest.mark.usefixtures("entry")
def test_with_an_entry_in_the_table_it_races_unasked_and_doctor_lists_it(model):
    fast = tsopt.optimize(model, X, isolate=False, cache=False, seconds=0.01)
    assert fast.report.row("Toy").status == "ok"
    found = CliRunner().invoke(app, ["doctor", "--json"])
    assert json.loads(found.stdout)["backends"]["toy"] == {"usable": True, "fix": ""}
