"""The second `optimize` of a model: what was raced is taken over, and checked again before it is believed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tsopt
from tests.runtime.helpers import ENTRY, candidates
from tests.runtime.racing.cached import PACES, TITLE, X, entry, make, optimize, set_paces
from tsopt import request as request_module
from tsopt.compiler.calls.example import as_example
from tsopt.runtime.backends.eager import EagerBackend
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.racing import cache, cached_race
from tsopt.runtime.racing import race as race_module
from tsopt.runtime.racing.choice import Race
from tsopt.runtime.racing.outcomes import LOST
from tsopt.runtime.racing.row import EAGER, MODEL, Row
from tsopt.runtime.racing.speedup import Speedup, Timing
from tsopt.runtime.sandbox.processes import descendants
from tsopt.runtime.sandbox.sandbox import Sandbox


@pytest.fixture(autouse=True)
def _paced(monkeypatch):
    set_paces(monkeypatch)


def test_the_second_time_only_the_winner_is_raced(races):
    first = optimize()
    assert first.report.winner != EAGER
    assert first.report.cached == ""
    again = optimize()
    assert races[0] == candidates("eager", "torchscript")
    assert [len(backends) for backends in races] == [2, 1]
    assert again.report.winner == first.report.winner
    assert [row.timing for row in again.report.rows] == [row.timing for row in first.report.rows]
    assert "verified and timed again" in again.report.cached
    assert "from the cache: raced on 20" in str(again.report)
    assert again.report.to_json()["cached"] == again.report.cached
    torch.testing.assert_close(again(X), make()(X).detach())


@pytest.mark.slow
def test_nothing_is_imported_by_another_process_while_the_winner_is_timed_again(once_as_shipped, monkeypatch):
    """Before a whole race starts, the process is there again."""
    running, real = [], race_module.measure

    def measured(calls, *args, **options):
        here = [item for item in descendants(os.getpid()) if "runtime.sandbox" in command_of(item)]
        running.append(len(here))
        return real(calls, *args, **options)

    monkeypatch.setattr(race_module, "measure", measured)
    optimize()
    again = optimize()
    assert again.report.cached
    monkeypatch.setitem(PACES, TITLE, 4.0)
    whole = optimize()
    assert (whole.report.cached, whole.report.not_isolated_because) == ("", "")
    raced, checked, lost, raced_again = (number > 0 for number in running)
    assert (raced, checked, lost, raced_again) == (True, False, False, True)


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:  # it has ended
        return ""


def test_other_weights_take_the_winner_over_and_compute_their_own(races):
    optimize()
    other = optimize(make(seed=1))
    assert [len(backends) for backends in races] == [2, 1]
    torch.testing.assert_close(other(X), make(seed=1)(X).detach())


def test_no_process_is_started_for_a_race_that_is_likely_to_be_known(once_as_shipped, monkeypatch):
    started, real = [], Sandbox.start

    def counted(self):
        started.append(self)
        real(self)

    monkeypatch.setattr(Sandbox, "start", counted)
    optimize()
    assert started
    started.clear()
    assert optimize().report.cached
    assert started == []
    optimize(backends=("torchscript",))  # the same sizes, another race
    assert started


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_directory_races_each_time_and_saves(races, tmp_path):
    for _ in range(2):
        fast = optimize()
        assert (fast.report.winner, fast.report.cached) == (TITLE, "")
    assert [len(backends) for backends in races] == [2, 2]
    loaded = tsopt.load(fast.save(tmp_path / "model.tsopt"))
    torch.testing.assert_close(loaded(X), fast(X))


def test_without_the_cache_nothing_is_taken_over_and_nothing_kept(races):
    optimize(cache=False)
    assert cache.entries() == []
    optimize()
    fast = optimize(cache=False)
    assert fast.report.cached == ""
    assert [len(backends) for backends in races] == [2]


@pytest.mark.parametrize("winner", ["eager", "TorchScript"])
def test_what_was_wrong_with_some_weights_is_tried_with_others(races, monkeypatch, winner):
    """The verdict on results is one on values; the race is the same for all of them otherwise."""
    real, weight = EagerBackend.compile, make()[0].weight

    def wrong(self, program) -> Executable:
        made = real(self, program)
        if any(torch.equal(value, weight) for value in program.weights.values()):
            run = made._run
            made._run = lambda inputs: [value + 1 for value in run(inputs)]
            made.quick = None
        return made

    monkeypatch.setattr(EagerBackend, "compile", wrong)
    monkeypatch.setitem(PACES, "TorchScript", 8.0 if winner == EAGER else 2.0)
    first, same = optimize(), optimize()
    assert (first.report.winner, same.report.winner, bool(same.report.cached)) == (winner, winner, True)
    assert {row.name: row.status for row in same.report.rows}[TITLE] == "wrong"
    other = optimize(make(seed=1))
    assert (other.report.winner, other.report.cached) == (TITLE, "")
    assert {row.status for row in other.report.rows} == {"ok"}
    torch.testing.assert_close(other(X), make(seed=1)(X).detach())
    assert optimize(make(seed=2)).report.cached, "nobody was rejected any more"


@pytest.fixture
def one_that_is_wrong(monkeypatch):
    """TorchScript wins, and what torch runs is wrong."""
    real = EagerBackend.compile

    def wrong(self, program) -> Executable:
        made = real(self, program)
        run = made._run
        made._run, made.quick = lambda inputs: [value + 1 for value in run(inputs)], None
        return made

    monkeypatch.setattr(EagerBackend, "compile", wrong)


@pytest.mark.usefixtures("one_that_is_wrong")
def test_of_a_model_that_writes_state_the_race_is_known_all_the_same():
    class Counter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = make()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            return self.layer(x) + self.count

    model = Counter().eval()
    first = optimize(model)
    assert {row.name: row.status for row in first.report.rows}[TITLE] == "wrong"
    model.count.add_(3)
    assert optimize(model).report.cached


class Helper:
    """A sandbox that notes what is asked of it, and serves nobody."""

    def __init__(self):
        self.asked = []

    def start(self):
        self.asked.append("start")

    def close(self):
        self.asked.append("close")


@pytest.mark.usefixtures("one_that_is_wrong")
def test_with_other_weights_the_helper_is_not_closed_before_the_whole_race(monkeypatch):
    real, helpers = cached_race.race, []

    def request(*args, sandbox, **options):
        helpers.append(Helper())
        return cached(*args, sandbox=helpers[-1], **options)

    def alone(*args, sandbox=None, **options):
        return real(*args, **options)

    cached = cached_race.cached_race
    monkeypatch.setattr(request_module, "cached_race", request)
    monkeypatch.setattr(cached_race, "race", alone)
    for seed in (0, 1, 1):
        optimize(make(seed=seed))
    assert [helper.asked for helper in helpers] == [["start"], ["start"], ["close"]]


STRANGER = Row("OpenVINO", "wrong", "it is", key="openvino")
POISON = {
    "eager wins over what is faster": lambda e: replace(e, winner=MODEL),
    "a row of somebody who does not race": lambda e: replace(e, rows=(*e.rows, STRANGER)),
    "a row is missing": lambda e: replace(e, rows=tuple(row for row in e.rows if row.key in (MODEL, e.winner))),
    "from the future": lambda e: replace(e, when=4e9),
    "eager is not the first": lambda e: replace(e, rows=e.rows[::-1]),
}


@pytest.mark.parametrize("name", POISON)
def test_an_entry_that_does_not_fit_is_not_believed_once(races, name):
    optimize()
    (path,) = cache.entries()
    cache.keep(path.stem, POISON[name](entry()))
    assert optimize().report.cached == ""
    assert [len(backends) for backends in races] == [2, 2]


def test_one_thread_may_be_missing_from_the_rows():
    rows = (Row(EAGER), Row("ONNX Runtime", key="onnxruntime"))
    kept = replace(ENTRY, rows=rows)
    assert cached_race._is_race_of(kept, candidates("onnxruntime", "onnxruntime?threads=1"))
    assert not cached_race._is_race_of(kept, candidates("onnxruntime", "torchscript"))


def test_a_winner_that_is_not_faster_any_more_is_raced_anew(races, monkeypatch):
    optimize()
    (path,) = cache.entries()
    plain = make()
    program = tsopt.capture(plain, X)
    raced = cache.key_of(program, tsopt.transform(program), candidates("null"), None)
    key = f"{cache.kind_of(plain, as_example(X))}-{raced}"
    first = entry().rows[0]
    null = Row("null", key="null", timing=Timing((1.0,) * 7), speedup=Speedup(2.0, 1.9, 2.1))
    cache.keep(key, replace(entry(), rows=(first, null), winner="null"))
    path.unlink()
    races.clear()
    found = optimize(plain, backends=("null",))
    assert races == [candidates("null")] * 2
    assert found.report.cached == ""


def test_a_winner_that_is_wrong_now_is_raced_anew(races, monkeypatch):
    optimize(backends=("eager",))
    real = EagerBackend.compile

    def wrong(self, program) -> Executable:
        made = real(self, program)
        run = made._run
        made._run = lambda inputs: [value + 1 for value in run(inputs)]
        made.quick = None
        return made

    monkeypatch.setattr(EagerBackend, "compile", wrong)
    found = optimize(backends=("eager",))
    assert [len(backends) for backends in races] == [1, 1, 1]
    assert (found.report.winner, found.report.cached) == (EAGER, "")
    torch.testing.assert_close(found(X), make()(X).detach())


def test_an_entry_with_a_row_of_another_title_is_not_believed(races):
    optimize()
    (path,) = cache.entries()
    rows = [replace(row, name="Miracle") if row.name == TITLE else row for row in entry().rows]
    cache.keep(path.stem, replace(entry(), rows=tuple(rows)))
    assert optimize().report.cached == ""


@pytest.mark.parametrize("status", LOST)
def test_a_race_in_which_somebody_was_out_of_luck_is_not_kept(status, monkeypatch):
    rows = (
        Row(EAGER, timing=Timing((1.0,))),
        Row("x", key="x", speedup=Speedup(1.0, 1.0, 1.0)),
        Row("y", status, key="y"),
    )
    monkeypatch.setattr(cached_race, "race", lambda *_, **__: Race(rows, MODEL, "", None))
    optimize()
    assert cache.entries() == []


def test_a_race_on_a_busy_machine_is_not_kept(monkeypatch):
    rows = (Row(EAGER, timing=Timing((1.0,))), Row("x", key="x", speedup=Speedup(2.0, 0.7, 5.0)))
    monkeypatch.setattr(cached_race, "race", lambda *_, **__: Race(rows, MODEL, "", None))
    optimize()
    assert cache.entries() == []


def test_a_race_that_has_decided_nothing_about_somebody_is_not_kept(monkeypatch):
    good, unclear = Row("x", key="x", speedup=Speedup(2.0, 1.9, 2.1)), Row("y", key="y", speedup=Speedup(1.5, 0.4, 8.0))
    rows = (Row(EAGER, timing=Timing((1.0,))), good, unclear)
    monkeypatch.setattr(cached_race, "race", lambda *_, **__: Race(rows, "x", "", None))
    optimize()
    assert cache.entries() == []


def test_a_race_that_has_decided_nothing_about_one_that_is_certainly_slower_is_kept(monkeypatch):
    good, slow = Row("x", key="x", speedup=Speedup(2.0, 1.9, 2.1)), Row("y", key="y", speedup=Speedup(0.7, 0.4, 1.4))
    assert slow.verdict == "undecided"
    rows = (Row(EAGER, timing=Timing((1.0,))), good, slow)
    assert cached_race._is_repeatable(Race(rows, "x", "", None))


def test_a_race_with_a_backend_of_ones_own_is_not_kept():
    optimize(backends=("tsopt.runtime.backends.eager:EagerBackend",))
    assert cache.entries() == []


def test_a_sweep_measures_anew(races):
    optimize()
    tsopt.sweep(make(), X, backends=("eager",), seconds=0.02)
    assert [len(backends) for backends in races] == [2]
