"""Exit codes, and what a command says of mistakes in its call or in the model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.helpers import HEAD, assert_only_stages
from tsopt.cli.main import main

ROOT = Path(__file__).parents[2]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)


# ---- the command itself -------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["export", "--help"], ["--version"], ["bench", "--nonsense"]])
def test_help_version_and_mistakes_do_not_wait_for_torch(arguments):
    code = f"import sys, tsopt.cli.main as cli; cli.main({arguments!r})\n"
    done = python(code + "assert 'torch' not in sys.modules and 'onnxruntime' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_importing_tsopt_imports_no_heavy_library():
    heavy = {"torch", "numpy", "onnx", "onnxscript", "onnxruntime", "openvino", "safetensors", "typer", "rich"}
    done = python(f"import sys, tsopt; dir(tsopt); tsopt.UsageError; print({heavy} & set(sys.modules))")
    assert done.stdout == "set()\n", done.stderr


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
