"""Faulty candidates of every kind: each costs itself a row with a reason, and the race goes on."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch

import tsopt
from tests.runtime.helpers import Counter, candidates
from tsopt.compiler.calls.example import Example
from tsopt.runtime.backends.backend import Unsupported
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.backends.table import BACKENDS, BackendInfo
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.racing import preparation
from tsopt.runtime.racing import race as race_module
from tsopt.runtime.racing.contenders import Clock, RaceSettings
from tsopt.runtime.racing.outcomes import NoCandidate
from tsopt.runtime.racing.race import benchmark, race
from tsopt.runtime.racing.speedup import Timing
from tsopt.runtime.report import MODEL
from tsopt.runtime.sandbox.isolated import CandidateDied


class Behaviour:
    """What the backend under test does; set by each test."""

    compile = None
    run = None
    refuses = False


@dataclass(frozen=True, slots=True)
class FaultyBackend:
    threads: int | None = None
    name: str = "faulty"

    def missing(self):
        return None

    def unsupported(self, program):
        return [Unsupported("fc1, model.py:12", "it is a Tuesday")] if Behaviour.refuses else []

    def compile(self, program):
        if Behaviour.compile is not None:
            Behaviour.compile()
        state = [program.state[item.name] for item in program.signature.state_inputs]
        forward = program.module().forward
        calls = []

        def run(inputs):
            calls.append(1)
            with torch.no_grad():
                right = list(forward(*inputs))
            return right if Behaviour.run is None else Behaviour.run(len(calls), inputs, right)

        return Executable(self.name, program.signature, run, state=state)


@pytest.fixture(autouse=True)
def _faulty(monkeypatch):
    monkeypatch.setitem(BACKENDS, "faulty", BackendInfo("faulty", f"{__name__}:FaultyBackend", "faulty"))
    for name in ("compile", "run"):
        monkeypatch.setattr(Behaviour, name, None)
    monkeypatch.setattr(Behaviour, "refuses", False)


@pytest.fixture
def run_race(mlp, mlp_input, mlp_program):
    def go(backends=("faulty", "eager"), sandbox=None, progress=None, **options):
        return race(
            mlp,
            mlp_program,
            {"fp32": mlp_program},
            Example((mlp_input,)),
            RaceSettings(candidates=candidates(*backends), seconds=1e-3, **options),
            sandbox=sandbox,
            progress=progress,
        )

    return go


def row(found, name="faulty"):
    return next(row for row in found.rows if row.name == name)


def raising(error):
    def act(*args):
        raise error

    return act


def assert_goes_on(found):
    assert found.winner != "faulty"
    assert found.winner != "faulty"
    assert row(found, "eager + passes").status == "ok"
    assert row(found, "eager").timing is not None


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
def test_a_wrong_candidate_costs_itself_alone(run_race, monkeypatch, name):
    behaviour, status, reason = WRONG[name]
    monkeypatch.setattr(Behaviour, "run", behaviour)
    found = run_race()
    assert row(found).status == status
    assert reason in row(found).reason
    assert row(found).timing is None
    assert_goes_on(found)


@pytest.mark.parametrize("call", [8, 10, 15])
def test_a_candidate_that_raises_while_it_is_timed_costs_itself_alone(run_race, monkeypatch, call):
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


def fast_timings(monkeypatch, wins="faulty"):
    """Timing decides as the test says, after having called everybody for long enough."""

    def measured(calls, inputs, **_):
        for call in calls.values():
            for example in inputs * 10:
                call(*example.args, **example.kwargs)
        jitter = (1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0)
        return {n: Timing(tuple(j * (1 if n == wins else 2) for j in jitter)) for n in calls}

    monkeypatch.setattr(race_module, "measure", measured)


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
        signs = {name: 1 - 2 * (i % 2) for i, name in enumerate(calls)}  # noise that does not hit all alike
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


def test_an_engine_that_is_missing_is_a_row_with_what_to_install(run_race, monkeypatch):
    monkeypatch.setattr(FaultyBackend, "missing", lambda self: "pip install faulty")
    found = run_race()
    assert row(found).status == "missing"
    assert row(found).reason == "pip install faulty"
    assert_goes_on(found)


def test_eager_wins_when_nobody_is_faster(run_race, monkeypatch):
    fast_timings(monkeypatch, wins="eager")
    found = run_race()
    assert (found.winner, found.executable) == (MODEL, None)
    assert found.why == "no candidate is significantly faster"
    assert row(found).verdict == "slower"


def test_eager_wins_when_nobody_is_left(run_race, monkeypatch):
    monkeypatch.setattr(Behaviour, "compile", raising(RuntimeError()))
    found = run_race(backends=("faulty",))
    assert (found.winner, found.why) == (MODEL, "no candidate could be used")


@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_a_candidate_that_breaks_after_it_was_timed_does_not_win(run_race, monkeypatch, fault):
    def behave(number, inputs, right):
        if number <= 48:  # eight first calls, ten of a verdict, thirty timed calls
            return right
        if fault == "raises":
            raise RuntimeError("worn out")
        return [right[0] + 1]

    monkeypatch.setattr(Behaviour, "run", behave)
    fast_timings(monkeypatch)
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


STOPS = {
    "out of memory": MemoryError(),
    "no room": OSError(28, "No space left on device"),
    "crashed": CandidateDied("crashed", "SIGSEGV"),
    "timed out": CandidateDied("timed out", "no answer"),
}


@pytest.mark.parametrize("name", STOPS)
@pytest.mark.parametrize("backends", [("faulty",), ("faulty", "null")], ids=["all of them", "but for one"])
def test_a_race_that_this_machine_has_stopped_is_a_warning(run_race, monkeypatch, name, backends):
    monkeypatch.setattr(Behaviour, "compile", raising(STOPS[name]))
    alone = len(backends) == 1
    with pytest.warns(NoCandidate, match="no candidate could be tried: faulty") if alone else nullcontext():
        found = run_race(backends)
    late = " within the time limit" if name == "timed out" else ""
    assert found.winner == MODEL
    assert found.why.startswith(f"no candidate could be {'tried' if alone else 'used'}{late}")


def test_a_race_that_is_not_the_last_word_does_not_warn(run_race, monkeypatch):
    monkeypatch.setattr(Behaviour, "compile", raising(MemoryError()))
    assert run_race(("faulty",), warn=False).why.startswith("no candidate could be tried")


@pytest.mark.parametrize("late", ["while it is timed", "after it was timed"])
def test_who_runs_out_of_memory_late_has_run_out_of_memory(run_race, monkeypatch, late):
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


def timings(monkeypatch, **samples):
    """Timing that gives these samples; nobody is called."""
    seen = []

    def measured(calls, inputs, **options):
        seen.append(options)
        return {name: Timing(tuple(samples[name.partition(" ")[0]])) for name in calls}

    monkeypatch.setattr(race_module, "measure", measured)
    return seen


STEADY = (4.0,) * 12
UNCLEAR = (0.003,) * 4 + (0.5,) * 4 + (3.0,) * 4  # a clock that stands still now and then


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


def test_what_decides_nothing_is_timed_for_longer_within_the_budget(run_race, monkeypatch):
    seen = timings(monkeypatch, eager=STEADY, faulty=STEADY)
    run_race(("faulty",))
    assert seen[0]["seconds"] == seen[0]["extra"] == 1e-3
    monkeypatch.setattr(Clock, "left", 1.5e-3)
    run_race(("faulty",), budget=9.0)
    assert seen[1]["extra"] == pytest.approx(0.5e-3)


def test_benchmark_shows_what_is_undecided(mlp, mlp_input, monkeypatch):
    timings(monkeypatch, eager=STEADY, twice=UNCLEAR)
    found = benchmark(mlp, {"twice": mlp}, mlp_input)
    assert found.row("twice").verdict == "undecided"
    assert "undecided" in str(found)


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


def test_the_cold_start_of_every_candidate_is_told(run_race):
    rows = {row.name: row for row in run_race(("eager", "onnxruntime")).rows}
    assert rows["eager"].cold is None
    assert all(rows[name].cold.first > 0 for name in ("eager + passes", "ONNX Runtime"))


def test_one_that_is_far_behind_is_not_checked(run_race, monkeypatch):
    monkeypatch.setattr(preparation, "HOPELESS", 4.0)
    monkeypatch.setattr(preparation, "seconds_of", lambda call, inputs: 1e-9)
    monkeypatch.setattr(preparation, "first_calls", lambda call, *_: [1.0 if call.backend == "faulty" else 1e-9])
    monkeypatch.setattr(race_module, "seconds_of", lambda *_: 2e-9)
    timed = []
    measured = race_module.measure
    monkeypatch.setattr(race_module, "measure", lambda calls, *a, **k: timed.extend(calls) or measured(calls, *a, **k))
    found = run_race()
    assert row(found).status == "not checked"
    assert row(found).reason == "about 1000000000.0 times slower than the best"
    assert timed == ["eager", "eager + passes"]


@pytest.mark.parametrize(("pace", "status"), [(1.4, "ok"), (1.6, "not checked")])
def test_of_long_calls_the_first_ones_tell_more(run_race, monkeypatch, pace, status):
    monkeypatch.setattr(preparation, "HOPELESS_IF_LONG", 1.5)
    monkeypatch.setattr(preparation, "first_calls", lambda call, *_: [pace if call.backend == "faulty" else 1.0])
    monkeypatch.setattr(race_module, "seconds_of", lambda *_: 1.0)
    assert row(run_race()).status == status


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


def test_one_that_measures_while_it_compiles_does_so_when_the_others_are_done(run_race, monkeypatch):
    told: list[str] = []
    run_race(progress=told.append)
    assert [text.split()[1] for text in told if text.startswith("compile")] == ["faulty", "eager"]
    entry = BackendInfo("faulty", f"{__name__}:FaultyBackend", "faulty", measures=True)
    monkeypatch.setitem(BACKENDS, "faulty", entry)
    told.clear()
    run_race(progress=told.append)
    assert [text.split()[1] for text in told if text.startswith("compile")] == ["eager", "faulty"]


def test_progress_names_the_steps(run_race):
    told: list[str] = []
    run_race(backends=("eager",), progress=told.append)
    assert told[:4] == ["eager", "compile eager + passes (1 of 1)", "first calls", "check eager + passes"]


# ---- benchmark ----------------------------------------------------------------------------------------------


def test_benchmark_times_callables_beside_the_model(mlp, mlp_input):
    found = benchmark(mlp, {"twice": lambda x: mlp(mlp(x)[:, :1].expand(2, 6))}, mlp_input, seconds=1e-3)
    assert [row.name for row in found.rows] == ["eager", "twice"]
    assert found.row("eager").verdict == "baseline"
    assert found.row("twice").speedup.ratio < 1
    assert "twice" in str(found)
    assert str(found).splitlines()[0].startswith("candidate")


def test_benchmark_leaves_weights_that_the_model_writes_alone():
    model = torch.nn.Embedding(4, 2, max_norm=0.1).eval()
    before = model.weight.detach().clone()
    benchmark(model, {}, torch.tensor([0, 1, 2]), seconds=1e-3)
    assert torch.equal(model.weight, before)


@pytest.fixture
def torch_threads():
    """Sets torch's number of threads for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


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


@pytest.mark.parametrize("on", [False, True])
def test_a_model_that_asks_for_inference_mode_is_timed_in_the_mode_of_its_example(on):
    def model(x):
        return x * 3 if torch.is_inference_mode_enabled() else x + 1

    with torch.inference_mode(on):
        options = {"backends": ("torchscript",), "seconds": 0.05, "isolate": False, "cache": False}
        report = tsopt.optimize(model, torch.ones(4), **options).report
    row = next(row for row in report.rows if row.name == "TorchScript")
    assert row.status == "ok", row.reason
