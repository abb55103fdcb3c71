"""Whatever a candidate does costs that candidate: it is named, the rest goes on, and nothing is left behind."""

from __future__ import annotations

import glob
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import tsopt
from tests.runtime.faulty import SLOW
from tests.runtime.helpers import candidates
from tsopt.compiler.calls.example import Example
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.racing import preparation
from tsopt.runtime.racing import race as race_module
from tsopt.runtime.racing.contenders import Maker, RaceSettings
from tsopt.runtime.racing.outcomes import NoCandidate
from tsopt.runtime.racing.race import race, retire
from tsopt.runtime.racing.speedup import Timing
from tsopt.runtime.report import MODEL
from tsopt.runtime.sandbox import sandbox as isolation
from tsopt.runtime.sandbox.isolated import CandidateDied
from tsopt.runtime.sandbox.processes import descendants
from tsopt.runtime.sandbox.sandbox import Sandbox, can_isolate, is_on_cpu

pytestmark = pytest.mark.usefixtures("as_shipped")

FAULTY = "tests.runtime.faulty:"
ROOT = Path(__file__).parents[3]


def leftovers(pid: int) -> list[str]:
    """Files that a process has left behind."""
    places = {tempfile.gettempdir(), "/dev/shm"}
    return [path for place in places for path in glob.glob(f"{place}/tsopt-{pid}-*")]


def running(pids: list[int]) -> list[int]:
    """Those that have not ended; a zombie has, and waits for somebody to ask how."""
    found = []
    for pid in pids:
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
            found.append(pid)
    return found


@pytest.fixture(scope="module")
def shop(mlp_program):
    """One helper process for all tests: it must live through what its children do."""
    before = leftovers(os.getpid())
    with Sandbox() as made:
        made.open({"fp32": mlp_program}, threads=1, memory=4 << 30)
        yield made
    assert leftovers(os.getpid()) == before
    assert running(descendants(os.getpid())) == []


@pytest.fixture
def try_all(shop, mlp, mlp_input, mlp_program):
    def run(*backends: str, seconds: float = 60.0, **options):
        shop.seconds = seconds
        shop.open = lambda *_, **__: None  # it is open
        found = race(
            mlp,
            mlp_program,
            {"fp32": mlp_program},
            Example((mlp_input,)),
            RaceSettings(candidates=candidates(*backends), seconds=0.2, **options),
            sandbox=shop,
        )
        return {row.name.removeprefix(FAULTY): row for row in found.rows}, found

    return run


@pytest.fixture
def nobody_wins(monkeypatch):
    """A winner would be compiled in this process."""
    monkeypatch.setattr(race_module, "measure", lambda calls, *_, **__: {name: Timing((1.0,) * 7) for name in calls})


KINDS = {
    "Raises": ("failed", "this op is too new; it says so"),
    "Segfaults": ("crashed", "SIGSEGV during 'compile'"),
    "Divides": ("crashed", "SIGFPE during 'compile'"),
    "Aborts": ("crashed", "SIGABRT during 'compile'"),
    "Exits": ("exited", "its process exited with status 0 during 'compile'"),
    "Hungry": ("out of memory", "MemoryError"),
    "NoFile": ("system error", "FileNotFoundError"),
    "WrongValue": ("wrong", "output on the example input"),
    "WrongType": ("failed", "float64, expected float32"),
    "WrongShape": ("failed", "has shape"),
    "Nan": ("wrong", "output on the example input"),
    "Fewer": ("failed", "returned 0 outputs, expected 1"),
    "WritesWeights": ("wrong", "output on the example input"),
    "WritesInput": ("wrong", "an input differs from eager after the call"),
    "OneBuffer": ("failed", "an output of the first call was overwritten by a later call"),
    "CrashesLate": ("crashed", "SIGSEGV during 'time'"),
}


