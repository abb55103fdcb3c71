"""Candidates for many sizes are timed on calls with sizes that they have not seen, and that counts as much."""

from __future__ import annotations

import pytest
import torch

import tsopt
from tsopt.compiler.calls.example import Example
from tsopt.runtime.checking.inputs import InputSet
from tsopt.runtime.racing import new_sizes
from tsopt.runtime.racing import race as race_module
from tsopt.runtime.racing.new_sizes import time_at_new_sizes
from tsopt.runtime.racing.speedup import Timing
from tsopt.runtime.report import MODEL


@pytest.fixture
def raced(monkeypatch):
    """A race of two engines for many sizes: how long each takes with sizes that repeat, and with others."""
    repeated = {"eager": 2.0, "ONNX Runtime": 1.0, "TorchScript": 1.5}
    others = {MODEL: 2.0, "onnxruntime": 1.0, "torchscript": 1.5}
    seen = []

    def measured(calls, inputs, *, out, **_):
        for name in calls:
            if repeated[name] > min(repeated.values()):
                out(name)
        return {name: Timing((repeated[name],) * 8) for name in calls}

    def timed(calls, example, inputs, wait):
        seen.append([len(item.example.args[0]) for item in inputs])
        return {key: others[key] if isinstance(others[key], Timing) else Timing((others[key],) * 8) for key in calls}

    monkeypatch.setattr(race_module, "measure", measured)
    monkeypatch.setattr(race_module, "time_at_new_sizes", timed)
    monkeypatch.setattr(new_sizes, "NEW_SIZES", 16)

    def optimized(*sizes, **options):
        model = torch.nn.Linear(4, 2).eval()
        options = {"seconds": 0.05, "isolate": False, "cache": False, **options}
        return tsopt.optimize(
            model, [torch.randn(size, 4) for size in sizes], backends=("onnxruntime", "torchscript"), **options
        )

    optimized.repeated, optimized.others, optimized.seen = repeated, others, seen
    return optimized


def test_candidates_for_many_sizes_are_timed_on_sizes_that_they_have_not_seen(raced):
    fast = raced(9, 12)
    assert fast.backend == "onnxruntime"
    (sizes,) = raced.seen
    assert len(set(sizes)) == len(sizes) >= 6
    assert 9 not in sizes
    assert fast.report.why.startswith("2.00x [2.00, 2.00] as fast as eager, 2.00x [2.00, 2.00] when each call has new")
    assert "calls with new sizes: 1.33x [1.33, 1.33] as fast as eager" in str(fast.report)
    rows = {row["name"]: row for row in fast.report.to_json()["rows"]}
    assert rows["TorchScript"]["speedup_at_new_sizes"]["ratio"] == pytest.approx(4 / 3)
    assert "speedup_at_new_sizes" not in rows["eager"]


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
        "TorchScript is faster where sizes repeat, but not with new ones (1.03x [1.03, 1.03])"
    )


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
    assert (row.status, row.reason) == ("failed", "at new sizes: RuntimeError: no kernel")


@pytest.mark.usefixtures("once_as_shipped")
def test_one_that_has_left_the_rounds_is_timed_as_well(raced, monkeypatch):
    monkeypatch.setattr(race_module, "time_at_new_sizes", time_at_new_sizes)
    report = raced(9, 12, isolate=True).report
    assert all(row.new_sizes is not None for row in report.rows[1:] if row.status == "ok")
    assert any(row.new_sizes is not None for row in report.rows)


def test_sizes_that_the_model_does_not_take_together_are_left_out(raced):
    class Positions(torch.nn.Module):
        def forward(self, x, y):
            if x.shape[0] + y.shape[0] > 40:
                raise ValueError("no such position")
            return torch.cat([x, y]) * 2

    options = {"backends": ("onnxruntime",), "seconds": 0.05, "isolate": False, "cache": False}
    calls = [(torch.randn(n, 4), torch.randn(n + 3, 4)) for n in (15, 17)]
    assert tsopt.optimize(Positions().eval(), calls, **options).backend == "onnxruntime"
    assert raced.seen == [] or max(raced.seen[0]) < 40


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
    assert again.row("ONNX Runtime").new_sizes.ratio == 2.0


def test_calls_are_made_in_blocks_and_take_turns(monkeypatch):
    now, made = [0.0], []
    monkeypatch.setattr("tsopt.runtime.racing.timing.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(new_sizes, "rest", lambda: made.append("rest"))
    monkeypatch.setattr(new_sizes, "IN_A_ROW", 2)

    def takes(name, factor):
        def call(seconds):
            made.append((name, float(seconds)))
            now[0] += factor * float(seconds)
            if name == "broken" and float(seconds) == 5.0:
                raise ValueError("no kernel")
            seconds += 100  # for itself alone

        return call

    calls = {"model": takes("eager", 2.0), "engine": takes("engine", 1.0), "broken": takes("broken", 1.0)}
    inputs = [InputSet("other sizes", Example((torch.tensor(seconds),))) for seconds in (3.0, 4.0, 5.0)]
    found = time_at_new_sizes(calls, Example((torch.tensor(1.0),)), inputs)
    assert found["model"].samples == pytest.approx((6e3, 8e3, 10e3))
    assert found["engine"].samples == pytest.approx((3e3, 4e3, 5e3))
    assert (found["broken"].samples, found["broken"].error) == (pytest.approx((3e3, 4e3)), "ValueError: no kernel")
    order = [item if item == "rest" else item[0] for item in made if item == "rest" or item[1] > 1]
    assert order == [
        *("eager", "eager", "rest", "engine", "engine", "rest", "broken", "broken"),
        *("broken", "rest", "engine", "rest", "eager"),
    ]
