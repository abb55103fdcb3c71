"""Candidates are timed in a loop in which torch computes on all threads between calls, and that counts as much."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tsopt.compiler.calls.example import Example
from tsopt.runtime.racing import between_ops, loops, new_sizes, timing
from tsopt.runtime.racing import race as race_module
from tsopt.runtime.racing.between_ops import time_between_ops
from tsopt.runtime.racing.row import BETWEEN_OPS, MODEL
from tsopt.runtime.racing.speedup import Timing


@pytest.fixture
def raced(raced, torch_threads):
    torch_threads(2)
    return raced


def test_one_that_is_slower_than_eager_there_does_not_win(raced):
    raced.others["onnxruntime"] = 2.5
    fast = raced(9)
    assert fast.backend == "torchscript"
    row = fast.report.row("ONNX Runtime")
    assert (row.verdict, row.reason) == (
        "slower",
        "after timing: 0.80x as fast as eager when torch computes between calls",
    )
    assert fast.report.why.startswith(
        "1.33x [1.33, 1.33] as fast as eager, 1.33x [1.33, 1.33] when torch computes between"
    )
    assert "when torch computes between calls: 1.33x [1.33, 1.33] as fast as eager" in str(fast.report)


def test_one_that_is_slower_there_within_noise_does(raced):
    raced.others["onnxruntime"] = Timing((1.9, 1.9, 2.02, 2.02, 2.02, 2.02, 1.9, 2.3))
    raced.others["torchscript"] = 2.0
    assert raced(9).backend == "onnxruntime"
    raced.others["onnxruntime"] = Timing((1.9, 1.9, 2.1, 2.1, 2.1, 2.1, 1.9, 2.3))
    assert raced(9).backend == "torchscript", "by more than what is level"


def test_what_is_lost_there_may_be_more_than_what_is_gained_in_the_rounds(raced):
    raced.others["onnxruntime"], raced.others["torchscript"] = 1.6, 1.0
    fast = raced(9)
    assert fast.backend == "torchscript"
    said = "ONNX Runtime is faster where the same calls repeat, but not when torch computes between calls (1.25x"
    assert said in fast.report.why


def test_torch_on_one_thread_is_in_nobodys_way(raced, torch_threads):
    torch_threads(1)
    raced.others["onnxruntime"] = 2.5
    assert raced(9).backend == "onnxruntime"
    assert raced.seen == []


@pytest.mark.usefixtures("once_as_shipped")
def test_candidates_in_processes_of_their_own_are_timed_there(raced, monkeypatch):
    monkeypatch.setattr(between_ops, "TURNS", 3)
    monkeypatch.setattr(loops, "time_between_ops", time_between_ops)
    row = raced(9, isolate=True).report.row("ONNX Runtime")
    assert [(loop.when, len(loop.timing.samples)) for loop in row.loops] == [(BETWEEN_OPS, 6)]


@pytest.fixture
def timed(clock, monkeypatch):
    """`time_between_ops` of callables that take so many seconds, and operations that take one; with what was done."""
    done = []

    class Numbers:
        def mul_(self, factor):
            done.append("op")
            clock.now += 1.0

    monkeypatch.setattr(
        timing, "torch", SimpleNamespace(ones=lambda size, **_: Numbers(), float32=torch.float32, no_grad=torch.no_grad)
    )
    monkeypatch.setattr(between_ops, "rest", lambda: done.append("rest"))
    monkeypatch.setattr(between_ops, "TURNS", 2)

    def made(**calls):
        def call(name):
            def run(x):
                done.append(name)
                clock.now += calls[name]
                if name == "fails":
                    raise ValueError("no kernel")

            return run

        found = time_between_ops({name: call(name) for name in calls}, [Example((torch.zeros(2),))])
        return found, done

    return made


def test_an_operation_follows_each_call_and_counts(timed):
    found, done = timed(model=2.0, engine=0.5)
    assert found == {"model": Timing((3000.0,) * 4), "engine": Timing((1500.0,) * 4)}
    turn = {name: [name, "op"] * 3 for name in ("model", "engine")}  # one of them untimed
    first = ["model", "op"] * 4  # how long they take, about
    assert done == [*first, *turn["model"], "rest", *turn["engine"], *turn["engine"], "rest", *turn["model"]]


def test_short_calls_are_timed_together(timed, monkeypatch):
    monkeypatch.setattr(between_ops, "SAMPLE", 15.0)
    monkeypatch.setattr(between_ops, "SETTLE", 30.0)
    found, done = timed(model=2.0)
    assert found["model"].samples == pytest.approx((3000.0,) * 4)
    assert done.count("model") == done.count("op") == 4 + 2 * (10 + 2 * 5), "an operation takes its time as well"


def test_one_that_raises_is_not_called_again_and_the_model_does_not_raise(timed):
    found, done = timed(model=2.0, fails=1.0)
    assert (found["fails"].samples, found["fails"].error) == ((), "ValueError: no kernel")
    assert done.count("fails") == 1
    with pytest.raises(ValueError, match="no kernel"):
        timed(fails=1.0)


def test_one_that_raises_there_is_out(raced):
    raced.others["onnxruntime"] = Timing((), error="ValueError: no kernel")
    row = raced(9).report.row("ONNX Runtime")
    assert (row.status, row.reason) == ("failed", "when torch computes between calls: ValueError: no kernel")


def test_one_that_is_as_fast_as_eager_in_the_rounds_may_win_there(raced):
    raced.repeated["ONNX Runtime"], raced.repeated["TorchScript"] = 2.0, 1.9
    raced.others["torchscript"] = 1.95
    fast = raced(9)
    assert fast.backend == "onnxruntime"
    assert fast.report.winning.gain == pytest.approx(2**0.5)


def test_one_that_loses_with_new_sizes_is_not_timed_there(raced, monkeypatch):
    monkeypatch.setattr(new_sizes, "NEW_SIZES", 16)
    asked = []

    def at_new_sizes(calls, *_):
        return {key: Timing((4.0 if key == "onnxruntime" else 2.0,) * 8) for key in calls}

    def between(calls, *_):
        asked.append([*calls])
        return {key: Timing((2.0,) * 8) for key in calls}

    monkeypatch.setattr(loops, "time_at_new_sizes", at_new_sizes)
    monkeypatch.setattr(loops, "time_between_ops", between)
    raced(9, 12)
    assert asked == [[MODEL, "torchscript"]]


def test_long_calls_are_not(raced, monkeypatch):
    monkeypatch.setattr(race_module, "SHORT_CALL", 0.0)
    raced(9)
    assert raced.seen == []
