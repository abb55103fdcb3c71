"""Whatever a candidate does costs that candidate: it is named with its kind, and the race goes on."""

from __future__ import annotations

import os
import subprocess
import time

import pytest
import torch
from torch import nn

import tsopt
from tests.runtime.faulty import SLOW
from tests.runtime.sandbox.helpers import FAULTY, running
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.racing import contenders
from tsopt.runtime.racing import race as race_module
from tsopt.runtime.racing.row import MODEL
from tsopt.runtime.sandbox import isolated, worker
from tsopt.runtime.sandbox.isolated import CandidateDied, Isolated
from tsopt.runtime.sandbox.sandbox import Sandbox

pytestmark = pytest.mark.usefixtures("as_shipped")


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


def test_garbage_is_collected_in_the_process_of_a_candidate(try_all):
    """Not in the helper that it is forked from, which imports large libraries."""
    rows, _ = try_all(FAULTY + "Collects")
    assert rows["Collects"].status == "ok", rows


def test_a_candidate_that_remembers_its_last_input_gains_nothing(try_all):
    rows, _ = try_all(FAULTY + "Remembers")
    assert rows["Remembers"].timing.p50 >= 1e3 * SLOW


@pytest.mark.parametrize("times", [[], [float("nan")], [-1.0, 1.0], ["1"]], ids=str)
def test_times_that_cannot_be_are_refused(times, try_all, monkeypatch):
    """They would decide about the others."""
    ask = Isolated._ask

    def lie(self, message):
        answer = ask(self, message)
        lies = message["do"] == "time" and self.candidate.backend == FAULTY + "Right"
        return answer | {"seconds": times} if lies else answer

    monkeypatch.setattr(Isolated, "_ask", lie)
    rows, _ = try_all(FAULTY + "Right", "eager")
    assert rows["Right"].status == "failed"
    assert "sent an invalid answer; times: [" in rows["Right"].reason
    assert rows["eager + passes"].status == "ok"


@pytest.mark.sliced(1)
@pytest.mark.parametrize("name", ["Sleeps", "Spins"])
def test_a_candidate_that_hangs_is_ended_and_the_race_goes_on(name, try_all):
    rows, _ = try_all(FAULTY + name, "eager", budget=4.0)
    assert rows[name].status == "timed out"
    assert rows[name].reason.startswith("no answer to 'compile' within ")
    assert rows["eager + passes"].status == "ok"


def test_a_winner_is_verified_although_the_budget_is_used_up(try_all, sandbox, monkeypatch):
    """Its call takes longer than what is left."""
    given, choose = [], race_module.choose

    def note(maker, *args, **options):
        given.append(sandbox.seconds)
        return choose(maker, *args, **options)

    def use_up(*args, **options):
        monkeypatch.setattr(contenders.Clock, "left", 0.0)
        return timed(*args, **options)

    timed = race_module._timed
    monkeypatch.setattr(race_module, "_timed", use_up)
    monkeypatch.setattr(race_module, "choose", note)
    rows, _ = try_all("eager", budget=60.0)
    assert given == [race_module.TO_VERIFY]
    assert rows["eager + passes"].status == "ok"


@pytest.mark.parametrize("name", ["Noisy", "Leaks", "Changes", "Right"])
def test_what_a_candidate_does_beside_its_work_stays_with_it(name, try_all, capfd, no_winner):
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


def test_a_crash_while_one_thread_is_considered_costs_only_the_candidate(try_all, two_threads):
    name = FAULTY + "CrashesWhenTimed"
    rows, found = try_all(name, f"{name}?threads=1", "eager")
    assert rows["CrashesWhenTimed"].status == "crashed"
    assert rows["eager + passes"].status == "ok"
    assert found.winner in (MODEL, "eager")


def test_what_a_lost_candidate_printed_last_is_told(sandbox):
    lost = sandbox.contender(Candidate(FAULTY + "Segfaults"))
    lost.begin()
    with pytest.raises(CandidateDied) as caught:
        lost.finish()
    assert caught.value.kind == "crashed"
    with pytest.raises(CandidateDied):
        lost.begin()


def test_no_signal_goes_to_the_number_of_a_process_that_has_ended(sandbox, monkeypatch):
    """It may be that of another process by then; what has remained in its group is ended before."""
    signals = []
    for name in ("kill", "kill_group"):
        monkeypatch.setattr(isolated, name, lambda pid: signals.append(pid))
    lost = sandbox.contender(Candidate(FAULTY + "LeavesOneBehind"))
    lost.begin()
    with pytest.raises(CandidateDied, match="SIGSEGV"):
        lost.finish()
    lost.end()
    assert signals == []
    end = time.monotonic() + 60
    while running([int(lost.printed)]) and time.monotonic() < end:
        time.sleep(0.01)
    assert running([int(lost.printed)]) == []


@pytest.mark.parametrize("can_look", [True, False])
def test_what_a_child_has_left_in_its_group_is_ended_when_its_status_is_taken(monkeypatch, can_look):
    if not can_look:
        monkeypatch.delattr(os, "waitid")  # as on macOS, before Python 3.13
    command = ["sh", "-c", "sleep 600 & echo $!"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as child:
        left = int(child.stdout.readline())
        assert worker._reap(child.pid, 60.0) == 0
    end = time.monotonic() + 60
    while running([left]) and time.monotonic() < end:
        time.sleep(0.01)
    assert running([left]) == []


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
    with Sandbox() as sandbox:
        sandbox.open({"fp32": program}, threads=1)
        candidate = sandbox.contender(Candidate(backend), threads=1)
        candidate.begin()
        candidate.finish()
        with torch.no_grad():
            found, wanted = candidate(x, more=more), tsopt.compile(program, backend)(x, more=more)
        seconds = candidate.timed("seconds_of_calls", [example], times=3, untimed=0, samples=2)
    assert list(found) == list(wanted)
    torch.testing.assert_close(found["y"], wanted["y"])
    assert found["both"][1] in (2, 4)
    assert model.calls == 2  # one call each
    assert len(seconds) == 2
    assert min(seconds) > 0


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
