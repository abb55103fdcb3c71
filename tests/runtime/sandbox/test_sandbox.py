"""The sandbox: processes side by side, what they share, and what is done where there can be none."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tsopt
from tests.compiler.helpers import Net
from tests.runtime.helpers import candidates
from tests.runtime.sandbox.helpers import FAULTY, leftovers, running
from tsopt.compiler.calls.example import Example
from tsopt.compiler.graph.serialize import WEIGHTS
from tsopt.errors import NoGain
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.racing import contenders, preparation
from tsopt.runtime.racing import race as race_module
from tsopt.runtime.racing.contenders import Maker, RaceSettings, retire
from tsopt.runtime.racing.outcomes import NoCandidate
from tsopt.runtime.racing.speedup import Timing
from tsopt.runtime.sandbox import isolated
from tsopt.runtime.sandbox import sandbox as isolation
from tsopt.runtime.sandbox.isolated import CandidateDied
from tsopt.runtime.sandbox.processes import descendants
from tsopt.runtime.sandbox.sandbox import Sandbox, can_isolate, is_on_cpu

pytestmark = pytest.mark.usefixtures("as_shipped")


def test_candidates_are_compiled_side_by_side(try_all, no_winner, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(preparation, "_keeps_to_one_core", lambda candidate: True)
    rows, _ = try_all(FAULTY + "Meets", FAULTY + "MeetsToo")
    assert [row.status for row in rows.values()] == ["ok"] * 3, rows


def test_a_candidate_takes_as_much_memory_as_the_weights_of_its_variant(mlp_program):
    size = sum(weight.nbytes for weight in mlp_program.weights.values())
    half = Net(lambda self, x: x * self.y, y=torch.ones(size // 8))
    programs = {"fp32": mlp_program, "int8": tsopt.capture(half, torch.ones(size // 8)), "bf16": NoGain("none")}
    settings = RaceSettings(candidates=candidates("eager"), memory=int(contenders.COPIES * size * 1.6))
    with Sandbox() as sandbox:
        maker = Maker(programs, settings, sandbox)
        full, low, none = Candidate("eager"), Candidate("eager", variant="int8"), Candidate("eager", variant="bf16")
        assert maker.fit([full, low]) == 2
        assert maker.fit([low, low, none, low]) == 4
        assert maker.fit([full, full]) == 1
        assert maker.fit([full, low, low]) == 2
    assert Maker(programs, settings, None).fit([full] * 9) == 9, "they share what this process holds"


def test_the_weights_stay_in_their_file_until_another_program_comes(mlp_program):
    """Engines map it when they compile, and the winner's files refer to it."""
    with Sandbox() as sandbox:
        sandbox.open({"fp32": mlp_program}, 1)
        first = sandbox.directory / "fp32" / WEIGHTS
        assert first.exists()
        sandbox.open({"fp32": mlp_program}, 1)
        second = sandbox.directory / "fp32" / WEIGHTS
        assert (first.exists(), second.exists()) == (False, True)
    assert not second.exists()


@pytest.mark.sliced(1)
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_no_candidate_writes_the_weights_again(engine):
    model, x = Net(lambda self, x: F.linear(x, self.w), w=torch.randn(64, 512) / 64), torch.ones(2, 3, 512)
    program = tsopt.capture(model, x)
    settings = RaceSettings(candidates=candidates(engine))
    with Sandbox() as sandbox:
        maker = Maker({"fp32": program}, settings, sandbox)
        made, _ = maker.finish(settings.candidates[0], maker.begin(settings.candidates[0]))
        place = made.saved()
        assert sum(file.stat().st_size for file in place.iterdir() if file.stat().st_nlink == 1) < 64 * 512
        found = maker.here(made, settings.candidates[0])
    torch.testing.assert_close(found(x), model(x).detach())


def test_one_that_is_not_needed_any_more_has_ended_and_is_made_again_when_it_is(mlp, mlp_input, mlp_program):
    """Also from no files: they would have to be written by the process that has ended."""
    settings = RaceSettings(candidates=candidates("onnxruntime"))
    with Sandbox() as sandbox:
        maker = Maker({"fp32": mlp_program}, settings, sandbox)
        (candidate,) = settings.candidates
        contender, _ = maker.finish(candidate, maker.begin(candidate))
        assert running([contender._pid])
        retire(contender)
        assert sandbox.ended(contender._pid, 60.0) is not None
        assert torch.allclose(maker.here(contender, candidate)(mlp_input), mlp(mlp_input), atol=1e-5)


