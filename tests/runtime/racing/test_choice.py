"""The winner: the fastest correct candidate, data before code in a tie, and never one whose speed is undecided."""

from __future__ import annotations

import pytest

from tests.runtime.racing.helpers import STEADY, UNCLEAR, Behaviour, assert_goes_on, fast_timings, raising, row, timings
from tsopt.runtime.racing import preparation
from tsopt.runtime.racing import race as race_module
from tsopt.runtime.racing.row import MODEL
from tsopt.runtime.racing.speedup import Timing


def test_the_fastest_that_is_right_wins(run_race, monkeypatch):
    fast_timings(monkeypatch)
    found = run_race()
    assert found.winner == "faulty"
    assert found.executable is not None
    assert found.executable.backend == "faulty"
    assert row(found).verdict == "faster"
    assert row(found, "eager").verdict == "baseline"
    assert found.why.startswith("2.00x [")


def paces(monkeypatch, pace, jitter):
    """Timing that says how long each takes, and how far samples scatter."""

    def measured(calls, inputs, **_):
        signs = {name: 1 - 2 * (i % 2) for i, name in enumerate(calls)}  # noise that differs between candidates
        rounds = (0, 1, -1, 2, -2, 1, -1)
        return {n: Timing(tuple(pace[n] * (1 + signs[n] * jitter * k) for k in rounds)) for n in calls}

    monkeypatch.setattr(race_module, "measure", measured)


@pytest.mark.sliced(2)
@pytest.mark.parametrize(
    ("torchscript", "onnxruntime", "jitter", "winner"),
    [
        (1.00, 1.01, 0.05, "ONNX Runtime"),  # the same: data before code
        (1.00, 1.10, 0.05, "TorchScript"),  # not the same, although noise is large
        (1.00, 1.02, 0.0, "TorchScript"),  # slower beyond noise
        (1.01, 1.00, 0.05, "ONNX Runtime"),
    ],
)
def test_data_comes_before_code_where_noise_cannot_tell_them_apart(
    run_race, monkeypatch, torchscript, onnxruntime, jitter, winner
):
    names = ("eager", "TorchScript", "ONNX Runtime")
    paces(monkeypatch, dict(zip(names, (2.0, torchscript, onnxruntime), strict=True)), jitter)
    found = run_race(("torchscript", "onnxruntime"))
    assert found.row.name == winner
    assert ("equally fast within noise" in found.why) == (jitter > 0)


@pytest.mark.parametrize(
    ("one_thread", "winner"),
    [(1.02, "ONNX Runtime, 1 thread"), (0.9, "ONNX Runtime, 1 thread"), (1.05, "ONNX Runtime")],
)
def test_one_thread_comes_before_several_that_gain_next_to_nothing(
    run_race, monkeypatch, torch_threads, one_thread, winner
):
    torch_threads(2)
    monkeypatch.setattr(preparation, "SINGLE_THREAD_SECONDS", float("inf"))
    paces(monkeypatch, {"eager": 2.0, "ONNX Runtime": 1.0, "ONNX Runtime, 1 thread": one_thread}, jitter=0.0)
    assert run_race(("onnxruntime", "onnxruntime?threads=1")).row.name == winner


def test_one_thread_of_another_engine_does_not_come_first(run_race, monkeypatch, torch_threads):
    torch_threads(2)
    monkeypatch.setattr(preparation, "SINGLE_THREAD_SECONDS", float("inf"))
    paces(monkeypatch, {"eager": 2.0, "TorchScript": 1.0, "ONNX Runtime, 1 thread": 1.02}, jitter=0.0)
    assert run_race(("torchscript", "onnxruntime?threads=1")).row.name == "TorchScript"


def test_who_is_faster_round_by_round_wins_although_another_was_timed_in_quieter_ones(run_race, monkeypatch):
    machine = (1, 1, 1, 1, 3, 3, 3)
    held_up = (1, 1, 1, 3, 1, 1, 1)
    found = {"eager": (10.0, None), "TorchScript": (4.6, held_up), "ONNX": (5.0, None)}
    samples = {
        name: [seconds * slow * own for slow, own in zip(machine, others or [1] * 7, strict=True)]
        for name, (seconds, others) in found.items()
    }
    timings(monkeypatch, **samples)
    assert Timing(tuple(samples["TorchScript"])).p50 > Timing(tuple(samples["ONNX"])).p50
    assert run_race(("torchscript", "onnxruntime")).winner == "torchscript"


