"""Candidates for many sizes are timed on calls with sizes that they have not seen, and that counts as much."""

from __future__ import annotations

import pytest
import torch

import tsopt
from tsopt.compiler.calls.example import Example
from tsopt.runtime.checking.inputs import InputSet
from tsopt.runtime.racing import loops, new_sizes
from tsopt.runtime.racing import race as race_module
from tsopt.runtime.racing.contenders import Clock
from tsopt.runtime.racing.new_sizes import time_at_new_sizes
from tsopt.runtime.racing.row import MODEL, NEW_SIZES
from tsopt.runtime.racing.speedup import Timing
from tsopt.runtime.sandbox.isolated import CandidateDied


@pytest.fixture
def raced(raced, monkeypatch, torch_threads):
    torch_threads(1)  # no other loop is timed
    monkeypatch.setattr(new_sizes, "NEW_SIZES", 16)
    return raced


def test_candidates_for_many_sizes_are_timed_on_sizes_that_they_have_not_seen(raced):
    fast = raced(9, 12)
    assert fast.backend == "onnxruntime"
    (sizes,) = raced.seen
    assert len(set(sizes)) == len(sizes) >= 6
    assert not {9, 1, 2, 7, 24} & {*sizes}, "candidates have been judged there"
    assert fast.report.why.startswith("2.00x [2.00, 2.00] as fast as eager, 2.00x [2.00, 2.00] when each call has new")
    assert "when each call has new sizes: 1.33x [1.33, 1.33] as fast as eager" in str(fast.report)
    rows = {row["name"]: row for row in fast.report.to_json()["rows"]}
    (loop,) = rows["TorchScript"]["loops"]
    assert (loop["when"], loop["speedup"]["ratio"]) == (NEW_SIZES, pytest.approx(4 / 3))
    assert "loops" not in rows["eager"]


def test_one_that_is_slower_there_does_not_win(raced):
    raced.others["onnxruntime"] = 2.0 / 0.7
    fast = raced(9, 12)
    assert fast.backend == "torchscript"
    row = fast.report.row("ONNX Runtime")
    assert row.verdict == "slower"
    assert row.reason == "after timing: 0.70x as fast as eager when each call has new sizes"
    raced.others["torchscript"] = 2.0 / 0.9
    fast = raced(9, 12)
    assert fast.executable is None
    assert fast.report.why == "no candidate is significantly faster"


def test_one_that_is_as_fast_as_eager_where_sizes_repeat_may_win_with_new_ones(raced):
    raced.repeated["ONNX Runtime"], raced.repeated["TorchScript"] = 2.0, 1.9
    raced.others["torchscript"] = 1.95
    fast = raced(9, 12)
    assert fast.backend == "onnxruntime"
    assert fast.report.row("ONNX Runtime").verdict == "same"
    assert fast.report.winning.gain == pytest.approx(2**0.5)
    assert fast.report.why.endswith(
        "TorchScript is faster where the same calls repeat, but not when each call has new sizes (1.03x [1.03, 1.03])"
    )


def test_what_noise_may_have_made_with_new_sizes_does_not_choose(raced):
    raced.others["onnxruntime"] = Timing((1.0, 1.0, 1.0, 1.6, 1.6, 1.6, 1.6, 1.6))
    raced.others["torchscript"] = Timing((1.0,) * 8)
    assert raced(9, 12).backend == "onnxruntime"
    raced.others["onnxruntime"] = 1.4
    assert raced(9, 12).backend == "onnxruntime"  # 1.5 times as fast where sizes repeat, 1.4 times slower with new ones
    raced.others["onnxruntime"] = 1.6
    fast = raced(9, 12)
    assert fast.backend == "torchscript"
    assert "ONNX Runtime is faster where the same calls repeat" in fast.report.why


def test_what_eager_takes_with_new_sizes_does_not_hide_who_is_faster_there(raced):
    raced.others[MODEL] = Timing((2.0, 2.2, 3.0, 3.4, 4.0, 5.0, 6.0, 7.0))
    raced.others["torchscript"], raced.others["onnxruntime"] = 1.0, 1.6
    assert raced(9, 12).backend == "torchscript"


