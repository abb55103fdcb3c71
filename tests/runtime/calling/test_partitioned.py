"""Models that are no single graph: parts of them are optimized, the rest stays as it is, and the report says so."""

from __future__ import annotations

import gc
import inspect
import re
import weakref
from functools import partial

import pytest
import torch
from torch import nn

import tsopt
from tests.runtime.calling.helpers import Signs
from tsopt.runtime.calling import graph_parts, partitioned
from tsopt.runtime.calling.partitioned import PARTS, Partitioned
from tsopt.runtime.racing import race
from tsopt.runtime.racing.speedup import Speedup, Timing
from tsopt.runtime.report import EAGER

QUICK = {"seconds": 0.05, "isolate": False, "cache": False, "backends": ("eager", "onednn")}
X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def made(monkeypatch):
    """The graphs that are made, in order; all of them matter."""
    graphs, real = [], graph_parts.Graph.__init__

    def init(self, *args, **options):
        real(self, *args, **options)
        graphs.append(self)

    monkeypatch.setattr(graph_parts.Graph, "__init__", init)
    monkeypatch.setattr(graph_parts, "LEAST_SHARE", 0.0)
    monkeypatch.setattr(graph_parts, "COVERED", 2.0)
    return graphs


class Branches(nn.Module):
    """Goes on by the values of what it has computed, and remembers its calls."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.yes, self.no = nn.Linear(16, 4), nn.Linear(16, 4)
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, x, *, scale: float = 1.0):
        self.calls += 1
        self.count.add_(1)
        hidden = self.first(x * scale)
        if hidden.sum() > 40:
            return {"y": self.yes(hidden), "count": self.count * 2}
        return {"y": self.no(hidden), "count": self.count * 2}


def optimized(model=None, example=X, **options):
    return tsopt.optimize(model or Branches().eval(), example, **QUICK | options)


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


@pytest.mark.usefixtures("parts_win", "always_faster")
def test_the_report_says_why_and_what_the_parts_are(monkeypatch):
    monkeypatch.setattr(partitioned, "MOST_LATER", 99)  # how often dynamo traces the count depends on earlier tests
    fast = optimized()
    assert re.search(r"2 of [23] parts optimized, the Python code between them is kept", fast.report.frontend)
    assert "3 parts" not in fast.report.frontend or "part 3: traced later, and optimized when" in fast.report.text
    assert "the model has data-dependent control flow: an if" in fast.report.text
    assert "test_partitioned.py:" in fast.report.frontend
    assert "part 1: " in fast.report.text
    assert fast.report.to_json()["frontend"] == fast.report.frontend
    assert "Partitioned" in repr(fast)


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


def test_parts_that_answer_something_else_lose(monkeypatch):
    real = torch.compile

    def other(model, **options):
        compiled = real(model, **options)
        return lambda *a, **k: {name: value + 1 for name, value in compiled(*a, **k).items()}

    monkeypatch.setattr(torch, "compile", other)
    fast = optimized()
    assert (fast.backend, fast.report.row(PARTS).status) == ("eager", "wrong")


class Decides(nn.Module):
    """Not one graph for torch.export, and one script."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        if float(y.sum()) > 0:
            y = y * 2
        return y


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


def due(fast):
    """An audit at the next call."""
    fast._audits.left = fast._audits.count = 0
    return fast


@pytest.mark.usefixtures("parts_win", "single_threaded")
def test_an_audit_leaves_what_the_python_of_the_model_counts():
    model = Branches().eval()
    fast = due(optimized(model))
    calls, count = model.calls, model.count.clone()
    fast(X)
    assert (fast._audits.count, fast.backend) == (1, "parts")
    assert (model.calls, model.count) == (calls + 1, count + 1)


MEANS: list[float] = []


