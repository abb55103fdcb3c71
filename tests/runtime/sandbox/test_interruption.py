"""An interrupt, a kill and a script that runs itself leave no process and no file behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.runtime.sandbox.helpers import ROOT, leftovers, running
from tsopt.runtime.sandbox.processes import descendants
from tsopt.runtime.sandbox.sandbox import Sandbox

pytestmark = pytest.mark.usefixtures("as_shipped")


SCRIPT = """
import torch, tsopt
print("imported")
model = torch.nn.Linear(4, 2).eval()
fast = tsopt.optimize(model, torch.randn(1, 4), seconds=0.1, backends=("eager",))
print(fast.report.row("eager + passes").status, fast.report.not_isolated_because)
"""


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_run_once(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["imported", "ok"]


@pytest.mark.sliced(1)
@pytest.mark.parametrize("phase", ["compile", "time"])
def test_an_interrupt_ends_everything(tmp_path, phase):
    (tmp_path / "script.py").write_text(
        "import signal, sys, torch, tsopt\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # what runs in the background ignores it
        "model = torch.nn.Linear(4, 2).eval()\n"
        "def tell(text):\n"
        "    print(text, flush=True)\n"
        "backend = 'tests.runtime.faulty:' + sys.argv[1]\n"
        "tsopt.optimize(model, torch.randn(1, 4), seconds=600, backends=(backend,), progress=tell)\n"
    )
    name = "Sleeps" if phase == "compile" else "Right"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "script.py", name],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    wanted = b"compile" if phase == "compile" else b"time: round 2"
    while wanted not in process.stdout.readline():
        assert process.poll() is None, process.stderr and process.stderr.read()
    while len(below := descendants(process.pid)) < 2:  # the helper, and the candidate's own
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert running(below) == []
    assert leftovers(process.pid) == []


@pytest.fixture
def racing(tmp_path):
    """A process in a race, and what it has started: the helper, and a candidate that never comes to an end."""
    (tmp_path / "script.py").write_text(
        "import torch, tsopt\n"
        "tsopt.optimize(torch.nn.Linear(4, 2).eval(), torch.randn(1, 4), backends=('tests.runtime.faulty:Sleeps',),"
        " progress=lambda text: print(text, flush=True))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        while b"compile" not in process.stdout.readline():
            assert process.poll() is None
        while len(below := descendants(process.pid)) < 2:
            assert process.poll() is None
            time.sleep(0.02)
        yield process, below
        process.kill()


def test_a_killed_caller_leaves_nothing(racing):
    process, below = racing
    process.kill()
    process.communicate()
    end = time.monotonic() + 60
    while running(below) and time.monotonic() < end:
        time.sleep(0.05)
    assert running(below) == []
    assert leftovers(process.pid) == []


def test_the_next_race_removes_the_files_of_one_that_was_killed_with_its_helper(racing, mlp_program):
    """As the kernel does if a whole control group runs out of memory."""
    process, below = racing
    with Sandbox() as sandbox:
        sandbox.open({"fp32": mlp_program}, 1)
        assert len(leftovers(process.pid)) == 1, "its owner is alive"
    for pid in below:
        os.kill(pid, signal.SIGSTOP)  # or the helper would remove the files when the caller ends
    for pid in [process.pid, *below]:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    assert len(leftovers(process.pid)) == 1
    with Sandbox() as sandbox:
        sandbox.open({"fp32": mlp_program}, 1)
        assert leftovers(process.pid) == []
        assert sandbox.directory.is_dir()