def test_one_that_is_slower_where_sizes_repeat_does_not(raced):
    raced.repeated["ONNX Runtime"], raced.repeated["TorchScript"] = 2.1, 2.1
    fast = raced(9, 12)
    assert fast.executable is None
    assert raced.seen == []


def test_one_whose_gain_with_new_sizes_is_noise_does_not(raced):
    raced.repeated["ONNX Runtime"] = raced.repeated["TorchScript"] = 2.0
    raced.others["onnxruntime"] = Timing((1.0, 1.0, 1.0, 1.0, 4.0, 4.0, 4.0, 1.0))
    raced.others["torchscript"] = 2.0
    assert raced(9, 12).executable is None


def test_one_that_fails_there_is_out(raced):
    raced.others["onnxruntime"] = Timing((), error="RuntimeError: no kernel")
    fast = raced(9, 12)
    assert fast.backend == "torchscript"
    row = fast.report.row("ONNX Runtime")
    assert (row.status, row.reason) == ("failed", "when each call has new sizes: RuntimeError: no kernel")


@pytest.mark.usefixtures("once_as_shipped")
def test_one_that_has_left_the_rounds_is_timed_as_well(raced, monkeypatch):
    monkeypatch.setattr(loops, "time_at_new_sizes", time_at_new_sizes)
    row = raced(9, 12, isolate=True).report.row("TorchScript")
    assert row.status in ("ok", "slower")
    assert [loop.when for loop in row.loops] == [NEW_SIZES]


def test_where_calls_take_long_new_sizes_are_nothing(raced, monkeypatch):
    monkeypatch.setattr(race_module, "SHORT_CALL", 0.0)
    raced.others["onnxruntime"] = 4.0
    assert raced(9, 12).backend == "onnxruntime"
    assert raced.seen == []


def test_nobody_wins_who_loses_there_because_the_budget_is_used_up(raced, monkeypatch):
    raced.others["onnxruntime"] = raced.others["torchscript"] = 4.0
    measured = race_module.measure

    def used_up(*args, **options):
        monkeypatch.setattr(Clock, "left", 0.0)
        return measured(*args, **options)

    monkeypatch.setattr(race_module, "measure", used_up)
    assert raced(9, 12, budget=600.0).executable is None


def test_one_whose_speed_is_unclear_where_sizes_repeat_does_not_win(raced, monkeypatch):
    unclear = Timing((1.5, 3.5, 1.5, 3.5, 1.5, 3.5, 1.5, 3.5))
    monkeypatch.setattr(
        race_module,
        "measure",
        lambda calls, *_, **__: {name: unclear if name == "ONNX Runtime" else Timing((2.0,) * 8) for name in calls},
    )
    raced.others["onnxruntime"], raced.others["torchscript"] = 0.1, 2.0
    fast = raced(9, 12)
    assert fast.report.row("ONNX Runtime").verdict == "undecided"
    assert fast.executable is None


def test_few_sizes_are_soon_all_known(raced):
    raced.others["onnxruntime"] = 4.0
    model = torch.nn.Linear(4, 2).eval()
    options = {"backends": ("onnxruntime",), "seconds": 0.05, "isolate": False, "cache": False}
    fast = tsopt.optimize(model, torch.randn(3, 4), dynamic={"input": {0: "batch[1..4]"}}, **options)
    assert fast.backend == "onnxruntime"
    assert raced.seen == []


