"""Models that are no single graph: parts of them are optimized, the rest stays as it is, and the report says so."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.exc import InternalTorchDynamoError

import tsopt
from tests.runtime.calling.parts import QUICK, Block, Branches, Decides, X, optimized
from tsopt.runtime.calling import partitioned
from tsopt.runtime.calling.partitioned import PARTS, Partitioned
from tsopt.runtime.racing.row import EAGER
from tsopt.runtime.racing.speedup import Timing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("wins", [PARTS, EAGER])
def test_train_does_not_change_the_answers(monkeypatch, wins):
    def measure(calls, inputs, **_):
        return {name: Timing((1.0, 1.01) * 4 if name == wins else (9.0, 9.01) * 4, 5) for name in calls}

    monkeypatch.setattr(partitioned, "measure", measure)
    model = Branches().eval().requires_grad_(False)
    fast = optimized(model)
    wanted, statistics = model(X)["y"], model.first[1].running_mean.clone()
    assert fast.report.winner == wins
    for switched in (model, model.first):
        model.eval()
        switched.train()
        torch.testing.assert_close(fast(X)["y"], wanted)
        assert switched.training
    assert torch.equal(model.first[1].running_mean, statistics)


def test_what_has_been_called_often_is_not_warmed_up_again(monkeypatch):
    known = []

    def measure(calls, inputs, **options):
        known.append(options["known"])
        return {name: Timing((1.0, 1.01) * 4, 5) for name in calls}

    monkeypatch.setattr(partitioned, "measure", measure)
    optimized(Branches().eval())
    (seconds,) = known
    assert seconds.keys() == {EAGER, PARTS}
    assert min(seconds.values()) > 0


@pytest.mark.usefixtures("parts_win")
def test_both_branches_are_right():
    model = Branches().eval()
    fast = optimized(model)
    assert (type(fast), fast.backend, fast.report.winner) == (Partitioned, "parts", PARTS)
    seen = set()
    for factor in (0.1, 1.0, 30.0):
        model.count.zero_()
        answer = fast(X * factor)
        model.count.zero_()
        wanted = model(X * factor)
        assert answer.keys() == wanted.keys()
        torch.testing.assert_close(answer["y"], wanted["y"].detach())
        torch.testing.assert_close(answer["count"], wanted["count"])
        seen.add(bool(model.first(X * factor).sum() > 40))
    assert seen == {True, False}


class Chooses(nn.Module):
    """Keeps no count, for which TorchDynamo may trace it more than once. TorchScript cannot read the name."""

    def __init__(self):
        super().__init__()
        self.first, self.yes, self.no = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x):
        hidden = self.first(x)
        if hidden.sum() > 40:
            return getattr(self, "{}es".format("y"))(hidden)
        return self.no(hidden)


@pytest.mark.usefixtures("parts_win", "always_faster")
def test_the_report_says_why_and_what_the_parts_are():
    fast = optimized(Chooses().eval())
    assert "2 of 2 parts optimized, the Python code between them is kept" in fast.report.frontend
    assert "the model has data-dependent control flow: an if" in fast.report.text
    assert "test_partitioned.py:" in fast.report.frontend
    assert "part 1: " in fast.report.text
    assert fast.report.to_json()["frontend"] == fast.report.frontend
    assert "Partitioned" in repr(fast)


@pytest.mark.usefixtures("parts_win")
def test_what_the_model_refuses_is_an_error_of_the_model():
    model = Chooses().eval()
    fast = optimized(model)
    with pytest.raises(RuntimeError) as wanted:
        model(X.double())
    with pytest.raises(RuntimeError) as found:
        fast(X.double())
    assert (type(found.value), str(found.value)) == (type(wanted.value), str(wanted.value))
    assert found.value.__context__ is None, "not an error of TorchDynamo, with this one below it"
    assert fast.backend == "parts"
    torch.testing.assert_close(fast(X), model(X))


def refused_by_torchdynamo(x):
    raise InternalTorchDynamoError("no rule for this")


def refused_after_a_write(x):
    x.add_(1)
    refused_by_torchdynamo(x)


@pytest.mark.usefixtures("parts_win")
def test_what_only_torchdynamo_refuses_is_left_to_the_model():
    model = Chooses().eval()
    fast = optimized(model)
    fast._run = refused_by_torchdynamo
    said = r"runs in eager mode from now on: TorchDynamo fails on a call .*InternalTorch.*no rule"
    with pytest.warns(UserWarning, match=said) as warned:
        found = fast(X)
    assert warned[0].filename == __file__
    torch.testing.assert_close(found, model(X))
    assert fast.backend == "eager"
    torch.testing.assert_close(fast(X), model(X))


@pytest.mark.usefixtures("parts_win")
@pytest.mark.parametrize(("make", "run"), [(Branches, refused_by_torchdynamo), (Chooses, refused_after_a_write)])
def test_where_parts_have_written_something_the_model_is_not_called_as_well(make, run):
    model = make().eval()
    fast = optimized(model)
    fast._run = run
    called = []
    model.register_forward_hook(lambda *_: called.append(1))
    with pytest.raises(InternalTorchDynamoError):
        fast(X.clone())
    assert (called, fast.backend) == ([], "parts")


def test_the_model_is_left_as_it_was():
    model = Branches().eval()
    optimized(model)
    assert (model.calls, float(model.count)) == (0, 0.0)


@pytest.mark.slow
@pytest.mark.usefixtures("parts_win")
def test_it_cannot_be_saved_and_says_why(tmp_path):
    fast = optimized()
    with pytest.raises(
        tsopt.BundleError, match=r"(?s)a partitioned model cannot be saved.*the model has data-dependent control flow"
    ):
        fast.save(tmp_path / "m.tsopt")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(tsopt.BackendError, match="a partitioned model cannot be compiled with onnxruntime"):
        fast.verified("onnxruntime")
    with pytest.raises(tsopt.BackendError, match="a partitioned model cannot be profiled"):
        fast.profile()


def test_eager_runs_where_parts_are_not_faster(monkeypatch):
    monkeypatch.setattr(
        partitioned, "measure", lambda calls, inputs, **_: {name: Timing((1.0, 1.01) * 4, 5) for name in calls}
    )
    model = Branches().eval()
    fast = optimized(model)
    assert (fast.backend, fast.report.winner) == ("eager", "eager")
    fast(X)
    assert model.calls == 1
    assert "note: part 1: " in fast.report.text  # what became of each part is said even so


def test_parts_that_answer_something_else_lose(monkeypatch):
    real = torch.compile

    def other(model, **options):
        compiled = real(model, **options)
        return lambda *a, **k: {name: value + 1 for name, value in compiled(*a, **k).items()}

    monkeypatch.setattr(torch, "compile", other)
    fast = optimized()
    assert (fast.backend, fast.report.row(PARTS).status) == ("eager", "wrong")


def test_torchscript_that_is_no_graph_is_optimized_by_torchscript(monkeypatch):
    monkeypatch.setattr(
        partitioned,
        "measure",
        lambda calls, inputs, **_: {n: Timing((9.0, 9.01) * 4 if n == "eager" else (1.0, 1.01) * 4, 5) for n in calls},
    )

    model = torch.jit.script(Decides().eval())
    fast = optimized(model)
    assert (fast.backend, fast.report.winner) == ("torchscript", partitioned.SCRIPT)
    assert (
        "as TorchScript, with its own optimizations: the TorchScript code has data-dependent control flow"
        in fast.report.frontend
    )
    for sign in (1, -1):
        torch.testing.assert_close(fast(X * sign), model(X * sign).detach())


def test_one_that_is_wrong_on_fresh_inputs_loses(monkeypatch):
    """Right on what the race measured, and on nothing else."""
    judge = partitioned.Oracle.judge

    def wrong_later(self, candidate, **options):
        is_fresh = self.eager.program is None and self.eager.seed == 1
        off = lambda x: {name: value + 1 for name, value in candidate(x).items()}  # noqa: E731
        return judge(self, off if is_fresh else candidate, **options)

    monkeypatch.setattr(partitioned.Oracle, "judge", wrong_later)
    fast = optimized()
    assert fast.report.row(PARTS).reason.startswith("after timing: ")
    assert fast.backend == "eager"


def test_by_name_also_a_model_that_is_a_graph():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    fast = optimized(model, frontend="parts")
    assert "partitioned, 1 of 1 parts optimized" in fast.report.frontend
    torch.testing.assert_close(fast(X), model(X).detach())


def test_a_single_graph_or_nothing():
    with pytest.raises(tsopt.CaptureError, match="the model has data-dependent control flow"):
        optimized(frontend="export")


def test_an_unknown_frontend_is_refused():
    with pytest.raises(tsopt.UsageError, match="unknown frontend 'magic'") as caught:
        optimized(frontend="magic")
    assert "parts" in caught.value.fix


def test_what_fails_by_itself_is_not_tried_in_parts():
    with pytest.raises(tsopt.CaptureError, match="the model fails on the example input"):
        optimized(nn.Linear(5, 2).eval())


def test_where_dynamo_fails_as_well_it_runs_as_it_is_and_tells_both_reasons(monkeypatch):
    def fails(model, **options):
        def run(*args, **kwargs):
            raise RuntimeError("internal")

        return run

    monkeypatch.setattr(torch, "compile", fails)
    fast = optimized()
    assert isinstance(fast, tsopt.InEager)
    for reason in (
        "the model has data-dependent control flow",
        "TorchDynamo cannot run the model; RuntimeError: internal",
    ):
        assert reason in fast.report.frontend
    torch.testing.assert_close(fast(X), Branches().eval()(X))
    with pytest.raises(tsopt.CaptureError, match=r"(?s)TorchDynamo cannot run the model.*RuntimeError: internal"):
        optimized(frontend="parts")


@pytest.mark.slow
def test_a_graph_that_comes_again_is_optimized_once(monkeypatch):
    """Dynamo traces the model again when its counter changes."""
    from tsopt.compiler.capture import capture

    real, made = capture.capture_apart, []
    monkeypatch.setattr(capture, "capture_apart", lambda *a, **k: made.append(1) or real(*a, **k))
    optimized()
    assert 2 <= len(made) <= 4  # the whole, before the branch, and either side of it


def test_a_function_in_parts():
    def halves(x):
        while x.norm() > 1:
            x = x * 0.5
        return x

    fast = optimized(halves)
    torch.testing.assert_close(fast(X * 7), halves(X * 7))


def test_eval_mode_is_kept_in_parts():
    model = Branches().train()
    model.first.append(nn.Dropout(0.5))
    fast = optimized(model, eval_mode=True)
    assert model.training
    wanted = Branches().eval()(X)["y"].detach()
    torch.testing.assert_close(fast(X)["y"], wanted)


@pytest.mark.usefixtures("parts_win")
def test_calls_with_an_iterator_are_those_of_the_model():
    def function(x, scales):
        for scale in scales:
            x = x * scale
        return x + 1 if x.sum() > 0 else x - 1

    fast = optimized(function, (X.abs(), [2.0, 3.0]))
    assert fast.backend == "parts"
    assert torch.equal(fast(X.abs(), iter([2.0, 3.0])), X.abs() * 6 + 1)
    scales = iter([2.0, 3.0])
    assert fast.difference((X.abs(), scales), {}) is None
    assert list(scales) == [2.0, 3.0]


@pytest.mark.usefixtures("parts_win")
def test_the_report_has_the_name_of_the_model():
    model = Branches().train()
    assert optimized(model, frontend="parts", eval_mode=True).report.model == "Branches"
    assert optimized(partial(Branches().eval(), scale=2.0), frontend="parts").report.model == "Branches"
    assert model.training


def test_the_steps_of_each_part_and_those_after_them_are_told():
    told = []
    optimized(Block().eval(), frontend="parts", progress=told.append)
    of_the_first = [text.removeprefix("part 1 of 2: ") for text in told if text.startswith("part 1 of 2: ")]
    assert of_the_first[0] == "capture"
    assert any(text.startswith("compile ") for text in of_the_first)
    after = [text for text in told if not text.startswith("part ")]
    assert after.index(f"check {PARTS}") < after.index("first calls") < after.index(f"verify {PARTS}")
    assert any(text.startswith("time: round 1") for text in after)


@pytest.mark.parametrize("error", [LookupError("stop"), tsopt.UsageError("stop")])
@pytest.mark.parametrize("step", ["part 1 of", r"part 1 of \d+: compile", "check partitioned"])
def test_what_the_callers_progress_raises_is_the_callers(step, error):
    def progress(text):
        if re.match(step, text):
            raise error

    with pytest.raises(type(error), match="stop"):
        tsopt.optimize(Branches().eval(), X, progress=progress, **QUICK)


class Peak(nn.Module):
    """Divides by the largest value so far, which it keeps in a plain tensor."""

    def __init__(self):
        super().__init__()
        self.layer, self.peak = nn.Linear(8, 8), torch.zeros(())

    def forward(self, x):
        y = self.layer(x)
        size = float(y.numpy().size)  # here the graph breaks
        self.peak.copy_(torch.maximum(self.peak, y.abs().max()))
        return y / self.peak * size


@pytest.mark.parametrize("in_parts", [True, False])
def test_a_plain_tensor_is_left_as_it_was(in_parts, request):
    if in_parts:
        request.getfixturevalue("parts_win")
    model = Peak().eval().requires_grad_(False)
    optimized(model)
    assert model.peak == 0


def test_a_plain_tensor_of_a_module_that_a_function_calls_is_left_as_it_was():
    module = Peak().eval().requires_grad_(False)
    optimized(lambda x: module(x))
    assert module.peak == 0


def test_a_plain_tensor_is_written_as_by_the_model(parts_win):
    model = Peak().eval().requires_grad_(False)
    fast, wanted = optimized(model), Peak().eval().requires_grad_(False)
    wanted.load_state_dict(model.state_dict())
    for factor in (1.0, 3.0, 0.5):
        torch.testing.assert_close(fast(X * factor), wanted(X * factor))
    torch.testing.assert_close(model.peak, wanted.peak)
