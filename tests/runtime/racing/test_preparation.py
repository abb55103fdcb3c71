"""Before the rounds: who is compiled when, who is not checked, and who gets one thread."""

from __future__ import annotations

import pytest

from tests.runtime.racing.helpers import Behaviour, row
from tsopt.runtime.backends.table import BACKENDS, BackendInfo
from tsopt.runtime.racing import contenders, preparation
from tsopt.runtime.racing import race as race_module
from tsopt.runtime.racing.row import MODEL


def test_the_cold_start_of_every_candidate_is_told(run_race):
    rows = {row.name: row for row in run_race(("eager", "onnxruntime")).rows}
    assert rows["eager"].cold is None
    assert all(rows[name].cold.first > 0 for name in ("eager + passes", "ONNX Runtime"))


def test_one_that_is_far_behind_is_not_checked(run_race, monkeypatch):
    monkeypatch.setattr(preparation, "HOPELESS", 4.0)
    monkeypatch.setattr(preparation, "once_warm", lambda spent, *_: min(spent))
    monkeypatch.setattr(preparation, "first_calls", lambda call, *_: [1.0 if call.backend == "faulty" else 1e-9])
    monkeypatch.setattr(race_module, "seconds_of", lambda *_: 2e-9)
    timed = []
    measured = race_module.measure
    monkeypatch.setattr(race_module, "measure", lambda calls, *a, **k: timed.extend(calls) or measured(calls, *a, **k))
    found = run_race()
    assert row(found).status == "not checked"
    assert row(found).reason == "about 500000000.0 times slower than the best"
    assert timed == ["eager", "eager + passes"]


@pytest.mark.parametrize(
    ("later", "status"),
    [((1.5, 1.5), "not checked"), ((1.5, 1.2), "ok"), ((1.2, 1.5), "ok"), ((1.5, 1.5, 1.2), "not checked")],
)
def test_one_that_was_slow_in_a_moment_is_looked_at_in_two_more(run_race, monkeypatch, later, status):
    looks = iter(later)
    monkeypatch.setattr(preparation, "HOPELESS_IF_LONG", 1.3)
    monkeypatch.setattr(preparation, "HOPELESS", 4.0)
    monkeypatch.setattr(preparation, "first_calls", lambda call, *_: [1.5 if call.backend == "faulty" else 1.0])
    monkeypatch.setattr(preparation, "seconds_of", lambda *_: next(looks))
    monkeypatch.setattr(race_module, "seconds_of", lambda *_: 1.0)
    assert row(run_race()).status == status


@pytest.mark.parametrize(("pace", "status"), [(1.4, "ok"), (1.6, "not checked")])
def test_of_long_calls_the_first_ones_tell_more(run_race, monkeypatch, pace, status):
    monkeypatch.setattr(preparation, "HOPELESS_IF_LONG", 1.5)
    monkeypatch.setattr(preparation, "LOOKS", 0)
    monkeypatch.setattr(preparation, "first_calls", lambda call, *_: [pace if call.backend == "faulty" else 1.0])
    monkeypatch.setattr(race_module, "seconds_of", lambda *_: 1.0)
    assert row(run_race()).status == status


@pytest.mark.parametrize(("heavy", "status"), [(True, "not checked"), (False, "ok")])
def test_of_large_models_fewer_are_checked(run_race, monkeypatch, heavy, status):
    monkeypatch.setattr(contenders.Maker, "is_heavy", heavy)
    paces = {"faulty": 2e-3, "eager": 1e-3}
    monkeypatch.setattr(preparation, "HOPELESS_IF_LONG", 1.5)
    monkeypatch.setattr(preparation, "HOPELESS", 4.0)
    monkeypatch.setattr(preparation, "first_calls", lambda call, *_: [paces[call.backend]])
    monkeypatch.setattr(preparation, "once_warm", lambda spent, *_: min(spent))
    monkeypatch.setattr(preparation, "seconds_of", lambda call, *_: paces[call.backend])
    monkeypatch.setattr(race_module, "seconds_of", lambda *_: 1e-3)
    assert row(run_race()).status == status


def test_one_that_is_wrong_leaves_nobody_behind_however_fast_it_is(run_race, monkeypatch):
    monkeypatch.setattr(preparation, "HOPELESS", 4.0)
    monkeypatch.setattr(Behaviour, "run", staticmethod(lambda calls, inputs, right: [value + 1 for value in right]))
    paces = {"faulty": 1e-9, "eager": 1.0}
    monkeypatch.setattr(preparation, "first_calls", lambda call, *_: [paces[call.backend]])
    monkeypatch.setattr(preparation, "once_warm", lambda spent, *_: min(spent))
    monkeypatch.setattr(race_module, "seconds_of", lambda *_: 1.0)
    found = run_race()
    assert (row(found).status, row(found, "eager + passes").status) == ("wrong", "ok")


def test_to_time_all_is_to_time_who_cannot_win_as_well(run_race, monkeypatch):
    monkeypatch.setattr(preparation, "HOPELESS", 0.0)
    asked = []
    measured = race_module.measure
    monkeypatch.setattr(race_module, "measure", lambda *a, **k: asked.append(k["until_decided"]) or measured(*a, **k))
    assert {row.status for row in run_race(time_all=True).rows} == {"ok"}
    assert run_race().rows[1].status == "not checked"
    assert asked == [False, True]


def test_when_all_are_far_behind_none_is_faster(run_race, monkeypatch):
    monkeypatch.setattr(preparation, "HOPELESS", 0.0)
    found = run_race()
    assert {row.status for row in found.rows[1:]} == {"not checked"}
    assert (found.winner, found.why) == (MODEL, "no candidate is significantly faster")


def test_one_that_runs_kernels_while_it_compiles_does_so_when_the_exports_are_done(run_race, monkeypatch):
    told: list[str] = []
    run_race(("eager", "faulty"), progress=told.append)
    assert [text.split()[1] for text in told if text.startswith("compile")] == ["eager", "faulty"]
    entry = BackendInfo("faulty", f"{__name__}:FaultyBackend", "faulty", through_onnx=True)
    monkeypatch.setitem(BACKENDS, "faulty", entry)
    told.clear()
    run_race(("eager", "faulty"), progress=told.append)
    assert [text.split()[1] for text in told if text.startswith("compile")] == ["faulty", "eager"]


def test_one_thread_is_tried_where_a_call_is_short_and_there_are_several(run_race, monkeypatch, torch_threads):
    backends = ("onnxruntime", "onnxruntime?threads=1")
    torch_threads(2)
    found = run_race(backends=backends)
    assert [item.name for item in found.rows] == ["eager", "ONNX Runtime", "ONNX Runtime, 1 thread"]
    monkeypatch.setattr(preparation, "SINGLE_THREAD_SECONDS", 0.0)
    assert [item.name for item in run_race(backends=backends).rows] == ["eager", "ONNX Runtime"]


def test_one_thread_needs_no_try_where_there_is_but_one(run_race, torch_threads):
    torch_threads(1)
    found = run_race(backends=("onnxruntime", "onnxruntime?threads=1"))
    assert [item.name for item in found.rows] == ["eager", "ONNX Runtime"]
