"""What eager does in a call, and what its time, and that of fixed layers, say about the machine."""

from __future__ import annotations

import cProfile
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import tsopt
from tests.regression.models import OPTIONS, Net, X
from tests.runtime.racing.helpers import fast_timings
from tsopt.regression import sessions
from tsopt.regression.baseline import read_baseline
from tsopt.regression.machine_state import FixedLayers
from tsopt.regression.yardstick import EagerWork
from tsopt.runtime.racing.row import EAGER


class Busy(Net):
    """Does more in Python than it computes."""

    def forward(self, x):
        for _ in range(10):
            len([])
        return super().forward(x)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * self.calls


def work(model):
    return EagerWork.of(model.eval(), tsopt.example(X), [])


def test_what_is_counted():
    found, more = work(Net()), work(Net(layers=3))
    assert (found.macs, more.macs) == (32, 48)
    assert more.ops - found.ops == found.ops // 2 > 0
    assert more.functions > found.functions > 2
    assert work(Net()) == found


def test_functions_of_python_and_c_are_counted():
    found, busy = work(Net()), work(Busy())
    assert (busy.macs, busy.ops) == (found.macs, found.ops)
    assert busy.functions >= found.functions + 10


def test_the_model_is_left_as_it_was():
    model = Counts()
    EagerWork.of(model, tsopt.example(X), [model.calls])
    assert model.calls == 0
    assert sys.getprofile() is None


def test_beside_another_profiler_functions_are_not_counted():
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        found = work(Net())
        assert sys.getprofile() is not None
    finally:
        profiler.disable()
    assert (found.macs, found.functions) == (32, None)


def test_beside_a_bundle_only_macs_are_needed():
    assert EagerWork.of(Net().eval(), tsopt.example(X), [], only_macs=True) == EagerWork(32)


@pytest.mark.parametrize(
    ("now", "eager", "layers", "verdict"),
    [
        (5.5, 10.0, 1.0, "slower"),
        (5.75, 11.0, 1.0, "slower"),  # other processes disturb eager, which hides a part of it
        (5.5, 11.5, 1.0, "undecided"),
        (5.0, 9.0, 1.0, "undecided"),  # they did for the baseline
        (5.5, 11.0, 1.1, "ok"),  # the machine takes longer for everything
        (7.5, 15.0, 1.0, "undecided"),  # for eager, and for what it waits for, but not for the layers
        (4.0, 9.0, 0.5, "undecided"),  # it is faster only for the layers
        (5.5, 10.0, 1.5, "undecided"),  # the layers would hide it
        (4.5, 9.0, 0.9, "ok"),
        (5.0, 9.0, None, "slower"),  # eager is the only yardstick then
    ],
)
def test_layers_that_are_always_the_same_are_a_second_yardstick(
    model, paces, monkeypatch, tmp_path, now, eager, layers, verdict
):
    fast_timings(monkeypatch, wins="TorchScript")
    paces(now=5.0, layers=1.0)
    tsopt.check(model, X, tmp_path / "b.json", update=True, **OPTIONS)
    assert len(read_baseline(tmp_path / "b.json").over_layers) == len(read_baseline(tmp_path / "b.json").speedups)
    paces(now=now, eager=eager, layers=layers)
    assert tsopt.check(model, X, tmp_path / "b.json", **OPTIONS).verdict == verdict


@pytest.mark.parametrize(
    ("change", "layers"),
    [({"machine": "another"}, 1.0), ({"versions": "torch 2.9.0"}, 1.0), ({"macs": 33}, 1.0), ({}, 20.0)],
)
def test_layers_are_no_yardstick_on_another_machine_with_other_versions_another_model_or_short_calls(
    model, paces, monkeypatch, tmp_path, change, layers
):
    fast_timings(monkeypatch, wins="TorchScript")
    paces(now=5.0, layers=layers)
    tsopt.check(model, X, tmp_path / "b.json", update=True, **OPTIONS)
    then = replace(read_baseline(tmp_path / "b.json"), **change)
    paces(now=5.0, layers=layers / 2)  # by which a call would be 1.4 times slower
    found = tsopt.check(model, X, then, **OPTIONS)
    assert found.slowdown.estimate == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize(
    ("now", "eager", "small", "verdict"),
    [
        (0.022, 0.04, 0.01, "slower"),
        (0.022, 0.044, 0.011, "ok"),  # the machine takes longer for everything
        (0.022, 0.0445, 0.01, "undecided"),  # than for the baseline in eager mode, but not for the layers
        (0.02, 0.036, 0.01, "undecided"),
        (0.022, 0.04, 0.014, "undecided"),  # the layers would hide it
        (0.022, 0.04, None, "slower"),  # eager is the only yardstick then
    ],
)
def test_short_calls_are_compared_with_small_layers(model, paces, monkeypatch, tmp_path, now, eager, small, verdict):
    fast_timings(monkeypatch, wins="TorchScript")
    paces(now=0.02, eager=0.04, layers=1.0, small=0.01)
    tsopt.check(model, X, tmp_path / "b.json", update=True, **OPTIONS)
    then = read_baseline(tmp_path / "b.json")
    assert then.are_short
    assert then.over_layers[0] == pytest.approx(0.5, rel=0.02)
    paces(now=now, eager=eager, layers=1.0, small=small)
    assert tsopt.check(model, X, then, **OPTIONS).verdict == verdict


