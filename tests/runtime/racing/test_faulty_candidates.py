"""Faulty candidates of every kind: each costs itself a row with a reason, and the race goes on."""

from __future__ import annotations

import pytest

import tsopt
from tests.runtime.racing.helpers import Behaviour, FaultyBackend, assert_goes_on, fast_timings, raising, row
from tsopt.runtime.racing.outcomes import NoCandidate
from tsopt.runtime.racing.row import MODEL
from tsopt.runtime.sandbox.isolated import CandidateDied


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("boom"), "failed"),
        (KeyError("k"), "failed"),
        (AssertionError(), "failed"),
        (RecursionError("deep"), "failed"),
        (MemoryError(), "out of memory"),
        (OSError("disk"), "system error"),
    ],
    ids=str,
)
def test_a_backend_that_raises_while_it_compiles_has_failed(run_race, monkeypatch, error, status):
    monkeypatch.setattr(Behaviour, "compile", raising(error))
    found = run_race()
    assert row(found).status == status
    assert row(found).reason.startswith(f"{type(error).__name__}: ")
    assert_goes_on(found)


def test_a_typed_error_keeps_what_where_and_why(run_race, monkeypatch):
    monkeypatch.setattr(Behaviour, "compile", raising(tsopt.BackendError("no op x", where="fc1", why="too new")))
    assert row(run_race()).reason == "no op x; fc1; too new"


def test_a_backend_that_refuses_is_unsupported_with_the_place(run_race, monkeypatch):
    monkeypatch.setattr(Behaviour, "refuses", True)
    found = run_race()
    assert row(found).status == "unsupported"
    assert row(found).reason == "it is a Tuesday (fc1, model.py:12)"
    assert_goes_on(found)


def test_a_candidate_that_raises_when_called_has_failed(run_race, monkeypatch):
    monkeypatch.setattr(Behaviour, "run", raising(ZeroDivisionError("kernel")))
    found = run_race()
    assert (row(found).status, row(found).reason) == ("failed", "ZeroDivisionError: kernel")
    assert_goes_on(found)


WRONG = {
    "values": (lambda n, i, right: [right[0] + 1], "wrong", "max difference"),
    "nan": (lambda n, i, right: [right[0] * float("nan")], "wrong", "NaN"),
    "the last answer": (lambda n, i, right, kept=[]: kept.append(right) or [kept[0][0].clone()], "wrong", "input"),
    "dtype": (lambda n, i, right: [right[0].double()], "failed", "is float64, expected float32"),
    "shape": (lambda n, i, right: [right[0].t()], "failed", "has shape"),
    "fewer outputs": (lambda n, i, right: [], "failed", ""),
    "from call 3 on": (lambda n, i, right: [right[0] + (n >= 3)], "wrong", "max difference"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_candidate_costs_only_itself(run_race, monkeypatch, name):
    behaviour, status, reason = WRONG[name]
    monkeypatch.setattr(Behaviour, "run", behaviour)
    found = run_race()
    assert row(found).status == status
    assert reason in row(found).reason
    assert row(found).timing is None
    assert_goes_on(found)


@pytest.mark.parametrize("call", [8, 10, 15])
def test_a_candidate_that_raises_while_it_is_timed_costs_only_itself(run_race, monkeypatch, call):
    def behave(number, inputs, right):
        if number >= call:
            raise RuntimeError("worn out")
        return right

    monkeypatch.setattr(Behaviour, "run", behave)
    found = run_race()
    assert row(found).status == "failed"
    assert "worn out" in row(found).reason
    assert_goes_on(found)


def test_a_candidate_that_spoils_its_inputs_is_wrong(run_race, monkeypatch):
    def behave(number, inputs, right):
        inputs[0].zero_()
        return right

    monkeypatch.setattr(Behaviour, "run", behave)
    found = run_race()
    assert row(found).status == "wrong"
    assert_goes_on(found)


def test_an_engine_that_is_missing_is_a_row_with_what_to_install(run_race, monkeypatch):
    monkeypatch.setattr(FaultyBackend, "missing", lambda self: "pip install faulty")
    found = run_race()
    assert row(found).status == "missing"
    assert row(found).reason == "pip install faulty"
    assert_goes_on(found)


STOPS = {
    "out of memory": MemoryError(),
    "no room": OSError(28, "No space left on device"),
    "crashed": CandidateDied("crashed", "SIGSEGV"),
    "timed out": CandidateDied("timed out", "no answer"),
}
LATE = {"timed out": " within the time limit"}


@pytest.mark.parametrize("name", STOPS)
def test_a_race_in_which_no_candidate_could_be_tried_is_a_warning(run_race, monkeypatch, name):
    monkeypatch.setattr(Behaviour, "compile", raising(STOPS[name]))
    with pytest.warns(NoCandidate, match="no candidate could be tried: faulty"):
        found = run_race(("faulty",))
    assert found.winner == MODEL
    assert found.why.startswith(f"no candidate could be tried{LATE.get(name, '')}")


@pytest.mark.parametrize("name", STOPS)
def test_a_race_in_which_another_candidate_was_tried_does_not_warn(run_race, monkeypatch, name):
    monkeypatch.setattr(Behaviour, "compile", raising(STOPS[name]))
    found = run_race(("faulty", "null"))
    assert found.winner == MODEL
    assert found.why.startswith(f"no candidate could be used{LATE.get(name, '')}")


def test_a_race_that_is_not_the_last_word_does_not_warn(run_race, monkeypatch):
    monkeypatch.setattr(Behaviour, "compile", raising(MemoryError()))
    assert run_race(("faulty",), warn=False).why.startswith("no candidate could be tried")


@pytest.mark.parametrize("late", ["while it is timed", "after it was timed"])
def test_a_candidate_that_runs_out_of_memory_late_is_reported_as_such(run_race, monkeypatch, late):
    limit = 20 if late == "while it is timed" else 48

    def behave(number, inputs, right):
        if number > limit:
            raise MemoryError
        return right

    monkeypatch.setattr(Behaviour, "run", behave)
    if late == "after it was timed":
        fast_timings(monkeypatch)
    with pytest.warns(NoCandidate):
        found = run_race(("faulty",))
    assert row(found).status == "out of memory"