@pytest.mark.sliced(6)
@pytest.mark.parametrize("name", KINDS)
def test_a_faulty_candidate_is_named_with_its_kind_and_the_rest_goes_on(name, try_all):
    rows, found = try_all(FAULTY + name, "eager")
    status, reason = KINDS[name]
    assert rows[name].status == status, rows[name]
    assert reason in rows[name].reason
    assert rows["eager + passes"].status == "ok"
    assert rows["eager"].timing is not None
    assert found.winner in (MODEL, "eager")


def test_candidates_are_compiled_side_by_side(try_all, nobody_wins, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    rows, _ = try_all(FAULTY + "Meets", FAULTY + "MeetsToo")
    assert [row.status for row in rows.values()] == ["ok"] * 3, rows


def test_where_memory_is_short_only_the_fastest_are_kept(try_all, nobody_wins, monkeypatch):
    took = {"eager": 1.0, FAULTY + "Right": 3.0, FAULTY + "Noisy": 2.0}
    monkeypatch.setattr(preparation, "first_calls", lambda made, *_: [took[made.candidate.backend]])
    monkeypatch.setattr(preparation, "seconds_of", lambda made, *_: took[made.candidate.backend])
    rows, _ = try_all(FAULTY + "Right", FAULTY + "Noisy", "eager", memory=1)
    assert {name: row.status for name, row in rows.items() if name != "eager"} == {
        "Right": "not checked",
        "Noisy": "ok",
        "eager + passes": "ok",
    }
    assert rows["Right"].reason == "about 3.0 times slower than the best, and memory is short"
    rows, _ = try_all(FAULTY + "Right", FAULTY + "Noisy", "eager", memory=1 << 40)
    assert {row.status for row in rows.values()} == {"ok"}


def test_one_that_is_not_needed_any_more_has_ended_and_is_made_again_when_it_is(mlp, mlp_input, mlp_program):
    """Also from no files: they would have to be written by the process that has ended."""
    settings = RaceSettings(candidates=candidates("onnxruntime"))
    with Sandbox() as shop:
        maker = Maker({"fp32": mlp_program}, settings, shop)
        (candidate,) = settings.candidates
        contender, _ = maker.finish(candidate, maker.begin(candidate))
        before = running(descendants(os.getpid()))
        retire(contender)
        assert len(running(descendants(os.getpid()))) == len(before) - 1
        assert torch.allclose(maker.here(contender, candidate)(mlp_input), mlp(mlp_input), atol=1e-5)


def test_the_winner_and_one_with_fewer_threads_are_opened_and_not_exported_again(
    mlp, mlp_input, mlp_program, monkeypatch
):
    settings = RaceSettings(candidates=candidates("onnxruntime", "onnxruntime?threads=1"), threads=1)
    monkeypatch.setattr("tsopt.runtime.onnx.export.to_onnx", None)  # here; the other process exports once
    with Sandbox() as shop:
        maker = Maker({"fp32": mlp_program}, settings, shop)
        plain, single = settings.candidates
        first, _ = maker.finish(plain, maker.begin(plain))
        second, _ = maker.finish(single, maker.begin(single, first))
        assert [path.name for path in shop.directory.glob("saved-*")] == [first.saved().name]
        for contender, candidate in ((first, plain), (second, single)):
            assert maker.reopens(contender, candidate)
            here = maker.here(contender, candidate)
            assert torch.allclose(here(mlp_input), mlp(mlp_input), atol=1e-5)
            assert here.options["threads"] == 1
        assert list(shop.directory.glob("saved-*")) == []


@pytest.mark.parametrize(("backend", "few"), [("onnxruntime", True), ("torchscript", False)])
def test_what_is_opened_from_its_files_is_not_checked_twice_on_everything(try_all, monkeypatch, backend, few):
    """What is compiled once more in this process is another executable, and is."""
    asked, real = [], race_module.Oracle
    monkeypatch.setattr(race_module, "Oracle", lambda *a, **k: asked.append(k.get("few", False)) or real(*a, **k))
    monkeypatch.setattr(
        race_module, "measure", lambda calls, *a, **k: {name: Timing((1.0 + (name == "eager"),) * 8) for name in calls}
    )
    _, found = try_all(backend)
    assert found.winner == backend
    assert asked == [False, few]


def test_a_workshop_takes_one_program_after_the_other(shop, mlp_program):
    other = tsopt.capture(torch.nn.Linear(3, 2).eval(), torch.ones(1, 3))
    for program in (other, mlp_program):
        Sandbox.open(shop, {"fp32": program}, threads=1, memory=4 << 30)
        candidate = shop.contender(Candidate("eager"))
        candidate.begin()
        candidate.finish()
        (item,) = program.signature.user_inputs
        x = torch.ones(item.type.shape)
        example = Example((x,))
        assert candidate.seconds([example], 1) > 0
        torch.testing.assert_close(candidate(x), tsopt.compile(program, "eager")(x))


def no_sockets(*_):
    raise OSError(24, "Too many open files")


def test_where_the_system_gives_no_process_candidates_are_lost_to_it(shop, mlp_program, monkeypatch):
    monkeypatch.setattr(isolation.socket, "socketpair", no_sockets)
    with pytest.raises(isolation.CandidateDied, match="cannot start a process for the candidate") as caught:
        shop.contender(Candidate("eager"))
    assert caught.value.kind == "system error"
    with Sandbox() as another, pytest.raises(tsopt.BackendError, match=r"cannot start a process: .* open files"):
        another.open({"fp32": mlp_program}, threads=1)


@pytest.mark.skipif(not Path("/proc/self/oom_score_adj").exists(), reason="Linux only")
def test_where_memory_runs_out_candidates_end_first_and_the_caller_last(shop):
    """The kernel would otherwise end the largest process, which is often that of the user."""
    candidate = shop.contender(Candidate("eager"), threads=1)
    candidate.begin()
    candidate.finish()

    def score(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    assert score(candidate._pid) > score(shop._process.pid) > score(os.getpid())
    candidate.retire()


@pytest.mark.parametrize(
    ("given", "free", "is_shared"), [(None, 1 << 30, True), (None, 1 << 20, False), (1 << 20, 1 << 30, False)]
)
def test_files_are_memory_only_where_there_is_plenty(mlp_program, monkeypatch, tmp_path, given, free, is_shared):
    monkeypatch.setattr(isolation, "SHARED", tmp_path)
    monkeypatch.setattr(isolation, "available_memory", lambda: free)
    with Sandbox() as made:
        made.open({"fp32": mlp_program}, threads=1, memory=given)
        assert made.directory.is_relative_to(tmp_path) is is_shared


def test_where_the_helper_is_gone_candidates_are_lost_with_it(mlp_program):
    with Sandbox() as made:
        made.open({"fp32": mlp_program}, threads=1)
        made._process.kill()
        with pytest.raises(isolation.CandidateDied, match="does not answer") as caught:
            made.contender(Candidate("eager"))
    assert caught.value.kind == "crashed"


def test_a_candidate_that_remembers_its_last_input_gains_nothing(try_all):
    rows, found = try_all(FAULTY + "Remembers")
    assert rows["Remembers"].timing.p50 >= 1e3 * SLOW
    assert rows["Remembers"].verdict == "slower"
    assert found.winner == MODEL


@pytest.mark.parametrize("name", ["Sleeps", "Spins"])
def test_a_candidate_that_hangs_costs_its_time_alone(name, try_all):
    start = time.monotonic()
    rows, _ = try_all(FAULTY + name, "eager", budget=4.0)
    assert rows[name].status == "timed out"
    assert rows[name].reason.startswith("no answer to 'compile' within ")
    assert rows["eager + passes"].status == "ok"
    assert time.monotonic() - start < 15


@pytest.mark.parametrize("name", ["Noisy", "Leaks", "Changes", "Right"])
def test_what_a_candidate_does_beside_its_work_stays_with_it(name, try_all, capfd, nobody_wins):
    before = (torch.get_num_threads(), torch.get_default_dtype(), dict(os.environ), os.getcwd(), torch.get_rng_state())
    rows, _ = try_all(FAULTY + name)
    after = (torch.get_num_threads(), torch.get_default_dtype(), dict(os.environ), os.getcwd(), torch.get_rng_state())
    assert rows[name].status == "ok", rows[name]
    assert before[:4] == after[:4]
    assert torch.equal(before[4], after[4])
    assert capfd.readouterr() == ("", "")


def test_a_candidate_that_is_wrong_after_the_timing_does_not_win(try_all):
    _, found = try_all(FAULTY + "WrongLater")
    assert found.winner == MODEL


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_crash_while_it_is_decided_whether_one_thread_is_tried_costs_the_candidate_alone(try_all, two_threads):
    name = FAULTY + "CrashesWhenTimed"
    rows, found = try_all(name, f"{name}?threads=1", "eager")
    assert rows["CrashesWhenTimed"].status == "crashed"
    assert rows["eager + passes"].status == "ok"
    assert found.winner in (MODEL, "eager")


def test_a_full_disk_leaves_the_race_to_this_process(mlp, mlp_input, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    fast = tsopt.optimize(mlp, mlp_input, seconds=0.1, backends=("eager",))
    assert "No space left" in fast.report.not_isolated_because
    assert fast.report.row("eager + passes").status == "ok"


def test_what_a_lost_candidate_printed_last_is_told(shop):
    lost = shop.contender(Candidate(FAULTY + "Segfaults"))
    lost.begin()
    with pytest.raises(CandidateDied) as caught:
        lost.finish()
    assert caught.value.kind == "crashed"
    with pytest.raises(CandidateDied):
        lost.begin()


def test_a_backend_that_cannot_be_imported_is_a_message():
    with pytest.raises(tsopt.BackendError, match="cannot import the backend"):
        tsopt.compile(None, "no.such.module:Backend")


class Nested(nn.Module):
    """State that a call writes, a dictionary in and a tuple out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, *, more):
        self.calls += 1
        return {"y": self.layer(x) + more["a"], "both": (x, self.calls * 2)}


@pytest.mark.sliced(1)
@pytest.mark.parametrize("backend", ["eager", "torchscript", "onnxruntime"])
def test_an_isolated_candidate_answers_as_one_here_would(backend):
    model, x, more = Nested().eval(), torch.randn(2, 6), {"a": torch.randn(2, 3)}
    example = tsopt.example(x, more=more)
    program = tsopt.capture(model, example)
    with Sandbox() as shop:
        shop.open({"fp32": program}, threads=1)
        candidate = shop.contender(Candidate(backend), threads=1)
        candidate.begin()
        candidate.finish()
        with torch.no_grad():
            found, wanted = candidate(x, more=more), tsopt.compile(program, backend)(x, more=more)
        seconds = candidate.seconds([example], 3)
    assert list(found) == list(wanted)
    torch.testing.assert_close(found["y"], wanted["y"])
    assert found["both"][1] in (2, 4)
    assert model.calls == 2  # one call each
    assert 0 < seconds < 1


def test_optimize_isolates_and_saves(tmp_path, mlp, mlp_input):
    before, files = running(descendants(os.getpid())), set(leftovers(os.getpid()))  # those of fixtures
    fast = tsopt.optimize(mlp, mlp_input, seconds=0.3, backends=("eager", "onnxruntime"))
    assert fast.report.not_isolated_because == ""
    assert [row.status for row in fast.report.rows] == ["ok", "ok", "ok"]
    torch.testing.assert_close(fast(mlp_input), mlp(mlp_input))
    assert running(descendants(os.getpid())) == before
    assert set(leftovers(os.getpid())) <= files


def test_a_budget_that_is_too_small_leaves_eager(mlp, mlp_input):
    with pytest.warns(NoCandidate, match="the budget was used up"):
        fast = tsopt.optimize(mlp, mlp_input, seconds=0.1, budget=1e-3, backends=("eager",))
    assert fast.report.winner == "eager"
    assert fast.report.row("eager + passes").status == "timed out"
    assert "within the time limit" in fast.report.why


@pytest.mark.parametrize("budget", [0, -1, float("nan")])
def test_a_budget_must_be_a_time(mlp, mlp_input, budget):
    with pytest.raises(tsopt.UsageError, match="budget must be"):
        tsopt.optimize(mlp, mlp_input, budget=budget)


@pytest.mark.parametrize("memory", [0, -1])
def test_memory_must_be_a_number_of_bytes(mlp, mlp_input, memory):
    with pytest.raises(tsopt.UsageError, match="memory must be"):
        tsopt.optimize(mlp, mlp_input, memory=memory)


def test_what_another_process_does_not_know_runs_here(mlp_input):
    @torch.library.custom_op("tsopt_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(lambda x: torch.empty_like(x))
    fast = tsopt.optimize(lambda x: twice(x) + 1, mlp_input, seconds=0.1, backends=("eager",))
    assert "custom op" in fast.report.not_isolated_because
    assert "candidates ran in this process" in fast.report.text
    assert fast.report.row("eager + passes").status == "ok"


def test_where_no_process_can_be_started_candidates_run_here(mlp, mlp_input, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    fast = tsopt.optimize(mlp, mlp_input, seconds=0.1, backends=("eager",))
    assert "cannot start a process" in fast.report.not_isolated_because
    assert fast.report.row("eager + passes").status == "ok"


def test_devices_are_not_isolated(mlp_program):
    assert can_isolate(mlp_program) == ""
    assert not is_on_cpu(Example((torch.empty(2, device="meta"),)))


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
    start = time.monotonic()
    process.communicate(timeout=30)
    assert time.monotonic() - start < 5
    assert process.returncode != 0
    assert running(below) == []
    assert leftovers(process.pid) == []


def test_a_killed_caller_leaves_nothing(tmp_path):
    (tmp_path / "script.py").write_text(
        "import torch, tsopt\n"
        "tsopt.optimize(torch.nn.Linear(4, 2).eval(), torch.randn(1, 4), backends=('tests.runtime.faulty:Sleeps',),"
        " progress=lambda text: print(text, flush=True))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    while b"compile" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(1.0)
    below = descendants(process.pid)
    assert below
    process.kill()
    process.communicate()
    end = time.monotonic() + 5
    while running(below) and time.monotonic() < end:
        time.sleep(0.05)
    assert running(below) == []
    assert leftovers(process.pid) == []


def test_a_candidate_with_a_process_of_its_own_is_right_at_all_sizes():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
    calls = [torch.randn(2, 4), torch.randn(5, 4)]
    fast = tsopt.optimize(model, calls, backends=("eager", "torchscript"), seconds=0.05, cache=False)
    assert [row.status for row in fast.report.rows] == ["ok", "ok", "ok"], fast.report
    assert not fast.report.not_isolated_because
    assert fast.report.sizes == "batch: 1..10, checked at 1, 2, 7, 10"


class Ring(nn.Module):
    """Writes where a counter among its inputs says, and counts on: another call would write elsewhere."""

    def forward(self, x, ring, position):
        ring[position] = x
        position += 1
        return ring.sum(0)


@pytest.mark.sliced(1)
@pytest.mark.parametrize("isolate", [True, False])
def test_calls_that_write_to_their_tensors_are_timed_on_what_they_were(isolate):
    example = torch.ones(1, 4), torch.zeros(3, 4), torch.tensor([2])
    fast = tsopt.optimize(Ring(), example, seconds=0.1, isolate=isolate, cache=False, backends=("eager", "onnxruntime"))
    assert [row.status for row in fast.report.rows] == ["ok"] * 3, fast.report
    assert example[2] == 2