def test_the_race_is_kept_with_what_was_measured_there(raced, tmp_path, monkeypatch):
    raced.repeated["ONNX Runtime"] = 2.0
    monkeypatch.setenv("TSOPT_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    assert raced(9, 12, cache=True).backend == "onnxruntime"
    torch.manual_seed(0)
    again = raced(9, 12, cache=True).report
    assert again.cached
    (loop,) = again.row("ONNX Runtime").loops
    assert (loop.when, loop.speedup.ratio, loop.timing.p50) == (NEW_SIZES, 2.0, 1.0)


@pytest.fixture
def on_a_clock(monkeypatch):
    """`time_at_new_sizes` in blocks of two, of callables that take so many times their argument; and all calls.

    Before every block, the largest is called once.
    """
    now, made = [0.0], []
    monkeypatch.setattr("tsopt.runtime.racing.timing.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(new_sizes, "rest", lambda: made.append("rest"))
    monkeypatch.setattr(new_sizes, "IN_A_ROW", 2)
    monkeypatch.setattr(new_sizes, "SETTLES", 1)

    def takes(name, factor, *refused):
        def call(seconds):
            value = float(seconds.sum())
            made.append((name, value))
            now[0] += factor * value
            if value in refused:
                raise ValueError("no kernel")
            seconds += 1  # for itself alone

        return call

    def timed(seconds, **of_each):
        calls = {name: takes(name, *limits) for name, limits in of_each.items()}
        inputs = [InputSet("other sizes", Example((torch.ones(value),))) for value in seconds]
        return time_at_new_sizes(calls, inputs), made

    return timed


def test_calls_are_made_in_blocks_and_take_turns(on_a_clock):
    found, made = on_a_clock([2, 3, 9, 4, 5, 6, 7, 8], model=(2.0,), engine=(1.0,), other=(3.0,))
    assert found["model"].samples == pytest.approx([2e3 * value for value in range(2, 9)])
    assert found["engine"].samples == pytest.approx([1e3 * value for value in range(2, 9)])
    assert made.pop(0) == ("model", 9.0), "whether the model takes the largest one"
    assert made[:9] == [
        *(("model", 9.0), ("model", 2.0), ("model", 3.0), "rest"),
        *(("engine", 9.0), ("engine", 2.0), ("engine", 3.0), "rest", ("other", 9.0)),
    ]
    order = [item[0] for item in made if item != "rest" and item[1] == 9.0]
    assert order[:6] == ["model", "engine", "other", "other", "engine", "model"]
    assert {order[first] for first in range(0, 12, 3)} == {"model", "engine", "other"}, "who comes first changes"


def test_one_that_raises_is_not_called_again(on_a_clock):
    found, made = on_a_clock(range(2, 10), model=(2.0,), engine=(1.0, 5))
    assert found["engine"].error == "ValueError: no kernel"
    assert found["engine"].samples == pytest.approx((2e3, 3e3))
    assert found["model"].samples == pytest.approx([2e3 * value for value in range(2, 9)])
    assert [item for item in made if item[0] == "engine"][-1] == ("engine", 5.0)


def test_one_whose_process_ends_is_told_from_one_that_raises(on_a_clock, monkeypatch):
    def timed(call, inputs, times, untimed=0, samples=1, wait=None):
        if call is engine:
            raise CandidateDied("crashed", "ONNX Runtime is gone")
        return [1.0] * samples

    def engine():
        pass

    monkeypatch.setattr(new_sizes, "seconds_of_calls", timed)
    inputs = [InputSet("other sizes", Example((torch.ones(value),))) for value in range(8)]
    found = time_at_new_sizes({"model": print, "engine": engine}, inputs)
    assert (found["engine"].ending, found["engine"].samples) == ("crashed", ())


def test_what_the_model_does_not_take_is_left_out(on_a_clock):
    sizes = [2, 3, 50, 4, 5, 6, 7, 8, 60]
    found, made = on_a_clock(sizes, model=(2.0, 50), engine=(1.0,))
    assert found["engine"].samples == pytest.approx((2e3, 3e3, 5e3, 6e3, 7e3, 8e3))
    assert ("engine", 4.0) in made, "who comes first cannot know"
    assert on_a_clock(sizes, model=(2.0, 50, 8), engine=(1.0,))[0] == {}, "four calls are too few"


def test_the_largest_that_the_model_takes_comes_first(on_a_clock):
    found, made = on_a_clock([*range(2, 9), 50, 60], model=(2.0, 60), engine=(1.0,))
    assert found["engine"].samples == pytest.approx([1e3 * value for value in range(2, 9)])
    assert [item for item in made if item == ("engine", 60.0)] == []
    assert [item[1] for item in made if item[0] == "engine"][::3] == [50.0] * 4
    assert on_a_clock([3, 4], model=(2.0, 3, 4), engine=(1.0,))[0] == {}
