"""A race as a whole: what it leaves as it was, what it times, and what it tells."""

from __future__ import annotations

import pytest
import torch

import tsopt
from tests.runtime.helpers import Counter, candidates
from tests.runtime.racing.helpers import STEADY, UNCLEAR, Behaviour, fast_timings, timings
from tsopt.compiler.calls.example import Example
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.racing import race as race_module
from tsopt.runtime.racing.contenders import Clock, RaceSettings
from tsopt.runtime.racing.race import benchmark, race


def test_what_decides_nothing_is_timed_for_longer_within_the_budget(run_race, monkeypatch):
    seen = timings(monkeypatch, eager=STEADY, faulty=STEADY)
    run_race(("faulty",))
    assert seen[0]["seconds"] == seen[0]["extra"] == 1e-3
    monkeypatch.setattr(Clock, "left", 1.5e-3)
    run_race(("faulty",), budget=9.0)
    assert seen[1]["extra"] == pytest.approx(0.5e-3)


def test_a_part_of_the_budget_is_kept_for_the_rounds(run_race, monkeypatch):
    prepared = []
    prepare = race_module.prepare

    def noted(maker, judge, clock, *rest):
        prepared.append(clock.left)
        return prepare(maker, judge, clock, *rest)

    monkeypatch.setattr(race_module, "prepare", noted)
    run_race(("faulty",), budget=9000.0)
    assert 5900 < prepared[0] <= 6000
    run_race(("faulty",))
    assert prepared[1] == float("inf")


def test_benchmark_shows_what_is_undecided(mlp, mlp_input, monkeypatch):
    timings(monkeypatch, eager=STEADY, twice=UNCLEAR)
    found = benchmark(mlp, {"twice": mlp}, mlp_input)
    assert found.row("twice").verdict == "undecided"
    assert "undecided" in str(found)


def test_a_backend_that_changes_threads_and_rng_does_not_leave_them_changed(run_race, monkeypatch):
    threads, rng, dtype = torch.get_num_threads(), torch.get_rng_state(), torch.get_default_dtype()

    def spoil(*args):
        torch.set_num_threads(threads + 1)
        torch.manual_seed(99)
        torch.rand(3)
        torch.set_default_dtype(torch.float64)

    monkeypatch.setattr(Behaviour, "compile", spoil)
    try:
        run_race()
        assert torch.get_default_dtype() == dtype
        assert torch.get_num_threads() == threads
        assert torch.equal(torch.get_rng_state(), rng)
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)


def test_the_models_state_is_as_it_was_after_a_race():
    model, example = Counter(), torch.zeros(2)
    captured = tsopt.capture(model, example)
    race(
        model,
        captured,
        {"fp32": captured},
        Example((example,)),
        RaceSettings(candidates=candidates("eager", "torchscript"), seconds=1e-3),
    )
    assert model.count.tolist() == [0, 0]


def test_progress_names_the_steps(run_race):
    told: list[str] = []
    run_race(backends=("eager",), progress=told.append)
    assert told[:4] == ["eager", "compile eager + passes (1 of 1)", "first calls", "check eager + passes"]


def test_benchmark_times_callables_beside_the_model(mlp, mlp_input, monkeypatch):
    timings(monkeypatch, eager=STEADY, twice=[2 * sample for sample in STEADY])
    found = benchmark(mlp, {"twice": lambda x: mlp(mlp(x)[:, :1].expand(2, 6))}, mlp_input, seconds=1e-3)
    assert [row.name for row in found.rows] == ["eager", "twice"]
    assert found.row("eager").verdict == "baseline"
    assert (found.row("twice").speedup.ratio, found.row("twice").verdict) == (0.5, "slower")
    assert "twice" in str(found)
    assert str(found).splitlines()[0].startswith("candidate")


def test_benchmark_leaves_weights_that_the_model_writes_alone():
    model = torch.nn.Embedding(4, 2, max_norm=0.1).eval()
    before = model.weight.detach().clone()
    benchmark(model, {}, torch.tensor([0, 1, 2]), seconds=1e-3)
    assert torch.equal(model.weight, before)


def test_the_winner_is_told_as_it_was_asked_for(run_race, monkeypatch):
    fast_timings(monkeypatch)
    assert run_race().candidate == Candidate("faulty")
    fast_timings(monkeypatch, wins="eager")
    assert run_race().candidate is None


def test_it_is_timed_on_inputs_that_the_model_takes():
    def picky(x):
        if not torch.equal(x, torch.arange(4.0)):
            raise ValueError("not my input")
        return x * 2

    fast = tsopt.optimize(picky, torch.arange(4.0), seconds=0.02, backends=("eager",), isolate=False, cache=False)
    assert [row.status for row in fast.report.rows] == ["ok", "ok"]
    found = benchmark(picky, {"same": picky}, torch.arange(4.0), seconds=0.02)
    assert found.row("same").status == "ok"


@pytest.mark.parametrize("on", [False, True])
def test_a_model_that_asks_for_inference_mode_is_timed_in_the_mode_of_its_example(on):
    def model(x):
        return x * 3 if torch.is_inference_mode_enabled() else x + 1

    with torch.inference_mode(on):
        options = {"backends": ("torchscript",), "seconds": 0.05, "isolate": False, "cache": False}
        report = tsopt.optimize(model, torch.ones(4), **options).report
    row = next(row for row in report.rows if row.name == "TorchScript")
    assert row.status == "ok", row.reason


def test_memory_is_given_back_after_eager_and_after_each_check(run_race, monkeypatch):
    steps = []
    for module in ("race", "preparation"):
        monkeypatch.setattr(f"tsopt.runtime.racing.{module}.give_back_memory", lambda: steps.append("give back"))
    run_race(backends=("eager", "torchscript"), progress=lambda text: steps.append(text.partition(" ")[0]))
    steps = [step for step in steps if step in ("eager", "check", "compile", "give back")]
    assert steps[:2] == ["eager", "give back"]
    checks = [number for number, step in enumerate(steps) if step == "check"]
    assert len(checks) == 2
    assert all(steps[number + 1] == "give back" for number in checks)
