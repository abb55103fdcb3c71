"""The command line where something is missing, full, closed or misspelt: one line that helps, and nothing half-done."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tsopt
from bench.hazards import ANY, RIGHT, Case, Outcome

PACKAGE = Path(tsopt.__file__).parents[1]
MODEL = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
example_input = torch.ones(1, 4)
"""
RACE = ("--seconds", "0.02", "--backends", "eager", "--no-isolate", "--no-cache")
BENCH = RACE[:-1]
NOT_THERE = """
import sys
class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name=name)
sys.meta_path.insert(0, Nowhere())
from tsopt.cli.main import run
sys.argv[0] = "tsopt"
run()
"""
# Says when it writes, and takes its time over it.
SLOW = """
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever nohup and its like have made of them
signal.signal(signal.SIGHUP, signal.SIG_DFL)
def write(path, data):
    path.open("wb").write(data[:9])
    print("writing", file=sys.stderr, flush=True)
    time.sleep(100)
pathlib.Path.write_bytes = write
from tsopt.cli.main import run
sys.argv[0] = "tsopt"
run()
"""


@dataclass(frozen=True, slots=True)
class Ran:
    code: int
    out: str
    err: str


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A directory with a model file, which is the current one."""
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        Path("m.py").write_text(MODEL)
        os.environ["TSOPT_CACHE_DIR"] = f"{place}/cache"
        yield Path(place)
        os.chdir("/")


def here(*arguments: str) -> Ran:
    """A command in this process, which has imported all that it needs."""
    from tsopt.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    return Ran(code, out.getvalue(), err.getvalue())


def apart(*command: str) -> Ran:
    """Python with these arguments, in a process of its own."""
    done = subprocess.run([sys.executable, *command], env=environment(), capture_output=True, text=True, timeout=110)
    return Ran(done.returncode, done.stdout, done.stderr)


def shell(text: str) -> Ran:
    asked = environment() | {"T": f"{sys.executable} -m tsopt"}
    done = subprocess.run(["bash", "-c", text], env=asked, capture_output=True, text=True, timeout=110)
    return Ran(done.returncode, done.stdout, done.stderr)


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(PACKAGE), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def judged(ran: Ran, code: int, text: str) -> Outcome:
    """Right where the exit code is the wanted one, the text is there, and no traceback is."""
    said = ran.out + ran.err
    if "Traceback" in said:
        return Outcome("wrong", f"a traceback: {ran.err.strip().splitlines()[-1][:120]}")
    if ran.code != code:
        return Outcome("wrong", f"exit code {ran.code}, not {code}: {said.strip()[:120]}")
    return RIGHT if text in said else Outcome("wrong", f"no {text!r} in: {said.strip()[:120]}")


def says(text: str, *arguments: str, code: int = 2) -> Callable[[str], Outcome]:
    """Whether a command ends with the exit code and the text."""

    def check(_: str) -> Outcome:
        with folder():
            return judged(here(*arguments), code, text)

    return check


def without_torch(text: str, *arguments: str, code: int = 2) -> Callable[[str], Outcome]:
    def check(_: str) -> Outcome:
        with folder():
            if "b.tsopt" in arguments:
                bundle("b.tsopt")
            return judged(apart("-c", NOT_THERE, *arguments), code, text)

    return check


def bundle(name: str) -> None:
    """A bundle for ONNX Runtime, whoever is the fastest."""
    import torch

    from tsopt.cli.model_file import load_model_file
    from tsopt.compiler.calls.example import as_example
    from tsopt.runtime.bundles import store
    from tsopt.runtime.racing.environment import environment as machine
    from tsopt.runtime.racing.row import Row
    from tsopt.runtime.report import Report

    loaded = load_model_file("m.py", [], 0)
    made = tsopt.compile(tsopt.capture(loaded.model, torch.ones(1, 4)), "onnxruntime")
    report = Report(model="M", rows=(Row("eager"),), winner_key="model", why="chosen", environment=machine())
    store.save(made, name, loaded.model, as_example(loaded.example_input), report)


def optimized_python(flag: str, *arguments: str) -> Callable[[str], Outcome]:
    def check(_: str) -> Outcome:
        with folder():
            return judged(apart(flag, "-m", "tsopt", *arguments), 0, "")

    return check


def exported_twice(_: str) -> Outcome:
    with folder():
        for _ in range(2):
            ran = here("export", "m.py", "-o", "x.tsopt", *RACE)
        if ran.code:
            return judged(ran, 0, "")
        return judged(here("verify", "x.tsopt"), 0, "intact")


def kept(prepare: Callable[[], object], *arguments: str) -> Callable[[str], Outcome]:
    """Whether a command refuses, and leaves all that was there as it was."""

    def check(_: str) -> Outcome:
        with folder() as place:
            prepare()
            before = facts(place)
            ran = here("export", "m.py", *arguments, *RACE)
            found = judged(ran, 2, "fix: ")
            return found if facts(place) == before or found != RIGHT else Outcome("wrong", "something was written")

    return check


def facts(place: Path) -> list[tuple[str, int]]:
    return [(str(path), path.lstat().st_mode) for path in sorted(place.rglob("*")) if "__pycache__" not in path.parts]


def parents_are_told(_: str) -> Outcome:
    with folder():
        return judged(here("export", "m.py", "-o", "new/deep/x.tsopt", *RACE), 0, "created the directory new/deep")


def signalled(number: signal.Signals) -> Callable[[str], Outcome]:
    """A command that is ended while it writes: its exit code, what it says, what it leaves."""

    def check(_: str) -> Outcome:
        with folder() as place:
            before = facts(place)
            command = [sys.executable, "-c", SLOW, "export", "m.py", "--format", "torchscript", "-o", "new/x.ts", *RACE]
            with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as started:
                assert started.stderr is not None
                while started.stderr.readline() not in ("writing\n", ""):
                    pass
                started.send_signal(number)
                err = started.stderr.read()
            left = [name for name, _ in facts(place) if name not in dict(before)]
            if left:
                return Outcome("wrong", f"left behind: {', '.join(left)}")
            return judged(Ran(started.returncode, "", err), 128 + number, "nothing was written")

    return check


def output(command: str, redirection: str, code: int) -> Callable[[str], Outcome]:
    def check(_: str) -> Outcome:
        with folder():
            found = shell(f"$T {command} {redirection}")
            return judged(found, code, "") if found.err.count("\n") <= 3 else Outcome("wrong", found.err[-120:])

    return check


def all_crash(_: str) -> Outcome:
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    with folder():
        race = ("--seconds", "0.02", "--backends", "tests.runtime.faulty:Segfaults")
        return judged(here("bench", "m.py", *race), 1, "crashed")


def injected(_: str) -> Outcome:
    with folder():
        name = "\\x1b]0;evil\\x07\\x9b31m\\u202e"
        text = f"model = nn.Sequential()\nmodel.add_module('{name}', nn.Linear(4, 2))\nmodel.eval()\n"
        Path("m.py").write_text(MODEL + text)
        ran = here("inspect", "m.py")
        reached = {character for character in ran.out + ran.err if ord(character) in (0x1B, 0x07, 0x9B, 0x202E)}
        return Outcome("wrong", f"{sorted(reached)} reached the terminal") if reached else judged(ran, 0, "evil")


def strange_cache(_: str) -> Outcome:
    with folder() as place:
        (place / "cache").mkdir(mode=0o700)
        (place / "cache" / "a.json").mkdir()
        os.mkfifo(place / "cache" / "b.json")
        (place / "cache" / "c.json").write_text(json.dumps({}))
        found = [judged(here("cache", name), 0, "1 race") for name in ("show", "clear")]
        return next((item for item in found if item.kind != "right"), RIGHT)


def others() -> None:
    Path("x.tsopt").mkdir()
    Path("x.tsopt/manifest.json").write_text("{}")
    Path("x.tsopt/thesis.tex").write_text("mine")


CASES = (
    Case("doctor without torch", without_torch("torch", "doctor", code=0), ANY),
    Case("verify without torch", without_torch("intact", "verify", "b.tsopt", code=0), ANY),
    Case("cache show without torch", without_torch("0 races", "cache", "show", code=0), ANY),
    Case("export without torch", without_torch("pip install", "export", "m.py"), ANY),
    Case("export --dry-run without torch", without_torch("pip install", "export", "m.py", "--dry-run"), ANY),
    Case("bench without torch", without_torch("pip install", "bench", "m.py"), ANY),
    Case("inspect without torch", without_torch("pip install", "inspect", "m.py"), ANY),
    Case("verify --model without torch", without_torch("pip install", "verify", "b.tsopt", "--model", "m.py"), ANY),
    Case("inspect under python -OO", optimized_python("-OO", "inspect", "m.py"), ANY),
    Case("export under python -OO", optimized_python("-OO", "export", "m.py", *RACE), ANY),
    Case("export under python -O", optimized_python("-O", "export", "m.py", *RACE), ANY),
    Case("--input with another name", says("--input foo", "inspect", "m.py", "--input", "foo:2x64"), ANY),
    Case("--input too often", says("--input", "inspect", "m.py", "--input", "1x4", "--input", "1x4"), ANY),
    Case("--input with another dtype", says("--input", "inspect", "m.py", "--input", "1x4:f99"), ANY),
    Case("--dynamic with another name", says("no input 'y'", "inspect", "m.py", "--dynamic", "y:0=b"), ANY),
    Case("--dynamic with another axis", says("no axis 9", "inspect", "m.py", "--dynamic", "input:9=b"), ANY),
    Case("--dynamic with a sign too many", says("--dynamic", "inspect", "m.py", "--dynamic", "input:--1=b"), ANY),
    Case(
        "--dynamic with an axis twice",
        says("--dynamic", "inspect", "m.py", "--dynamic", "input:0=a", "--dynamic", "input:0=b"),
        ANY,
    ),
    Case("--threads 0", says("--threads", "export", "m.py", "--threads", "0"), ANY),
    Case("--threads of 20 digits", says("--threads", "export", "m.py", "--threads", "9" * 20, *RACE), ANY),
    Case("--batch-sizes beyond memory", says("--batch-sizes", "bench", "m.py", "--batch-sizes", "9" * 13, *BENCH), ANY),
    Case("FILE.py:NAME without that name", says("nomodel", "inspect", "m.py:nomodel"), ANY),
    Case("-o over a bundle, twice", exported_twice, ANY),
    Case("-o into a bundle", kept(others, "-o", "x.tsopt/m.onnx", "--format", "onnx"), ANY),
    Case("-o a directory called .tsopt with other files", kept(others, "-o", "x.tsopt"), ANY),
    Case("-o over a FIFO", kept(lambda: os.mkfifo("pipe"), "-o", "pipe", "--format", "torchscript"), ANY),
    Case("-o over a link", kept(lambda: Path("link").symlink_to("m.py"), "-o", "link", "--format", "onnx"), ANY),
    Case("-o with the name of another format", kept(lambda: None, "-o", "m.onnx"), ANY),
    Case("-o below directories that are not there", parents_are_told, ANY),
    Case("SIGTERM while it writes", signalled(signal.SIGTERM), ANY),
    Case("SIGHUP while it writes", signalled(signal.SIGHUP), ANY),
    Case("SIGINT while it writes", signalled(signal.SIGINT), ANY),
    Case("a full stdout", output("cache show", ">/dev/full", 2), ANY),
    Case("a full stdout for JSON", output("cache show --json", ">/dev/full", 2), ANY),
    Case("a closed stdout", output("cache show", ">&-", 0), ANY),
    Case("no standard files at all", output("cache show", "<&- >&- 2>&-", 0), ANY),
    Case("an output without that alphabet", output("inspect", "m.py:é 2>&1 | cat; exit ${PIPESTATUS[0]}", 2), ANY),
    Case("all candidates crash", all_crash, ANY),
    Case("control characters in a module's name", injected, ANY),
    Case("a cache that holds other files", strange_cache, ANY),
)