def test_sessions_of_short_calls_are_short_once_they_are_warm(model, paces, monkeypatch, tmp_path):
    fast_timings(monkeypatch, wins="TorchScript")
    timed, seconds = paces(now=0.02, eager=0.04, small=0.01), []
    measure = sessions.measure
    monkeypatch.setattr(sessions, "measure", lambda *args, **known: seconds.append(known["seconds"]) or measure(*args))
    found = tsopt.check(model, X, tmp_path / "b.json", update=True, **OPTIONS)
    both = [[EAGER, sessions.NOW, sessions.SMALL]] * 2 * len(found.now.speedups)
    assert timed == [[EAGER, sessions.NOW], *both]  # it is known after the first one
    assert seconds == [sessions.SECONDS, *[sessions.WARM_UP, sessions.SECONDS_IF_SHORT] * len(found.now.speedups)]


def test_small_layers_are_no_yardstick_where_the_baseline_has_large_ones(model, paces, monkeypatch, tmp_path):
    fast_timings(monkeypatch, wins="TorchScript")
    paces(now=0.02, eager=0.04, small=0.01)
    tsopt.check(model, X, tmp_path / "b.json", update=True, **OPTIONS)
    then = replace(read_baseline(tmp_path / "b.json"), are_short=False)
    paces(now=0.02, eager=0.04, small=0.005)
    assert tsopt.check(model, X, then, **OPTIONS).slowdown.estimate == pytest.approx(0.0, abs=1e-3)


def test_short_calls_beside_a_bundle_are_compared_with_no_layers(model, paces, monkeypatch, tmp_path):
    fast_timings(monkeypatch, wins="TorchScript")
    tsopt.optimize(model, X, **OPTIONS).save(tmp_path / "before")
    timed = paces(now=0.02, eager=0.04, before=0.02, small=0.01)
    found = tsopt.check(model, X, tmp_path / "before", trust=True, **OPTIONS)
    assert timed == [[EAGER, sessions.NOW, sessions.BEFORE]] * len(found.now.speedups)


def test_one_session_without_the_time_of_the_layers_drops_all_of_them(model, paces, monkeypatch, tmp_path):
    fast_timings(monkeypatch, wins="TorchScript")
    paces(now=5.0, layers=1.0)
    times = iter([1.0, None])
    monkeypatch.setattr(FixedLayers, "milliseconds", lambda self: next(times))
    tsopt.check(model, X, tmp_path / "b.json", update=True, **OPTIONS)
    assert read_baseline(tmp_path / "b.json").over_layers == ()


@pytest.mark.parametrize(
    ("eager", "layers", "verdict"),
    [(8.0, 1.0, "undecided"), (12.5, 1.0, "undecided"), (8.0, 20.0, "slower"), (10.0, 1.0, "slower")],
)
def test_without_layers_a_change_of_eager_widens_the_interval(model, baseline, paces, eager, layers, verdict):
    """A baseline of an earlier version has no layers. Of calls that are shorter than these, eager says enough."""
    paces(now=1.08 * 0.5 * eager, eager=eager, layers=layers)
    then = read_baseline(baseline)
    assert then.over_layers == ()
    assert tsopt.check(model, X, then, **OPTIONS).verdict == verdict


@pytest.mark.parametrize(("seconds", "is_said"), [(60.0, False), (1e-9, True)])
def test_a_baseline_that_tells_little_says_so(model, paces, monkeypatch, tmp_path, seconds, is_said):
    fast_timings(monkeypatch, wins="TorchScript")
    paces(now=5.0)
    found = tsopt.check(model, X, tmp_path / "b.json", update=True, **OPTIONS | {"compare_seconds": seconds})
    assert (
        any("its 3 sessions differ so much that their mean may be off by" in remark for remark in found.remarks)
        == is_said
    )


def test_beside_a_bundle_nothing_else_is_timed(model, paces, monkeypatch, tmp_path):
    """Both are timed in the same moments, so that the state of the machine does not matter."""
    fast_timings(monkeypatch, wins="TorchScript")
    paces(now=5.0, layers=1.0)
    place = tsopt.optimize(model, X, **OPTIONS).save(tmp_path / "m.tsopt")
    found = tsopt.check(model, X, place, **OPTIONS, trust=True)
    assert (found.now.over_layers, found.now.meeting_us) == ((), None)
