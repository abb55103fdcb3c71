"""The options and the results of commands."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.cli.conftest import MODEL
from tests.cli.helpers import HEAD, assert_only_stages
from tsopt.runtime.backends.table import BACKENDS

COMMANDS = ("export", "quantize", "profile", "bench", "inspect", "verify", "rules", "doctor")


def test_help_lists_the_commands(tsopt):
    ran = tsopt("--help")
    assert ran.code == 0
    assert all(name in ran.out for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_option_has_a_help_text(tsopt, command):
    ran = tsopt(command, "--help")
    assert ran.code == 0
    assert "Usage: tsopt" in ran.out


@pytest.mark.parametrize("command", ["export", "bench", "inspect"])
def test_rules_are_left_out_by_every_command_that_optimizes(tsopt, write, quick, command):
    write(
        HEAD
        + "class Net(nn.Module):\n    def forward(self, x):\n        return (-(-x) * 1).sin()\nmodel = Net().eval()\n"
    )
    rules = [set(), {"neg_neg"}, {"neg_neg", "times_one"}]
    for left_out in rules:
        options = [word for name in sorted(left_out) for word in ("--without", name)]
        found = tsopt(command, "m.py", "--json", *options).json
        done = {item["rule"] for record in found["passes"] for item in record["done"]}
        assert {"neg_neg", "times_one"} - left_out <= done
        assert not left_out & done


@pytest.mark.parametrize("command", ["export", "bench", "inspect"])
def test_commands_share_the_options_that_say_what_to_optimize(tsopt, command):
    text = tsopt(command, "--help").out
    assert all(option in text for option in ("--input", "-O", "--seed", "--eval", "--allow-nan", "--without", "--json"))
    for option in ("--threads", "--seconds", "--budget", "--memory", "--best-so-far", "--no-isolate"):
        assert (option in text) == (command != "inspect")


@pytest.mark.parametrize("budget", ["0", "-3", "nan"])
def test_a_budget_that_is_none_is_a_usage_error(tsopt, write, budget):
    write()
    ran = tsopt("bench", "m.py", "--budget", budget)
    assert ran.code == 2
    assert "budget" in ran.err


@pytest.mark.parametrize(
    ("text", "size"), [("4GB", 4 * 10**9), ("1.5 GiB", 3 << 29), ("512m", 512 * 10**6), ("1000000", 10**6), ("7B", 7)]
)
def test_memory_is_a_number_of_bytes_or_a_size(tsopt, write, monkeypatch, text, size):
    given = options_of_race(monkeypatch)
    write()
    tsopt("bench", "m.py", "--memory", text)
    assert given["memory"] == size


@pytest.mark.parametrize("flag", [[], ["--best-so-far"]])
def test_ctrl_c_can_keep_the_best_so_far(tsopt, write, monkeypatch, flag):
    given = options_of_race(monkeypatch)
    write()
    tsopt("bench", "m.py", *flag)
    assert given["best_so_far"] is bool(flag)


@pytest.mark.parametrize("text", ["", "0", "-3", "nan", "4 parsecs", "1e9", "0.1B"])
def test_memory_that_is_no_size_is_a_usage_error(tsopt, write, text):
    write()
    ran = tsopt("bench", "m.py", f"--memory={text}")
    assert ran.code == 2
    assert "--memory" in ran.err


@pytest.mark.parametrize(
    ("arguments", "isolate", "budget"),
    [((), True, None), (("--no-isolate",), False, None), (("--budget", "90"), True, 90.0)],
    ids=["default", "no isolation", "budget"],
)
def test_isolation_and_budget_reach_the_race(tsopt, write, monkeypatch, arguments, isolate, budget):
    given = options_of_race(monkeypatch)
    write()
    for command in ("bench", "export"):
        given.clear()
        assert "seen" in tsopt(command, "m.py", *arguments).err
        assert (given["isolate"], given["budget"]) == (isolate, budget)


@pytest.mark.parametrize(
    ("asked", "backends"),
    [("all", "all"), ("onednn, onnxruntime?threads=1", ["onednn", "onnxruntime?threads=1"])],
)
def test_who_races_can_be_chosen(tsopt, write, monkeypatch, asked, backends):
    given = options_of_race(monkeypatch)
    write()
    for command in ("bench", "export"):
        assert "seen" in tsopt(command, "m.py", "--backends", asked).err
        assert given["backends"] == backends
    tsopt("bench", "m.py")
    assert "backends" not in given  # optimize's own


def options_of_race(monkeypatch):
    """What commands give to `optimize`, which refuses."""
    from tsopt import api, sweeps

    given: dict[str, Any] = {}

    def optimize(*_, **options):
        given.clear()
        given.update(options)
        raise api.UsageError("seen")

    monkeypatch.setattr(api, "optimize", optimize)
    monkeypatch.setattr(sweeps, "optimize", optimize)
    return given


# ---- bench --------------------------------------------------------------------------------------------------


def test_bench_shows_everybody_and_writes_nothing(tsopt, write, tmp_path):
    write()
    before = set(tmp_path.iterdir())
    ran = tsopt("bench", "m.py", "--seconds", "0.1")
    assert ran.code == 0
    assert all(name in ran.out for name in ("eager", "eager + passes", "TorchScript", "ONNX Runtime", "baseline"))
    assert "wins" in ran.out.splitlines()[0]
    assert_only_stages(ran.err)
    stages = [line.split(": ")[-1].split(" (")[0] for line in ran.err.splitlines()]
    assert [stage for stage in stages if stage in ("capture", "passes", "timing")] == ["capture", "passes", "timing"]
    assert {p for p in tmp_path.iterdir() if p.name != "__pycache__"} == before


def test_bench_json_is_one_value(tsopt, write, quick):
    write()
    found = tsopt("bench", "m.py", "--json").json
    assert [row["name"] for row in found["rows"]] == ["eager", "eager + passes"]
    assert found["rows"][0]["p50_ms"] > 0
    assert found["environment"]["versions"]["torch"]


def test_a_sweep_is_one_table_and_is_saved(tsopt, write, tmp_path):
    write()
    ran = tsopt("bench", "m.py", "--seconds", "0.1", "--threads", "1,2", "--batch-sizes", "1,3", "--backends", "eager")
    assert ran.code == 0
    assert len(re.findall(r"eager \+ passes[ *]+[\d.]", ran.out)) == 4  # below, reasons may name it again
    assert "samples/s" in ran.out.splitlines()[0]
    assert "* winner in its setting" in ran.out


@pytest.mark.parametrize("suffix", ["json", "csv", "md"])
def test_a_sweep_is_saved_in_the_form_of_its_suffix(tsopt, write, quick, tmp_path, suffix):
    write()
    ran = tsopt("bench", "m.py", "--threads", "1,2", "-o", f"out.{suffix}")
    assert f"saved: out.{suffix}" in ran.out
    text = (tmp_path / f"out.{suffix}").read_text()
    if suffix == "json":
        assert len(json.loads(text)["results"]) == 2
    else:
        assert len(re.findall(r"(?m)[|,][ *]*eager \+ passes[ *]*[|,]", text)) == 2


def test_a_sweep_as_json_is_one_value(tsopt, write, quick):
    write()
    found = tsopt("bench", "m.py", "--json", "--batch-sizes", "2,4").json
    assert [result["setting"]["batch"] for result in found["results"]] == [2, 4]


def test_a_sweep_of_a_model_that_runs_in_no_setting_is_an_error(tsopt, write, quick, tmp_path):
    write(f"{MODEL}model = nn.Sequential(model, nn.Dropout()).train()\n")
    ran = tsopt("bench", "m.py", "--threads", "1,2", "-o", "out.csv")
    assert (ran.code, ran.out) == (2, "")
    assert "training mode" in ran.err
    assert "fix: " in ran.err
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--threads", "0"), "--threads '0'"),
        (("--threads", "1,,2"), "empty item"),
        (("--batch-sizes", "1,x"), "'x' is not an integer"),
        (("--devices", "tpu9"), "'tpu9' cannot be used"),
        (("--backends", "nonsense"), "unknown backend 'nonsense'"),
        (("--backends", "onnxruntime?colour=red"), "unknown option 'colour'"),
        (("--precision", "int3"), "unknown precision 'int3'"),
        (("-o", "out.xlsx"), "unknown suffix"),
        (("-o", "m.py/out.csv"), "cannot be written"),
    ],
)
def test_bad_settings_are_refused_with_nothing_written(tsopt, write, quick, tmp_path, arguments, text):
    write()
    ran = tsopt("bench", "m.py", *arguments)
    assert ran.code == 2
    assert text in ran.err
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"m.py"}


def test_quiet_prints_nothing(tsopt, write, quick):
    write()
    for command in (["bench", "m.py", "-q"], ["export", "m.py", "-q"], ["verify", "m.tsopt", "-q"]):
        ran = tsopt(*command)
        assert (ran.code, ran.out, ran.err) == (0, "", "")


def test_quiet_still_shows_errors(tsopt):
    assert "no such file" in tsopt("bench", "m.py", "-q").err


# ---- doctor -------------------------------------------------------------------------------------------------


def test_doctor_shows_machine_and_backends(tsopt):
    ran = tsopt("doctor")
    assert ran.code == 0
    assert all(word in ran.out for word in ("cpu", "torch", "onnxruntime", "torchscript", "usable"))


def test_doctor_shows_engines_only_and_json_has_every_backend(tsopt):
    assert not [line for line in tsopt("doctor").out.splitlines() if line.startswith("null")]
    assert set(tsopt("doctor", "--json").json["backends"]) == set(BACKENDS)


def test_doctor_json_parses(tsopt):
    found = tsopt("doctor", "--json").json
    assert found["backends"]["onnxruntime"] == {"usable": True, "fix": ""}
    assert found["environment"]["cores"] >= 1


def test_doctor_says_what_to_install(tsopt, monkeypatch):
    from tsopt.runtime.onnx.ort import OnnxRuntimeBackend

    monkeypatch.setattr(OnnxRuntimeBackend, "missing", lambda self: "pip install onnxruntime")
    assert tsopt("doctor", "--json").json["backends"]["onnxruntime"] == {
        "usable": False,
        "fix": "pip install onnxruntime",
    }
