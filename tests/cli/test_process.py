"""The process of a command: without torch, under `python -OO`, with closed or full outputs, ended by signals."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import MODEL, Ran
from tsopt.cli import process
from tsopt.runtime.sandbox.processes import descendants

ROOT = Path(__file__).parents[2]

# Runs commands one after the other in a process in which packages cannot be imported, and tells what became of them.
BLOCKED = """
import contextlib, io, json, sys

way, blocked, commands = json.loads(sys.argv[1])

class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

if way == "finder":
    sys.meta_path.insert(0, Nowhere())
else:
    sys.modules.update(dict.fromkeys(blocked))
from tsopt.cli.main import main
for command in commands:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(command)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
print(json.dumps(sorted({"torch"} & {name for name, module in sys.modules.items() if module})))
"""


def python(*arguments: str, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, **options
    )


def without(way: str, blocked: list[str], commands: list[list[str]], cwd: Path) -> list[Ran]:
    done = python("-c", BLOCKED, json.dumps([way, blocked, commands]), cwd=cwd)
    assert done.returncode == 0, done.stderr
    *ran, imported = map(json.loads, done.stdout.splitlines())
    assert imported == []
    return [Ran(*item) for item in ran]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A model file, its bundles for ONNX Runtime and for torch, and one that gives something else than it says."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    import tsopt as package
    from tests.runtime.helpers import save, sign
    from tsopt.cli.model_file import load_model_file

    place = tmp_path_factory.mktemp("served")
    (place / "m.py").write_text(MODEL)
    loaded = load_model_file(str(place / "m.py"), [], 0)
    program = package.capture(loaded.model, loaded.example_input)
    for name in ("onnxruntime", "eager"):
        save(package.compile(program, name), place / f"{name}.tsopt", loaded.model, loaded.example_input)
    save(package.compile(program, "onnxruntime"), place / "other.tsopt", loaded.model, loaded.example_input)
    check = place / "other.tsopt" / "check.safetensors"
    save_file({name: value + np.float32(name == "output.0") for name, value in load_file(check).items()}, check)
    sign(place / "other.tsopt")
    return place


NEEDING_TORCH = [
    ["export", "m.py"],
    ["export", "m.py", "--format", "onnx"],
    ["export", "m.py", "--dry-run"],
    ["bench", "m.py"],
    ["inspect", "m.py"],
    ["verify", "onnxruntime.tsopt", "--model", "m.py"],
    ["verify", "eager.tsopt"],
]


@pytest.mark.parametrize("way", ["finder", "sys.modules"])
def test_without_torch_what_can_run_runs_and_the_rest_says_what_to_install(served, way):
    working = [["doctor"], ["doctor", "--json"], ["verify", "onnxruntime.tsopt"], ["verify", "other.tsopt"]]
    working += [["verify", "none.tsopt"], ["cache", "show"], ["cache", "clear"], ["--help"], ["export", "none.py"]]
    doctor, facts, good, bad, none, show, clear, usage, no_file, *rest = without(
        way, ["torch"], [*working, *NEEDING_TORCH, ["bench", "m.py", "--json"]], served
    )
    assert (doctor.code, facts.code) == (0, 0)
    assert "torch         missing; pip install torch-tsopt" in doctor.out
    assert facts.json["missing"] == ["torch"]
    assert facts.json["backends"]["onnxruntime"]["usable"] is True
    assert facts.json["backends"]["eager"] == {
        "usable": False,
        "fix": "pip install torch-tsopt, which also installs torch",
    }
    assert (good.code, "intact, outputs match the model's reference outputs" in good.out) == (0, True), good.err
    assert (bad.code, "outputs differ from the model's reference outputs" in bad.err) == (1, True)
    assert (none.code, "does not exist" in none.err) == (2, True)
    assert (show.code, clear.code, usage.code) == (0, 0, 0)
    assert "no such file: none.py" in no_file.err
    assert json.loads(rest.pop().out)["error"] == "torch is not installed"
    for command, ran in zip(NEEDING_TORCH, rest, strict=True):
        assert ran.code == 2, command
        said = [line for line in ran.err.splitlines() if not re.search(r": .+ \(\d+\.\d s\)$", line)]
        assert said[0] == "error: torch is not installed", (command, ran.err)
        assert "fix: pip install torch-tsopt" in ran.err
        assert len(said) <= 3


def test_what_the_page_says_to_install_is_enough_for_a_bundle(served):
    """docs/without_torch.md lists packages; all others of tsopt's are blocked here."""
    page = (ROOT / "docs" / "without_torch.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith("pip install numpy"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [item.partition(">")[0] for item in project["dependencies"]]
    listed = line.split()[2:]
    assert set(listed) < set(needed)
    (ran,) = without(
        "finder", sorted({*needed, "openvino", "pandas"} - set(listed)), [["verify", "onnxruntime.tsopt"]], served
    )
    assert ran.code == 0, ran.err


LOADING = """
import json, os, sys

class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in json.loads(sys.argv[1]):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Nowhere())
import numpy, tsopt
from tsopt.runtime.racing import cache_directory

def probed():
    probes = []
    tsopt.runtime.bundles.store.try_out = lambda *given: probes.append(given)
    tsopt.load("onnxruntime.tsopt")
    return len(probes)

os.environ.pop("TSOPT_CACHE_DIR", None)
called = tsopt.load("onnxruntime.tsopt")(numpy.ones((1, 4), numpy.float32)).shape
reason, without = cache_directory.objection(), [probed(), probed()]
os.environ["TSOPT_CACHE_DIR"] = "cache"
print(json.dumps([len(called), reason, without, [probed(), probed()]]))
"""


def test_to_load_a_bundle_three_packages_are_enough(served):
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    others = {item.partition(">")[0] for item in needed} - {"numpy", "onnxruntime", "safetensors"}
    assert "platformdirs" in others
    done = python("-c", LOADING, json.dumps(sorted(others)), cwd=served)
    assert done.returncode == 0, done.stderr
    axes, reason, without_cache, with_cache = json.loads(done.stdout)
    assert axes == 2
    assert reason == "platformdirs is not installed; install it, or set TSOPT_CACHE_DIR to a directory"
    assert (without_cache, with_cache) == ([1, 1], [1, 0])


@pytest.mark.parametrize("name", ["onnxruntime", "safetensors"])
def test_another_package_that_is_missing_is_named_with_what_to_type(served, name):
    (ran,) = without("finder", ["torch", name], [["verify", "onnxruntime.tsopt"]], served)
    assert ran.code == 2
    assert f"pip install {name}" in ran.err


OPTIMIZED = """
import contextlib, io, sys
from tsopt.cli.main import main
assert False, "asserts are left out under -O"
race = ["--seconds", "0.05", "--backends", "eager", "--no-isolate", "--no-cache"]
commands = [["--help"], ["export", "m.py", *race], ["verify", "m.tsopt"], ["inspect", "m.py", "--why", "linear_bias"]]
commands += [["doctor"], ["cache", "show"], ["export", "--help"]]
for command in commands:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(command)
    print(command, code, "Check that a bundle" in out.getvalue(), "Optimize a model" in out.getvalue())
"""


def test_the_help_is_there_where_python_leaves_docstrings_out(tmp_path):
    done = python("-OO", "-m", "tsopt", "--help", cwd=tmp_path)
    assert "Check that a bundle" in done.stdout
    assert "Optimize a model" in done.stdout


@pytest.mark.skipif("not os.environ.get('TSOPT_FUZZ')", reason="torch's own files have to be compiled again: make fuzz")
def test_commands_run_where_python_leaves_asserts_and_docstrings_out(tmp_path):
    (tmp_path / "m.py").write_text(MODEL)
    done = python("-OO", "-c", OPTIMIZED, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert lines[0] == "['--help'] 0 True True"
    assert last == "['export', '--help'] 0 False True"
    assert [line for line in lines if " 0 " not in line] == []


# ---- outputs and signals --------------------------------------------------------------------------------------------


def shell(text: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "T": f"{sys.executable} -m tsopt"}
    return subprocess.run(["bash", "-c", text], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("command", ["cache show", "cache show --json", "--help"])
def test_an_output_that_is_full_closed_or_of_another_alphabet_is_one_line_at_most(tmp_path, command):
    done = shell(
        f"$T {command} >/dev/full; echo $?; $T {command} >&-; echo $?; $T {command} 2>&- >&- <&-; echo $?;"
        f"TSOPT_CACHE_DIR=/tmp/\u00e9 PYTHONIOENCODING=ascii $T {command} > out; echo $?",
        tmp_path,
    )
    assert done.stdout.split() == ["2", "0", "0", "0"], done.stderr
    assert "No space left on device" in done.stderr
    assert len(done.stderr.splitlines()) <= 2


@pytest.mark.sliced(1)
@pytest.mark.parametrize("command", ["verify none.tsopt --json", "inspect none.py --json"])
def test_an_error_for_programs_that_cannot_be_written_is_told_as_text(tmp_path, command):
    done = shell(f"$T {command} >/dev/full; echo $?; (sleep 0.1; $T {command}; echo $? >code) | true", tmp_path)
    assert done.stdout == "2\n"
    assert "No space left on device" in done.stderr
    assert "error: " in done.stderr
    assert "none." in done.stderr
    assert "Traceback" not in done.stderr


def test_only_results_go_to_stdout(tmp_path):
    (tmp_path / "m.py").write_text(
        "import atexit, os, sys, threading\n"
        "os.write(1, b'raw\\n')\nsys.__stdout__.write('dunder\\n')\nos.system('echo child')\nprint('printed')\n"
        "atexit.register(lambda: print('at the end'))\n"
        "class Late(threading.Thread):\n"
        "    def run(self):\n"
        "        threading.main_thread().join()\n"
        "        print('late')\n"
        f"Late().start()\n{MODEL}"
    )
    done = python("-m", "tsopt", "inspect", "m.py", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["captured"]
    for text in ("raw", "dunder", "child", "printed", "at the end", "late"):
        assert f"{text}\n" in done.stderr
    for option in ("--help", "--version"):
        assert "tsopt" in python("-m", "tsopt", option, cwd=tmp_path).stdout


# The command waits where the test says, and everything below it with it.
SIGNALLED = """
import os, signal, sys, time
from tsopt.cli import export, main
for name in ("SIGINT", "SIGTERM", "SIGHUP"):
    signal.signal(getattr(signal, name), signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)
def pause(*_):
    print("ready", file=sys.stderr, flush=True)
    time.sleep(100)
if sys.argv.pop(1) == "write":
    import pathlib
    pathlib.Path.write_bytes = lambda path, data: (path.open("wb").write(data[:9]), pause())
sys.argv[0] = "tsopt"
main.run()
"""


@pytest.mark.parametrize(("name", "phase", "code"), [("SIGINT", "write", 130), ("SIGTERM", "race", 143)])
def test_a_signal_ends_a_command_with_one_line_and_leaves_nothing(tmp_path, name, phase, code):
    (tmp_path / "m.py").write_text(MODEL)
    (tmp_path / "slow.py").write_text(
        MODEL + "import os, sys, time\n"
        "class Waits(nn.Module):\n"
        "    def forward(self, x):\n"
        "        if not torch.compiler.is_compiling():\n"
        "            os.write(2, b'ready\\n')\n"
        "            time.sleep(100)\n"
        "        return x + 1\n"
        "model = Waits().eval()\n"
    )
    race = ["--seconds", "0.02", "--backends", "eager", "--no-cache"]
    chosen = ["m.py", "--format", "torchscript", "-o", "new/x.ts", "--no-isolate"] if phase == "write" else ["slow.py"]
    started = subprocess.Popen(
        [sys.executable, "-c", SIGNALLED, phase, "export", *chosen, *race],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert started.stderr is not None
    try:
        seen = ""
        while seen != "ready\n":
            seen = started.stderr.readline()
            assert seen, started.poll()
        below = descendants(started.pid)
        assert bool(below) == (phase == "race")
        started.send_signal(getattr(signal, name))
        out, err = started.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.kill()
    assert (started.returncode, out) == (code, "")
    word = "interrupted" if name == "SIGINT" else f"terminated by {name}"
    assert err == f"{word}; nothing was written\n"
    assert not any(Path(f"/proc/{pid}").exists() for pid in below)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["m.py", "slow.py"]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(28, "No space left on device", "x.bin"), "No space left"),
        (MemoryError(), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory"),
        (ModuleNotFoundError("No module named 'onnx'", name="onnx.helper"), "onnx is not installed"),
        (ImportError("libtorch.so: cannot open", name="torch._C"), "torch is installed but cannot be imported"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_system_refuses_is_an_error_of_the_systems(tsopt, write, monkeypatch, error, text):
    def fail(*_, **__):
        raise error

    write()
    monkeypatch.setattr("tsopt.cli.inspect.capture", fail)
    ran = tsopt("inspect", "m.py")
    assert ran.code == 2
    assert text in ran.err
    assert len(ran.err.splitlines()) <= 4


@pytest.mark.parametrize(
    "error", [RuntimeError("a mistake of ours"), ImportError("x", name="tsopt.nonsense"), KeyError(1)]
)
def test_what_is_our_own_mistake_is_not_hidden(write, monkeypatch, tmp_path, capsys, error):
    """It has an exit code of its own: 1 would be taken for a regression."""
    from tsopt.cli.main import main

    def fail(*_, **__):
        raise error

    write()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tsopt.cli.inspect.capture", fail)
    assert main(["inspect", "m.py"]) == 70
    said = capsys.readouterr().err
    assert f"{type(error).__name__}: " in said
    assert "internal error in tsopt" in said


def test_what_was_written_before_an_interrupt_is_named(monkeypatch, capsys):
    monkeypatch.setattr(process.State, "written", ("m.tsopt", "m.onnx"))
    monkeypatch.setattr(process.State, "signal", signal.SIGTERM)
    assert process.interrupted() == 143
    assert capsys.readouterr().err == "terminated by SIGTERM; already written: m.tsopt, m.onnx\n"


def test_engines_report_nothing_from_a_command(tmp_path, monkeypatch):
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    (tmp_path / "m.py").write_text(f"import os\nprint('reports', os.environ['ORT_DISABLE_TELEMETRY'])\n{MODEL}")
    done = python("-m", "tsopt", "inspect", "m.py", cwd=tmp_path)
    assert "reports 1" in done.stdout + done.stderr
