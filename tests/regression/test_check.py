"""`tsopt.check`: what is a regression, what noise leaves open, and what else a reader is told."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import tsopt
from tests.regression.models import OPTIONS, Net, X
from tests.runtime.racing.helpers import fast_timings
from tsopt.errors import BackendError, BundleError, UsageError
from tsopt.regression import check as module
from tsopt.regression import sessions
from tsopt.regression.baseline import read_baseline
from tsopt.regression.outcome import Check


@pytest.mark.parametrize(
    ("now", "verdict", "code"),
    [(5.0, "ok", True), (5.03, "ok", True), (5.6, "slower", False), (3.0, "ok", True)],
)
def test_a_call_that_takes_longer_is_a_regression(model, baseline, paces, now, verdict, code):
    paces(now=now)
    found = tsopt.check(model, X, baseline, **OPTIONS)
    assert (found.verdict, found.ok) == (verdict, code)
    assert found.slowdown.estimate == pytest.approx(now / 5.0 - 1, abs=0.01)
    assert found.sentence == f"Net: {verdict}"


@pytest.mark.parametrize(("now", "verdict"), [(5.0, "ok"), (5.6, "slower")])
def test_calls_that_another_process_disturbs_do_not_hide_it(model, baseline, paces, now, verdict):
    paces(now=now, disturbed=15)
    found = tsopt.check(model, X, baseline, **OPTIONS)
    assert found.verdict == verdict
    assert len(found.now.speedups) == sessions.FEWEST


def test_the_limit_is_the_users(model, baseline, paces):
    paces(now=5.6)
    assert tsopt.check(model, X, baseline, max_slowdown=0.3, **OPTIONS).verdict == "ok"


def test_another_machine_is_compared_by_the_speedup(model, baseline, paces):
    other = replace(module.read_baseline(baseline), machine="another")
    paces(now=15.0, eager=30.0)
    assert tsopt.check(model, X, other, **OPTIONS).verdict == "ok"
    paces(now=18.0, eager=30.0)
    assert tsopt.check(model, X, other, **OPTIONS).verdict == "slower"


def test_noise_leaves_it_undecided_and_that_is_no_regression(model, baseline, paces):
    paces(now=5.3, scatter=30.0)
    found = tsopt.check(model, X, baseline, **OPTIONS)
    assert (found.verdict, found.ok) == ("undecided", True)
    assert "sessions differ too much to decide" in found.remarks[0]
    assert len(found.now.speedups) == sessions.MOST


@pytest.mark.parametrize(("now", "is_slower"), [(5.0, False), (8.0, True)])
def test_an_update_says_what_it_replaces(model, baseline, paces, now, is_slower):
    paces(now=now)
    (said,) = tsopt.check(model, X, baseline, update=True, **OPTIONS).remarks
    assert said.startswith("it replaces a baseline of 2.00x with TorchScript")
    assert ("measure again if the machine was busy" in said) == is_slower
    baseline.write_text('{"tsopt_baseline": 0}')
    assert tsopt.check(model, X, baseline, update=True, **OPTIONS).remarks == ()


def test_sessions_end_when_it_is_decided(model, baseline, paces):
    timed = paces(now=5.0)
    tsopt.check(model, X, baseline, **OPTIONS)
    assert len(timed) == sessions.FEWEST


@pytest.mark.parametrize(("scatter", "count"), [(1.0, 20), (8.0, 40)])
def test_a_baseline_has_more_sessions_where_they_scatter(model, paces, monkeypatch, tmp_path, scatter, count):
    fast_timings(monkeypatch, wins="TorchScript")
    timed = paces(now=5.0, scatter=scatter)
    tsopt.check(model, X, tmp_path / "b.json", update=True, **OPTIONS)
    assert len(timed) == count


def test_sessions_end_with_the_time(model, baseline, paces):
    timed = paces(now=5.3, scatter=30.0)
    found = tsopt.check(model, X, baseline, compare_seconds=1e-9, **OPTIONS)
    assert (len(timed), found.verdict) == (sessions.LEAST, "undecided")


@pytest.mark.parametrize("now", [11.5, 10.0])
def test_the_same_machine_in_another_state_leaves_it_undecided(model, baseline, paces, now):
    paces(now=now, eager=20.0)
    found = tsopt.check(model, X, baseline, **OPTIONS)
    assert found.verdict == "undecided"
    assert "takes 20 ms, and took 10 ms for the baseline" in found.remarks[0]


def test_many_inputs_and_a_name_with_spaces_are_the_same_after_reading(paces, monkeypatch, tmp_path):
    fast_timings(monkeypatch, wins="TorchScript")
    paces(now=5.0)
    original = module.environment
    monkeypatch.setattr(module, "environment", lambda: replace(original(), cpu="Xeon(R) CPU     X5650"))

    class Sum(nn.Module):
        def forward(self, *xs):
            return torch.stack(xs).sum(0)

    many = tuple(torch.ones(1, 2) for _ in range(60))
    tsopt.check(Sum().eval(), many, tmp_path / "b.json", update=True, **OPTIONS)
    found = tsopt.check(Sum().eval(), many, tmp_path / "b.json", **OPTIONS)
    assert found.verdict == "ok"
    assert not [remark for remark in found.remarks if "machine" in remark]


def test_eager_that_has_become_faster_is_seen_beside_a_report_too(model, baseline, paces):
    paces(now=5.0, eager=8.5)
    then = replace(module.read_baseline(baseline), macs=None, ops=None, functions=None, meeting_us=None)
    assert tsopt.check(model, X, then, **OPTIONS).verdict == "undecided"


def test_threads_that_take_longer_to_meet_leave_it_undecided(model, baseline, paces):
    paces(now=6.5, meeting=4012.0)  # for two layers of two ops each
    found = tsopt.check(model, X, baseline, **OPTIONS)
    assert found.verdict == "undecided"
    assert "threads take 4,012 us to meet, and took 12 us for the baseline" in found.remarks[0]
    assert "may account for 62%;" in found.remarks[0]
    for meeting in (None, 22.0):  # 10 us are nothing beside calls of 6.5 ms
        paces(now=6.5, meeting=meeting)
        assert tsopt.check(model, X, baseline, **OPTIONS).verdict == "slower"


def test_one_thread_waits_for_no_other(model, paces, monkeypatch, tmp_path, torch_threads):
    torch_threads(2)
    options = OPTIONS | {"backends": ("onnxruntime", "onnxruntime?threads=1")}
    for wins, verdict in (("ONNX Runtime", "undecided"), ("ONNX Runtime, 1 thread", "slower")):
        fast_timings(monkeypatch, wins=wins)
        paces(now=5.0)
        tsopt.check(model, X, tmp_path / "b.json", update=True, **options)
        paces(now=6.5, meeting=4012.0)
        assert tsopt.check(model, X, tmp_path / "b.json", **options).verdict == verdict


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, "slower"),  # eager does what it did: it is the machine that is faster, and the optimized model is not
        ({"versions": "torch 2.9.0"}, "undecided"),
        ({"functions": 1000}, "undecided"),
        ({"ops": 5}, "undecided"),
        ({"ops": None, "functions": None}, "undecided"),
    ],
)
def test_a_slowdown_by_which_only_eager_gained_is_none(model, baseline, paces, change, verdict):
    paces(now=5.0, eager=8.5)
    found = tsopt.check(model, X, replace(read_baseline(baseline), **change), **OPTIONS)
    assert found.slowdown.estimate > 0.1
    assert found.verdict == verdict
    assert any("eager may have become faster" in remark for remark in found.remarks) == (verdict != "slower")


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, "ok"),
        ({"versions": "torch 2.9.0"}, "undecided"),
        ({"functions": 1000}, "undecided"),
        ({"functions": None}, "ok"),
    ],
)
def test_eager_that_has_become_slower_hides_no_slowdown(model, baseline, paces, change, verdict):
    paces(now=6.0, eager=12.0)
    found = tsopt.check(model, X, replace(read_baseline(baseline), **change), **OPTIONS)
    assert found.verdict == verdict
    assert any("eager may have become slower" in remark for remark in found.remarks) == (verdict != "ok")


def test_a_model_that_does_less_and_takes_as_long_is_not_slower(model, baseline, paces):
    paces(now=5.0, eager=8.5)
    then = replace(read_baseline(baseline), macs=100)
    assert tsopt.check(model, X, then, **OPTIONS).verdict == "undecided"


@pytest.mark.parametrize(("eager", "verdict"), [(11.0, "slower"), (14.5, "slower"), (20.0, "undecided")])
def test_the_further_eager_is_from_what_it_was_the_more_may_be_due_to_the_machine(
    model, baseline, paces, eager, verdict
):
    paces(now=0.5 * 1.13 * eager, eager=eager)
    assert tsopt.check(model, X, baseline, **OPTIONS).verdict == verdict


def test_multiply_accumulates_that_eager_has_gained_too_are_a_regression(baseline, paces):
    paces(now=7.5, eager=15.0)
    found = tsopt.check(Net(layers=3).eval(), X, baseline, **OPTIONS)
    assert (found.verdict, found.speed, found.ok) == ("more work", "ok", False)
    assert found.growth == pytest.approx(0.5)
    assert "+50.0%" in found.text


def test_multiply_accumulates_where_there_were_none_are_a_regression(model, baseline, paces):
    paces(now=5.0)
    then = replace(read_baseline(baseline), macs=0)
    found = tsopt.check(model, X, then, **OPTIONS)
    assert (found.growth, found.work, found.verdict) == (math.inf, "more work", "more work")
    assert "from none" in found.text
    assert json.loads(json.dumps(found.to_json()), parse_constant=pytest.fail)["growth"] is None
    none = Check(now=then, baseline=then, slowdown=None, speed="ok", max_slowdown=0.05, max_drop=0.0)
    assert (none.growth, none.work) == (0.0, "ok")


def test_a_bundle_is_opened_anew_and_timed_in_the_same_sessions(model, paces, monkeypatch, tmp_path):
    fast_timings(monkeypatch, wins="TorchScript")
    tsopt.optimize(model, X, **OPTIONS).save(tmp_path / "b.tsopt")
    opened, original = [], module.load
    monkeypatch.setattr(module, "load", lambda *args, **k: (opened.append(args), original(*args, **k))[1])
    timed = paces(now=5.6, before=5.0, eager=30.0)
    found = tsopt.check(model, X, tmp_path / "b.tsopt", trust=True, **OPTIONS)
    assert found.verdict == "slower"
    assert found.slowdown.estimate == pytest.approx(0.12, abs=0.01)
    assert timed[0] == ["eager", sessions.NOW, sessions.BEFORE]
    assert len(opened) >= len(timed) >= sessions.FEWEST
    assert found.baseline.speedups == (pytest.approx(6.0),) * len(timed)
    assert found.accuracy == "ok"
    assert found.remarks == ()
    paces(now=5.0, before=5.0)
    assert tsopt.check(model, X, tmp_path / "b.tsopt", trust=True, **OPTIONS).verdict == "ok"


def test_a_baseline_can_be_a_value(model, baseline, paces):
    found = tsopt.check(model, X, module.read_baseline(baseline), update=False, **OPTIONS)
    assert found.baseline == module.read_baseline(baseline)


def test_each_session_has_a_compiled_model_of_its_own(model, baseline, paces, monkeypatch):
    paces(now=5.0)
    seen, told = [], sessions.measure
    monkeypatch.setattr(
        sessions, "measure", lambda *args, **k: (seen.append(args[0][sessions.NOW]), told(*args, **k))[1]
    )
    tsopt.check(model, X, baseline, **OPTIONS)
    assert len(set(map(id, seen))) == len(seen) >= sessions.FEWEST


def test_only_calls_on_the_example_are_timed(model, baseline, paces, monkeypatch):
    paces(now=5.0)
    seen, told = [], sessions.measure
    monkeypatch.setattr(sessions, "measure", lambda *args, **k: (seen.extend(args[1]), told(*args, **k))[1])
    tsopt.check(model, X, baseline, **OPTIONS)
    assert len(seen) > 1
    assert all(torch.equal(call.args[0], X) for call in seen)
    assert len({call.args[0].data_ptr() for call in seen}) == len(seen)


def test_threads_are_those_that_were_asked_for(model, baseline, paces, monkeypatch):
    paces(now=5.0)
    seen, original = [], sessions.measure
    monkeypatch.setattr(
        sessions, "measure", lambda *args, **k: (seen.append(torch.get_num_threads()), original(*args, **k))[1]
    )
    monkeypatch.setattr(sessions, "Meeting", lambda: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    tsopt.check(model, X, baseline, threads=1, **OPTIONS)
    assert set(seen) == {1}
    assert torch.get_num_threads() == before


def test_dropout_is_off_in_eager_too_where_it_was_asked_for(paces, monkeypatch, tmp_path):
    fast_timings(monkeypatch, wins="TorchScript")
    paces(now=5.0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.9))
    found = tsopt.check(model, X, tmp_path / "b.json", update=True, eval_mode=True, **OPTIONS)
    assert found.now.score == pytest.approx(1.0)
    assert model.training


def test_several_examples_are_one_program(model, paces, monkeypatch, tmp_path):
    fast_timings(monkeypatch, wins="TorchScript")
    paces(now=5.0)
    found = tsopt.check(model, [X, torch.ones(3, 4)], tmp_path / "b.json", update=True, **OPTIONS)
    assert found.now.inputs == "float32[1, 4]"


def test_other_inputs_than_those_of_the_baseline_are_refused(model, baseline):
    with pytest.raises(UsageError, match="other inputs") as caught:
        tsopt.check(model, torch.ones(2, 4), baseline, **OPTIONS)
    assert "float32[1, 4]" in caught.value.why


def test_a_race_that_this_machine_stopped_makes_no_baseline(model, baseline, paces, monkeypatch, tmp_path):
    paces(now=5.0)
    monkeypatch.setattr(module, "_stopped", lambda fast: "out of memory")
    with pytest.raises(UsageError, match="no baseline was written"):
        tsopt.check(model, X, tmp_path / "new.json", update=True, **OPTIONS)
    assert not (tmp_path / "new.json").exists()
    found = tsopt.check(model, X, baseline, **OPTIONS)
    assert (found.verdict, found.ok) == ("no candidate could be tried", False)
    assert "out of memory" in found.text
    assert "out of memory" in found.markdown


def test_a_reader_is_told_what_else_has_changed_and_what_was_not_compared(model, baseline, paces):
    paces(now=5.0)
    then = module.read_baseline(baseline)
    changed = replace(
        then, winner="OpenVINO", machine="a fast one", versions="torch 1", model="other", macs=None, speedups=(2.0,)
    )
    assert tsopt.check(model, X, changed, **OPTIONS).remarks == (
        "the baseline was measured on another machine (a fast one); speed-ups carry over roughly",
        "the baseline was measured with other versions: torch 1",
        "the baseline is a single session, so its own scatter is not known",
        "the baseline is of a model with another name, other",
        "multiply-accumulates are not compared: the baseline does not have them",
        "TorchScript runs now; in the baseline it was OpenVINO",
    )
    assert "the baseline does not say on which machine it was measured" in (
        tsopt.check(model, X, replace(then, machine=""), **OPTIONS).remarks
    )


def test_it_can_be_read_in_a_terminal_in_a_pull_request_and_by_programs(model, baseline, paces):
    paces(now=5.6)
    found = tsopt.check(model, X, baseline, **OPTIONS)
    assert str(found) == found.text
    assert found.text.startswith("Net: slower\n")
    row = next(line for line in found.markdown.splitlines() if line.startswith("| speed-up"))
    assert "2.00x, TorchScript, 20 sessions" in row
    assert row.endswith("| 5.0% slower | slower |")
    assert "| million MACs | 3.2e-05 | 3.2e-05 | +0.0% | +5.0% | ok |" in found.markdown
    data = json.loads(json.dumps(found.to_json()))
    assert (data["verdict"], data["ok"], data["max_slowdown"]) == ("slower", False, 0.05)


def test_a_cell_with_a_line_across_is_escaped_once_in_markdown(model, baseline, paces):
    paces(now=5.6)
    found = tsopt.check(model, X, baseline, **OPTIONS)
    named = replace(found, now=replace(found.now, winner="a | b"))
    assert "a \\| b" in named.markdown
    assert "a \\\\| b" not in named.markdown


def test_a_model_that_no_front_end_captures_is_checked_too(paces, tmp_path):
    class Looks(nn.Module):
        def forward(self, x):
            return x if float(x.sum()) > 1e9 else -x

    paces(now=9.9)
    options = OPTIONS | {"backends": ("eager",)}
    found = tsopt.check(Looks().eval(), X, tmp_path / "b.json", update=True, **options)
    assert found.now.macs == 0
    assert tsopt.check(Looks().eval(), X, tmp_path / "b.json", **options).verdict == "ok"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_slowdown": -0.1}, "max_slowdown must be 0 or more"),
        ({"max_slowdown": float("nan")}, "max_slowdown must be 0 or more"),
        ({"compare_seconds": 0}, "compare_seconds must be positive"),
        ({"max_drop": -1.0}, "max_drop must be 0 or more"),
        ({"metric": "f1"}, "unknown metric 'f1'"),
        ({"max_slowdwn": 0.3}, "unknown option 'max_slowdwn'"),
        ({"metric": lambda called: float("nan"), "update": True}, "the metric returns nan"),
        ({"threads": 0}, "threads must be an integer from 1 to 1024"),
        ({"candidate": abs}, "backends, cache, isolate, seconds cannot be combined with candidate"),
    ],
)
def test_invalid_options_are_refused(model, baseline, paces, options, said):
    with pytest.raises(UsageError, match=said):
        tsopt.check(model, X, baseline, **options, **OPTIONS)


def test_a_directory_that_is_no_bundle_is_refused(model, tmp_path):
    with pytest.raises(UsageError, match="a directory, and not a bundle"):
        tsopt.check(model, X, tmp_path, **OPTIONS)
    with pytest.raises(UsageError, match="it is a directory"):
        tsopt.check(model, X, tmp_path, update=True, **OPTIONS)


def test_a_baseline_that_cannot_be_written_is_an_error(model, paces, monkeypatch, tmp_path):
    fast_timings(monkeypatch, wins="TorchScript")
    paces(now=5.0)
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError):
        tsopt.check(model, X, tmp_path / "file" / "b.json", update=True, **OPTIONS)


def test_what_fails_while_it_is_timed_is_an_error(model, baseline, paces):
    paces(now=5.0, error="RuntimeError: no")
    with pytest.raises(BackendError, match="the optimized model cannot be timed") as caught:
        tsopt.check(model, X, baseline, **OPTIONS)
    assert "RuntimeError: no" in caught.value.why
