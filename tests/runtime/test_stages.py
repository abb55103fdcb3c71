from __future__ import annotations

import pytest

import tsopt
from tsopt.runtime import stages
from tsopt.runtime.stages import STAGES, Stages, stage_of, step_of


class Clock:
    def __init__(self) -> None:
        self.now = 10.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(stages, "time", made)
    return made


def test_time_goes_to_the_stage_that_is_on_also_if_it_comes_again(clock):
    told = Stages()
    for text, seconds in (("capture", 1.0), ("pass fold", 2.0), ("pass cse", 3.0), ("eager", 0.5), ("pass fold", 1.0)):
        told.step(text)
        clock.now += seconds
    assert told.spent() == (("capture", 1.0), ("passes", 6.0), ("eager", 0.5))
    clock.now += 1.0
    assert dict(told.spent())["passes"] == 7.0


def test_before_the_first_step_nothing_has_been_spent(clock):
    clock.now += 5
    assert Stages().spent() == ()


def test_a_setting_of_a_sweep_stays_in_front():
    assert stage_of("cpu, 1 thread, batch 1: time: round 3, 4 s left") == "cpu, 1 thread, batch 1: timing"
    assert stage_of("import torch") == "import torch"


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("compile ONNX Runtime (3 of 6)", "ONNX Runtime (3 of 6)"),
        ("capture", ""),
        ("time: round 3, 4 s left", "round 3, 4 s left"),
        ("cpu, 1 thread, batch 1: time: round 3", "round 3"),
        ("import torch", ""),
    ],
)
def test_what_is_being_done_in_a_stage(text, step):
    assert step_of(text) == step


def test_every_step_of_optimize_belongs_to_a_stage(mlp, mlp_input):
    told: list[str] = []
    options = {"backends": ("eager", "torchscript"), "seconds": 0.02, "progress": told.append}
    fast = tsopt.optimize(mlp, [mlp_input, mlp_input[:1]], **options)
    assert {stage_of(text) for text in told} <= set(STAGES.values())
    spent = dict(fast.report.stages)
    assert {"capture", "other sizes", "passes", "eager", "compile", "timing"} <= spent.keys()
    assert all(seconds >= 0 for seconds in spent.values())
    assert fast.report.to_json()["stages"] == dict(fast.report.stages)