class Means(nn.Module):
    """Keeps what its inner values are on average, outside of it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        hidden = self.first(x)
        MEANS.append(float(hidden.mean()))
        return self.second(hidden)


@pytest.mark.usefixtures("parts_win", "single_threaded")
def test_an_audit_leaves_what_the_python_of_the_model_collects():
    fast = due(optimized(Means().eval(), frontend="parts"))
    MEANS.clear()
    fast(X)
    fast(X)
    assert (fast._audits.count, fast.backend) == (1, "parts")
    assert len(MEANS) == 2


def beside_another(fast, work, in_a_thread):
    """The same, while another thread does some work in each call."""
    run = fast._run
    fast._run = lambda *args, **kwargs: in_a_thread(work) or run(*args, **kwargs)
    return fast


@pytest.mark.usefixtures("parts_win", "another_thread")
def test_what_another_thread_counts_during_an_audit_stays(in_a_thread):
    model = Branches().eval()
    fast = beside_another(due(optimized(model)), lambda: model.count.add_(1), in_a_thread)
    count = model.count.clone()
    fast(X)
    assert fast._audits.count == 1
    assert model.count == count + 2


@pytest.mark.usefixtures("parts_win", "another_thread")
def test_parts_that_leave_no_trace_are_compared_beside_another_thread(in_a_thread):
    model, drawn = Signs().eval(), []

    def work():
        drawn.append(torch.rand(1).item())
        model.norm.num_batches_tracked.fill_(7)

    fast = beside_another(optimized(model, frontend="parts"), work, in_a_thread)
    assert fast.difference((X,), {}) == ""
    work()
    assert len(set(drawn)) == 2
    assert model.norm.num_batches_tracked == 7


@pytest.mark.usefixtures("parts_win")
def test_what_parts_do_not_notice_an_audit_finds(monkeypatch):
    monkeypatch.setattr(race, "speedup", lambda *_: Speedup(2.0, 1.9, 2.1))

    class Decides(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            hidden = torch.tanh(self.first(x))
            return {"y": self.second(hidden) if hidden.sum() > 1e6 else self.second(-hidden)}

    model = Decides().eval()
    fast = due(optimized(model, frontend="parts"))
    model.second.weight.detach().numpy()[:] *= 2
    wanted = model(X)["y"].detach()
    with pytest.warns(UserWarning, match="runs in eager mode from now on: .*y: 12 of 12 values"):
        torch.testing.assert_close(fast(X)["y"], wanted)
    assert fast.backend == "eager"
    assert "since then" in fast.report.text


def test_a_script_keeps_the_weights_of_then(monkeypatch):
    def measure(calls, inputs, **_):
        return {name: Timing((9.0, 9.01) * 4 if name == "eager" else (1.0, 1.01) * 4, 5) for name in calls}

    monkeypatch.setattr(partitioned, "measure", measure)
    script = torch.jit.script(Decides().eval())
    fast = due(optimized(script))
    wanted = fast(X)
    with torch.no_grad():
        script.layer.weight.mul_(2)
    with pytest.warns(UserWarning, match="calls keep using the old ones"):
        torch.testing.assert_close(due(fast)(X), wanted)
    assert fast.backend == "torchscript"


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


class Block(nn.Module):
    """Two graphs, with Python between them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        hidden = self.a(x)
        torch._dynamo.graph_break()
        return x + self.b(torch.relu(hidden))


@pytest.mark.usefixtures("parts_win", "always_faster")
def test_equal_blocks_with_breaks_inside_are_all_optimized(made):
    model = nn.Sequential(*[Block() for _ in range(3)]).eval()
    fast = optimized(model, frontend="parts")
    torch.testing.assert_close(fast(X), model(X).detach())
    assert sorted(len(graph.every_fast) for graph in made if graph.share) == [3, 3]


def counted(model):
    """Calls a model as compiled by the user, and says how many graphs that made."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        torch.compile(model, backend=backend)(X)
    return len(graphs)


@pytest.mark.skipif(
    "isolate_recompiles" not in inspect.signature(torch.compile).parameters, reason="eight models share what dynamo has"
)
@pytest.mark.slow
@pytest.mark.usefixtures("parts_win", "always_faster")
def test_one_model_of_a_class_after_another_is_optimized_and_leaves_dynamo_to_the_user():
    for _ in range(10):
        fast = optimized(Block().eval(), frontend="parts", seconds=0.01)
        assert "2 of 2 parts optimized" in fast.report.frontend
    assert counted(Block().eval()) == 2


@pytest.mark.parametrize("wins", [True, False])
def test_a_model_that_is_gone_is_not_kept_by_its_parts(made, monkeypatch, request, wins):
    if wins:
        request.getfixturevalue("always_faster")

    def measure(calls, inputs, **_):
        return {name: Timing((1.0, 1.01) * 4 if wins == (name == PARTS) else (9.0, 9.01) * 4, 5) for name in calls}

    monkeypatch.setattr(partitioned, "measure", measure)
    model = Block().eval()
    fast = optimized(model, frontend="parts")
    forms = [weakref.ref(form) for graph in made for form in graph.every_fast]
    assert len(forms) == (2 if wins else 0), "where eager wins, nothing is kept from the start"
    fast(X)
    there = [*forms, *map(weakref.ref, model.parameters())]
    del model, fast
    gc.collect()
    assert [item() for item in there] == [None] * len(there)


@pytest.mark.usefixtures("parts_win", "always_faster")
def test_after_an_audit_that_finds_a_difference_nothing_is_kept(made):
    model = Block().eval()
    fast = due(optimized(model, frontend="parts"))
    model.b.weight.detach().numpy()[:] *= 2
    with pytest.warns(UserWarning, match="runs in eager mode from now on"):
        torch.testing.assert_close(fast(X), model(X).detach())
    assert [graph.every_fast for graph in made] == [[], []]


class Counts(nn.Module):
    """Writes a buffer on one side of a break, and reads it on the other."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        hidden = self.a(x)
        torch._dynamo.graph_break()
        return self.b(hidden) * self.count


@pytest.mark.usefixtures("parts_win", "always_faster")
def test_a_buffer_that_one_part_writes_is_an_input_of_the_others(made):
    model = Counts().eval()
    fast = optimized(model, frontend="parts")
    for graph in made:
        graph._as_it_is = None  # never called again
    for count in (1, 2, 3):
        torch.testing.assert_close(fast(X), model.b(model.a(X)).detach() * count)


@pytest.mark.usefixtures("always_faster")
def test_where_dynamo_compiles_nothing_the_report_says_so():
    with torch._dynamo.config.patch(accumulated_recompile_limit=0):
        fast = optimized(Block().eval(), frontend="parts")
    assert "TorchDynamo compiles none of its code" in fast.report.text