def test_a_gain_from_rounds_in_which_eager_was_slow_does_not_win(run_race, monkeypatch):
    slow_at_first = [0.9, 0.5, 0.9, 0.9, 0.5, 0.9, 0.9] + [0.5] * 10
    timings(monkeypatch, eager=slow_at_first, TorchScript=[0.44] * 7, ONNX=[0.3] * 17)
    found = run_race(("torchscript", "onnxruntime"))
    assert row(found, "TorchScript").gain > found.row.gain
    assert found.winner == "onnxruntime"
    slower = "TorchScript gained more when eager was slow, but takes 1.47 times as long in the same rounds"
    assert found.why.endswith(slower)


def test_eager_wins_when_no_candidate_is_faster(run_race, monkeypatch):
    fast_timings(monkeypatch, wins="eager")
    found = run_race()
    assert (found.winner, found.executable) == (MODEL, None)
    assert found.why == "no candidate is significantly faster"
    assert row(found).verdict == "slower"


def test_eager_wins_when_no_candidate_is_left(run_race, monkeypatch):
    monkeypatch.setattr(Behaviour, "compile", raising(RuntimeError()))
    found = run_race(backends=("faulty",))
    assert (found.winner, found.why) == (MODEL, "no candidate could be used")


@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_a_candidate_that_breaks_after_it_was_timed_does_not_win(run_race, monkeypatch, fault):
    timed = []

    def behave(number, inputs, right):
        if not timed:
            return right
        if fault == "raises":
            raise RuntimeError("worn out")
        return [right[0] + 1]

    monkeypatch.setattr(Behaviour, "run", behave)
    fast_timings(monkeypatch)
    measured = race_module.measure
    monkeypatch.setattr(race_module, "measure", lambda *a, **k: (measured(*a, **k), timed.append(1))[0])
    found = run_race()
    assert row(found).status == "wrong"
    assert row(found).reason.startswith("after timing: ")
    assert_goes_on(found)


def test_the_second_wins_when_the_first_breaks(run_race, monkeypatch):
    def measured(calls, inputs, **_):
        pace = {"eager": 4.0, "eager + passes": 2.0, "faulty": 1.0}
        return {name: Timing((pace[name],) * 7) for name in calls}

    monkeypatch.setattr(race_module, "measure", measured)
    monkeypatch.setattr(Behaviour, "run", lambda n, i, right: right if n <= 6 else [right[0] + 1])
    assert run_race().winner == "eager"


def test_a_candidate_whose_speed_is_undecided_does_not_win(run_race, monkeypatch):
    timings(monkeypatch, eager=STEADY, faulty=UNCLEAR)
    found = run_race(("faulty",))
    assert (found.winner, row(found).verdict) == (MODEL, "undecided")
    assert found.why == "no candidate is significantly faster; undecided: faulty"
    assert row(found).reason.startswith("the times vary too much: 1.33 to 1333")


def test_two_candidates_that_are_undecided_leave_eager(run_race, monkeypatch):
    timings(monkeypatch, eager=STEADY, faulty=UNCLEAR, null=UNCLEAR, TorchScript=UNCLEAR)
    found = run_race(("faulty", "torchscript"))
    assert found.winner == MODEL
    assert found.why.endswith("undecided: faulty, TorchScript")


def test_a_candidate_that_is_faster_wins_although_a_faster_one_is_undecided(run_race, monkeypatch):
    timings(monkeypatch, eager=STEADY, faulty=UNCLEAR, TorchScript=(2.0,) * 12)
    assert run_race(("faulty", "torchscript")).winner == "torchscript"


def test_the_final_check_uses_inputs_that_the_race_did_not(run_race, monkeypatch):
    seen: list[list[float]] = []
    monkeypatch.setattr(Behaviour, "run", lambda n, i, right: seen.append(i[0].reshape(-1).tolist()) or right)
    fast_timings(monkeypatch)
    run_race()
    before, after = seen[:36], seen[36:]
    assert any(value not in before for value in after)


def test_the_null_backend_never_wins_however_fast(run_race):
    found = run_race(backends=("null",))
    assert row(found, "null").status != "ok"
    assert found.winner == MODEL


def drops_nan(calls, inputs, right):
    return [value.nan_to_num(0.0) for value in right]


def test_what_differs_on_nan_is_noted_in_the_row_and_by_the_winner(run_race, monkeypatch):
    monkeypatch.setattr(Behaviour, "run", staticmethod(drops_nan))
    fast_timings(monkeypatch)
    found = run_race()
    assert found.winner == "faulty"
    (note,) = row(found).notes
    assert "NaN at different positions than in eager" in note
    assert found.executable.notes == (note,)  # which is what a bundle's manifest says


def test_what_differs_on_nan_costs_the_race_where_that_was_asked_for(run_race, monkeypatch):
    monkeypatch.setattr(Behaviour, "run", staticmethod(drops_nan))
    fast_timings(monkeypatch)
    found = run_race(strict_specials=True)
    assert row(found).status == "wrong"
    assert_goes_on(found)