def test_how_a_candidate_has_ended_is_known_where_signals_of_children_are_ignored(mlp_program):
    with Sandbox(at_once=False) as sandbox:
        before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # which processes inherit
        try:
            sandbox.start()
        finally:
            signal.signal(signal.SIGCHLD, before)
        sandbox.open({"fp32": mlp_program}, threads=1)
        lost = sandbox.contender(Candidate("eager"))
        os.kill(lost._pid, signal.SIGSEGV)
        with pytest.raises(CandidateDied, match="SIGSEGV"):
            lost.saved()


def test_a_backend_of_the_working_directory_is_found_and_nothing_there_stands_in_for_a_library(
    mlp_program, monkeypatch, tmp_path
):
    """As in a console."""
    (tmp_path / "backend_of_a_console.py").write_text("from tests.runtime.faulty import Right\n")
    (tmp_path / "queue.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    with Sandbox() as sandbox:
        sandbox.open({"fp32": mlp_program}, threads=1)
        found = sandbox.contender(Candidate("backend_of_a_console:Right"))
        found.begin()
        assert found.finish() > 0
    assert not (tmp_path / "ran").exists()


def test_no_signal_goes_to_the_processes_of_a_helper_that_has_ended(mlp_program, monkeypatch):
    """They have ended with it, and their numbers may be those of others."""
    signals = []
    with Sandbox() as sandbox:
        sandbox.open({"fp32": mlp_program}, threads=1)
        sandbox.contender(Candidate("eager"))
        os.kill(sandbox._process.pid, signal.SIGKILL)
        sandbox._process.wait()
        for module, name in ((isolation, "kill"), (isolated, "kill"), (isolated, "kill_group")):
            monkeypatch.setattr(module, name, signals.append)
        sandbox.close()
    assert signals == []


@pytest.mark.parametrize(("many", "ended"), [(0, True), (1 << 30, False)])
def test_where_weights_are_large_the_others_end_before_the_winner_is_opened(mlp_program, monkeypatch, many, ended):
    monkeypatch.setattr(contenders, "MANY", many)
    settings = RaceSettings(candidates=candidates("eager", "torchscript"))
    with Sandbox() as sandbox:
        maker = Maker({"fp32": mlp_program}, settings, sandbox)
        winner, other = (maker.finish(item, maker.begin(item))[0] for item in settings.candidates)
        maker.make_room([other])
        assert (other.retired, winner.retired) == (ended, False)


def test_the_winner_and_one_with_fewer_threads_are_opened_and_not_exported_again(
    mlp, mlp_input, mlp_program, monkeypatch
):
    settings = RaceSettings(candidates=candidates("onnxruntime", "onnxruntime?threads=1"), threads=1)
    monkeypatch.setattr("tsopt.runtime.onnx.export.to_onnx", None)  # here; the other process exports once
    with Sandbox() as sandbox:
        maker = Maker({"fp32": mlp_program}, settings, sandbox)
        plain, single = settings.candidates
        first, _ = maker.finish(plain, maker.begin(plain))
        second, _ = maker.finish(single, maker.begin(single, first))
        assert [path.name for path in sandbox.directory.glob("saved-*")] == [first.saved().name]
        for contender, candidate in ((first, plain), (second, single)):
            assert maker.reopens(contender, candidate)
            here = maker.here(contender, candidate)
            assert torch.allclose(here(mlp_input), mlp(mlp_input), atol=1e-5)
            assert here.options["threads"] == 1
        assert list(sandbox.directory.glob("saved-*")) == []


class TwoResults(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.table = torch.nn.Parameter(torch.arange(400.0)), torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.weight, self.table * 2


@pytest.mark.sliced(2)
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("backend", [FAULTY + "Reopened", "onnxruntime"])
def test_what_is_opened_from_its_files_keeps_its_weights_and_its_results(backend, share):
    """As what is compiled does: the weights may change unless they are shared, and the results are the caller's."""
    model, x = TwoResults().eval(), torch.ones(400)
    program = tsopt.transform(tsopt.capture(model, x))
    (candidate,) = candidates(backend)
    with Sandbox() as sandbox:
        maker = Maker({"fp32": program}, RaceSettings(candidates=(candidate,), share_weights=share), sandbox)
        contender, _ = maker.finish(candidate, maker.begin(candidate))
        assert maker.reopens(contender, candidate)
        executable = maker.here(contender, candidate)
    assert executable.model == program.name
    first, constant = executable(x)
    constant.zero_()
    with torch.no_grad():
        model.weight.mul_(3)
    again, constant = executable(x)
    assert torch.equal(constant, torch.full((4,), 2.0))
    assert share or torch.equal(again, first)


@pytest.mark.parametrize(("backend", "few"), [("onnxruntime", True), ("torchscript", False)])
def test_what_is_opened_from_its_files_is_not_checked_twice_on_everything(try_all, monkeypatch, backend, few):
    """What is compiled once more in this process is another executable, and is checked on everything."""
    asked, real = [], race_module.Oracle
    monkeypatch.setattr(race_module, "Oracle", lambda *a, **k: asked.append(k.get("few", False)) or real(*a, **k))
    monkeypatch.setattr(
        race_module, "measure", lambda calls, *a, **k: {name: Timing((1.0 + (name == "eager"),) * 8) for name in calls}
    )
    _, found = try_all(backend)
    assert found.winner == backend
    assert asked == [False, few]


def test_a_sandbox_can_be_closed_and_started_again(mlp_program):
    with Sandbox() as sandbox:
        sandbox.open({"fp32": mlp_program}, threads=1)
        sandbox.close()
        with pytest.raises(isolation.CandidateDied):
            sandbox.contender(Candidate("eager"))
        sandbox.start()
        sandbox.open({"fp32": mlp_program}, threads=1)
        candidate = sandbox.contender(Candidate("eager"))
        candidate.begin()
        candidate.finish()


def test_candidates_have_the_default_dtype_of_the_caller(default_dtype):
    x = torch.arange(6)
    with Sandbox() as sandbox:
        for dtype in (torch.float64, torch.float32):
            default_dtype(dtype)
            sandbox.open({"fp32": tsopt.capture(lambda x: x / 3, x)}, 1)
            candidate = sandbox.contender(Candidate("eager"))
            candidate.begin()
            candidate.finish()
            assert torch.equal(candidate(x), x / 3)


def test_a_sandbox_takes_one_program_after_the_other(sandbox, mlp_program):
    other = tsopt.capture(torch.nn.Linear(3, 2).eval(), torch.ones(1, 3))
    for program in (other, mlp_program):
        Sandbox.open(sandbox, {"fp32": program}, threads=1, memory=4 << 30)
        candidate = sandbox.contender(Candidate("eager"))
        candidate.begin()
        candidate.finish()
        (item,) = program.signature.user_inputs
        x = torch.ones(item.type.shape)
        example = Example((x,))
        assert candidate.timed("seconds_of", [example])[0] > 0
        torch.testing.assert_close(candidate(x), tsopt.compile(program, "eager")(x))


def no_sockets(*_):
    raise OSError(24, "Too many open files")


def test_where_the_system_gives_no_process_candidates_are_lost_to_it(sandbox, mlp_program, monkeypatch):
    monkeypatch.setattr(isolation.socket, "socketpair", no_sockets)
    with pytest.raises(isolation.CandidateDied, match="cannot start a process for the candidate") as caught:
        sandbox.contender(Candidate("eager"))
    assert caught.value.kind == "system error"
    with Sandbox() as another, pytest.raises(tsopt.BackendError, match=r"cannot start a process: .* open files"):
        another.open({"fp32": mlp_program}, threads=1)


@pytest.mark.skipif(not Path("/proc/self/oom_score_adj").exists(), reason="Linux only")
def test_where_memory_runs_out_candidates_end_first_and_the_caller_last(sandbox):
    """The kernel would otherwise end the largest process, which is often that of the user."""
    candidate = sandbox.contender(Candidate("eager"), threads=1)
    candidate.begin()
    candidate.finish()

    def score(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    assert score(candidate._pid) > score(sandbox._process.pid) > score(os.getpid())
    candidate.retire()


@pytest.mark.sliced(2)
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


def test_a_full_disk_leaves_the_race_to_this_process(mlp, mlp_input, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    fast = tsopt.optimize(mlp, mlp_input, seconds=0.1, backends=("eager",))
    assert "No space left" in fast.report.not_isolated_because
    assert fast.report.row("eager + passes").status == "ok"


def test_a_backend_that_cannot_be_imported_is_a_message():
    with pytest.raises(tsopt.BackendError, match="cannot import the backend"):
        tsopt.compile(None, "no.such.module:Backend")


def test_optimize_isolates_and_saves(tmp_path, mlp, mlp_input):
    before, files = set(running(descendants(os.getpid()))), set(leftovers(os.getpid()))  # those of fixtures
    fast = tsopt.optimize(mlp, mlp_input, seconds=0.3, backends=("eager", "onnxruntime"))
    assert fast.report.not_isolated_because == ""
    assert [row.status for row in fast.report.rows] == ["ok", "ok", "ok"]
    torch.testing.assert_close(fast(mlp_input), mlp(mlp_input))
    assert set(running(descendants(os.getpid()))) <= before
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
