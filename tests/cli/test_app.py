from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tsopt.cli.app import main
from tsopt.runtime.backends.table import BACKENDS

ROOT = Path(__file__).parents[2]
HEAD = "import torch\nfrom torch import nn\nexample_input = torch.ones(1, 4)\n"
COMMANDS = ("export", "bench", "inspect", "verify", "doctor")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)


# ---- the command itself -------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["export", "--help"], ["--version"], ["bench", "--nonsense"]])
def test_help_version_and_mistakes_do_not_wait_for_torch(arguments):
    code = f"import sys, tsopt.cli.app as app; app.main({arguments!r})\n"
    done = python(code + "assert 'torch' not in sys.modules and 'onnxruntime' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_importing_tsopt_is_quick_and_imports_neither_torch_nor_numpy():
    start = time.perf_counter()
    done = python("import sys, tsopt; dir(tsopt); tsopt.UsageError; assert not {'torch', 'numpy'} & set(sys.modules)")
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - start < 3  # a loaded machine; 0.1 s on an idle one


def test_help_lists_the_commands(tsopt):
    ran = tsopt("--help")
    assert ran.code == 0
    assert all(name in ran.out for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_option_has_a_help_text(tsopt, command):
    ran = tsopt(command, "--help")
    assert ran.code == 0
    assert "Usage: tsopt" in ran.out


def test_version_is_the_packages(tsopt):
    import tsopt as package

    assert tsopt("--version").out == f"tsopt {package.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["frobnicate"], "frobnicate"),
        (["export"], "MODEL"),
        (["export", "m.py", "--fast"], "--fast"),
        (["export", "m.py", "--format", "pickle"], "pickle"),
        (["export", "m.py", "--threads", "0"], "--threads"),
        (["export", "m.py", "--threads", "two"], "--threads"),
        (["export", "m.py", "--opset", "3"], "--opset"),
        (["export", "m.py", "-O"], "-O"),
        (["export", "m.py", "-O", "fast"], "-O"),
        (["export", "m.py", "-Ofast"], "-O"),
        (["verify"], "BUNDLE"),
        (["inspect", "a.py", "b.py"], "b.py"),
    ],
)
def test_a_mistake_in_the_call_exits_with_2_and_says_which(tsopt, arguments, text):
    ran = tsopt(*arguments)
    assert ran.code == 2
    assert text in ran.err
    assert ran.out == ""


def test_no_arguments_show_the_help(capsys):
    assert main([]) in (0, 2)
    found = capsys.readouterr()
    assert "export" in found.out + found.err


@pytest.mark.parametrize("level", [["-O0"], ["-O", "0"], ["-O1"], ["-O", "1"], ["-O2"], ["-O", "2"], []])
def test_levels_are_written_as_compilers_do(tsopt, write, level):
    write()
    ran = tsopt("inspect", "m.py", *level, "--json")
    assert ran.code == 0
    assert bool(ran.json["passes"]) == (level not in (["-O0"], ["-O", "0"]))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("inspect", "m.py", "-O7"), "unknown optimization level 7"),
        (("inspect", "m.py", "-O4"), "unknown optimization level 4"),
        *((("inspect", "m.py", "--seed", f"{sign}{'9' * 26}"), "seed") for sign in ("", "-")),
        *((("bench", "m.py", "--seconds", seconds), "seconds") for seconds in ("0", "-1", "nan", "inf")),
        *((("export", "m.py", "--threads", n), "--threads") for n in ("9" * 20, "4097", "-1", "0")),
        *((("bench", "m.py", "--batch-sizes", n), "--batch-sizes") for n in ("1,\u0663", "9" * 10, "1.5", "-1")),
    ],
)
def test_a_value_that_an_option_cannot_have_is_a_usage_error_that_names_it(tsopt, write, arguments, text):
    write()
    ran = tsopt(*arguments)
    assert ran.code == 2
    assert text in ran.err


def test_an_unknown_rule_to_leave_out_is_a_usage_error(tsopt, write):
    write()
    ran = tsopt("inspect", "m.py", "--without", "mul_by_seven")
    assert ran.code == 2
    assert "'mul_by_seven'" in ran.err


def test_an_interrupt_exits_with_130(tsopt, write):
    write("raise KeyboardInterrupt\n")
    ran = tsopt("inspect", "m.py")
    assert ran.code == 130
    assert ran.err.startswith("interrupted")
    assert ran.err.count("\n") == 1


def assert_only_stages(err: str) -> None:
    """What a log has of a command that went well: a line for each stage, with the time."""
    assert all(re.fullmatch(r"m\.py: .+ \(\d+\.\d s\)", line) for line in err.splitlines()), err


@pytest.mark.sliced(1)
@pytest.mark.parametrize("arguments", ["inspect m.py", "inspect m.py --json"])
def test_output_that_nobody_reads_is_no_mistake(write, tmp_path, arguments):
    write()
    command = f"{sys.executable} -m tsopt {arguments} | true; echo ${{PIPESTATUS[0]}}"
    ran = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.stdout.strip() == "141"
    assert_only_stages(ran.stderr)


def test_an_error_with_json_is_json(tsopt, write):
    write("")
    ran = tsopt("bench", "m.py", "--json")
    assert ran.code == 2
    assert ran.json["error"] == "m.py defines no 'model'"
    assert ran.json["fix"]
    assert ran.err == ""


# ---- what the model may do wrong ----------------------------------------------------------------------------


def test_a_branch_on_values_is_shown_with_its_line_and_what_to_write(tsopt, write):
    write(HEAD + "def model(x):\n    if float(x.sum()) > 0:\n        return x\n    return -x\n")
    ran = tsopt("export", "m.py")
    assert ran.code == 2
    assert "has data-dependent control flow" in ran.err
    assert "m.py:5" in ran.err
    assert "keep it a tensor" in ran.err


def test_a_model_in_training_mode_is_refused_and_eval_takes_it(tsopt, write, tmp_path, quick):
    write(HEAD + "model = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))\n")
    ran = tsopt("export", "m.py")
    assert ran.code == 2
    assert "training mode" in ran.err
    assert "--eval" in ran.err
    assert list(tmp_path.glob("*.tsopt")) == []
    assert tsopt("export", "m.py", "--eval").code == 0
    ran = tsopt("verify", "m.tsopt", "--model", "m.py", "--eval")
    assert ran.code == 0, ran.err


def test_weights_that_hold_nan_are_refused_by_name(tsopt, write):
    write(HEAD + "model = nn.Linear(4, 2).eval()\nmodel.weight.data[0, 1] = float('nan')\n")
    ran = tsopt("inspect", "m.py")
    assert ran.code == 2
    assert "NaN in 1 of 8 values" in ran.err
    assert "weight" in ran.err
    assert tsopt("inspect", "m.py", "--allow-nan").code == 0


def test_a_model_whose_every_answer_is_nan_cannot_be_verified(tsopt, write):
    write(HEAD + "model = nn.Linear(4, 2).eval()\nmodel.weight.data[:] = float('nan')\n")
    ran = tsopt("bench", "m.py", "--allow-nan")
    assert ran.code == 0
    assert "nothing can be verified" in " ".join(ran.out.split())
    refused = tsopt("export", "m.py", "--allow-nan")
    assert refused.code == 1
    assert "nothing can be verified" in " ".join(refused.err.split())


def test_a_model_that_fails_shows_its_own_error(tsopt, write):
    write(HEAD + "def model(x):\n    return x @ torch.ones(5, 5)\n")
    ran = tsopt("bench", "m.py")
    assert ran.code == 2
    assert "m.py:5" in ran.err
    assert "mat1 and mat2" in ran.err


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
