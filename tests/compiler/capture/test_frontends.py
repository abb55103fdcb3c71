"""Models that torch.export does not take as they are, and front ends by name."""

from __future__ import annotations

import copy
import functools
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import tsopt
from bench.untouched import changed, state_of
from tests.compiler.capture.models import Layered, Marked, X
from tests.passes.helpers import assert_computes
from tsopt.compiler.capture import export_errors
from tsopt.compiler.capture.capture import capture
from tsopt.compiler.graph.verify import verify_program
from tsopt.errors import GraphBreakError, UsageError


class ThroughNumpy(Layered):
    def forward(self, x):
        return {"out": torch.from_numpy(np.maximum(self.layer(x).numpy(), 0.0)) + 1, "n": 3}


class InAThread(Layered):
    def forward(self, x):
        found = []
        thread = threading.Thread(target=lambda: found.append(self.layer(x)))
        thread.start()
        thread.join()
        return found[0] * 2


class Converting(Layered):
    def forward(self, x):
        self.layer = self.layer.to(torch.float64)
        return self.layer(x.double()).float()


class Counting(Layered):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.mul_(0.5).add_(x.mean())
        return self.layer(x) + self.count


class OfAClass(nn.Module):
    def forward(self, x):
        return x.as_subclass(Marked) + 1


class Copying(nn.Module):
    def forward(self, x):
        return copy.deepcopy(x) + 1


class ByValues(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x * 2
        return x - 1


class ByNumbers(nn.Module):
    def forward(self, x):
        if float(x.sum()) > 0:
            return x * 2
        return x - 1


class ManyInputs(Layered):
    def forward(self, x, twice=False, scale=2.0, *rest, pair, mask=None):
        y = self.layer(x) * scale + pair["a"]
        for value in rest:
            y = y + value
        return (y * 2 if twice else y, None, {"last": y.sum()})


class Drawing(nn.Module):
    def forward(self, x):
        return x + torch.rand(3)


@pytest.mark.parametrize(
    ("model", "name", "title"),
    [
        (ThroughNumpy(), "strict", "by torch.export in strict mode"),
        (InAThread(), "fx", "by torch.fx"),
        (Converting(), "fx", "by torch.fx"),
        (Counting(), "fx", "by torch.fx"),
        (ByValues(), "torchscript", "by TorchScript"),
        (
            ByValues(),
            "auto",
            "by TorchScript, because torch.export failed: .*control flow: an if; .*test_frontends.py:",
        ),
    ],
    ids=["numpy", "a thread", "converted weights", "state", "an if", "an if, unasked"],
)
def test_another_reads_what_torch_export_does_not(model, name, title):
    model.eval()
    before = state_of(model, tsopt.example(X))
    program = capture(model, X, frontend=name)
    assert not changed(before, state_of(model, tsopt.example(X)))
    verify_program(program)
    assert_computes(program, model, [X], exact=True)
    assert re.match(title, program.frontend)
    if "TorchScript" not in title:  # which tells no places
        assert "test_frontends.py:" in program.text


def test_the_report_says_who_has_read_the_model():
    model = ThroughNumpy().eval()
    options = {"backends": ("eager", "onnxruntime"), "seconds": 0.05, "isolate": False, "cache": False}
    fast = tsopt.optimize(model, X, frontend="strict", **options)
    assert "captured by torch.export in strict mode" in str(fast.report)
    assert [row.status for row in fast.report.rows] == ["ok"] * 3
    assert fast(X)["n"] == 3
    with torch.no_grad():
        torch.testing.assert_close(fast(X * 2)["out"], model(X * 2)["out"])


def test_sizes_stay_open_but_in_strict_mode():
    both = [X, torch.cat([X, X])]
    assert [dim.name for dim in capture(InAThread().eval(), both, frontend="fx").signature.dims] == ["batch"]
    with pytest.raises(GraphBreakError, match="strict mode specializes on sizes"):
        capture(ThroughNumpy().eval(), both, frontend="strict")


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (OfAClass(), "a subclass of torch.Tensor"),
        (Copying(), "accesses the memory of a tensor"),
        (ByNumbers(), r"float\(\) or bool\(\) on a tensor"),
    ],
)
def test_what_nobody_reads_is_refused_as_torch_export_refuses_it(model, what):
    with pytest.raises(GraphBreakError, match=what):
        capture(model, X)


def test_nobody_else_is_asked_but_where_values_decide():
    for model in (ThroughNumpy(), InAThread()):
        with pytest.raises(GraphBreakError):
            capture(model.eval(), X)
    with pytest.raises(GraphBreakError, match="an if"):
        capture(ByValues(), X, frontend="export")


class Frozen(nn.Module):
    """What another reader takes for given, and is not: each call here would be another program."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.count, self.kept = kind, 0, torch.zeros(3)
        self.register_buffer("buffer", torch.zeros(3))

    def forward(self, x):
        y = getattr(self, self.kind)(x)
        return y if isinstance(y, torch.Tensor) else x

    def counts(self, x):
        self.count += 1
        return x * self.count

    def keeps(self, x):
        self.kept = self.kept * 0.5 + x[0]
        return self.kept + 0

    def asks(self, x):
        return x * 2 if isinstance(x, torch.Tensor) else x * 3

    def asks_of_small_values(self, x):
        return (x * 2 if isinstance(x, torch.Tensor) else x * 3) * 1e-6

    def looks_up(self, x):
        return x * {2: 3.0}.get(x.shape[0], 1.0)

    def draws(self, x):
        return x + random.random()

    def draws_from_numpy(self, x):
        return x + float(np.random.rand())

    def draws_elsewhere(self, x):
        found = []
        thread = threading.Thread(target=lambda: found.append(torch.rand(3)))
        thread.start()
        thread.join()
        return x + found[0]

    def sums_up(self, x):
        return torch.zeros(3).add_(x.sum(0))

    def writes(self, x):
        y = x * 2
        x += 1
        return y


KINDS = [name for name in vars(Frozen) if not name.startswith("_") and name != "forward"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_fx_takes_for_given_is_never_believed(kind):
    model = Frozen(kind).eval()
    before = state_of(model, tsopt.example(X))
    with pytest.raises(GraphBreakError, match=r"torch\.fx (does not reproduce|cannot trace|would bake in)"):
        capture(model, X, frontend="fx")
    assert not changed(before, state_of(model, tsopt.example(X)))


@pytest.mark.parametrize("kind", ["counts", "keeps", "draws", "draws_from_numpy"])
def test_what_strict_mode_takes_for_given_is_never_believed(kind):
    with pytest.raises(GraphBreakError, match=r"strict mode (does not reproduce|cannot capture)"):
        capture(Frozen(kind).eval(), X, frontend="strict")


@pytest.mark.parametrize("kind", ["counts", "keeps", "draws", "draws_from_numpy"])
def test_what_torch_export_takes_for_given_never_wins(kind):
    model = Frozen(kind).eval()
    fast = tsopt.optimize(model, X, backends=("eager",), seconds=0.02, isolate=False, cache=False)
    assert fast.report.rows[1].status == "wrong"
    assert fast.backend == "eager"


def test_strict_mode_leaves_no_marks_on_weights():
    model = ThroughNumpy().eval()
    capture(model, X, frontend="strict")
    assert [vars(tensor) for tensor in model.parameters()] == [{}, {}]


def test_models_are_captured_in_turn():
    models = [nn.Sequential(nn.Linear(3, 3), nn.ReLU()).eval() for _ in range(6)]
    call = nn.Module.__call__
    with ThreadPoolExecutor(6) as pool:
        programs = list(pool.map(lambda model: capture(model, X), models))
    assert all(program.node_count == 2 for program in programs)
    assert nn.Module.__call__ is call


def test_fx_by_name():
    model = ManyInputs().eval()
    call = tsopt.example(X, True, 3.0, X + 1, pair={"a": X * 2})
    program = capture(model, call, frontend="fx")
    verify_program(program)
    assert program.frontend == "by torch.fx"
    assert_computes(program, model, [call], exact=True)
    assert "# layer, tests/compiler/capture/test_frontends.py:" in program.text
    fast = tsopt.optimize(model, call, frontend="fx", backends=("eager",), seconds=0.05, isolate=False, cache=False)
    assert "captured by torch.fx" in str(fast.report)
    assert fast(*call.args, **call.kwargs)[1] is None


@pytest.mark.parametrize(
    ("model", "what", "why"),
    [
        (ByValues(), "torch.fx cannot trace the model", "control flow"),
        (Drawing(), "torch.fx would bake in the random numbers from aten.rand.default", "drawn once"),
    ],
)
def test_what_fx_cannot_trace_is_refused(model, what, why):
    with pytest.raises(GraphBreakError, match=what) as caught:
        tsopt.optimize(model, X, frontend="fx")
    assert why in caught.value.why
    assert 'frontend="export"' in caught.value.fix


def test_torchscript_by_name():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).eval()
    before = state_of(model, tsopt.example(X))
    program = capture(model, X, frontend="torchscript")
    assert not changed(before, state_of(model, tsopt.example(X)))
    assert program.frontend == "by TorchScript"
    assert_computes(program, model, [X], exact=True)
    assert set(program.weights) == {"0.weight", "0.bias"}


@pytest.mark.parametrize("training", [False, True])
def test_a_script_that_is_no_graph_runs_as_it_is(training):
    model = ByNumbers().train(training)
    before = state_of(model, tsopt.example(X))
    fast = tsopt.optimize(model, X, frontend="torchscript", seconds=0.05, isolate=False, eval_mode=training)
    assert not changed(before, state_of(model, tsopt.example(X)))
    assert "as TorchScript, with its own optimizations: the TorchScript code has data-dependent" in fast.report.frontend
    for x in (X + 1, X - 1):
        assert torch.equal(fast(x), model(x))


def test_a_model_that_runs_is_not_called_again_where_torchscript_fails_too(monkeypatch):
    """It decides by values, so that torch.export fails, and goes through numpy, so that TorchScript does."""

    class Deciding(nn.Module):
        def forward(self, x):
            return torch.from_numpy(x.numpy() + 1) if x.sum() > 0 else x - 1

    asked = []
    plain = export_errors.failure_of_the_model
    monkeypatch.setattr(export_errors, "failure_of_the_model", lambda *args: asked.append(1) or plain(*args))
    monkeypatch.setattr("tsopt.compiler.capture.capture.failure_of_the_model", export_errors.failure_of_the_model)
    with pytest.raises(tsopt.CaptureError):
        capture(Deciding().eval(), X)
    assert asked == [1]


def test_what_torchscript_cannot_compile_is_refused():
    with pytest.raises(GraphBreakError, match="TorchScript cannot compile the model") as caught:
        capture(ThroughNumpy().eval(), X, frontend="torchscript")
    assert caught.value.why
    assert caught.value.fix.startswith('pass frontend="auto"')
    with pytest.raises(GraphBreakError, match="TorchScript cannot compile the model"):
        tsopt.optimize(ThroughNumpy().eval(), X, frontend="torchscript")


def test_there_is_no_other():
    with pytest.raises(UsageError, match="unknown frontend 'parts'") as caught:
        capture(ByValues(), X, frontend="parts")
    assert caught.value.fix == "use one of: auto, export, strict, fx, torchscript"


def test_what_torchscript_does_not_take_for_a_function_is_refused():
    with pytest.raises(GraphBreakError, match="TorchScript cannot compile the model"):
        capture(functools.partial(torch.add, X), X, frontend="torchscript")


def test_the_models_own_error_is_the_models():
    def fails(x):
        raise ValueError("bad shape")

    for name in ("fx", "strict", "torchscript"):
        with pytest.raises(tsopt.CaptureError, match="the model fails on the example input"):
            capture(fails, X, frontend=name)


def test_a_script_in_training_mode_is_refused_before_it_runs():
    class Dropping(nn.Module):
        def forward(self, x):
            if float(x.sum()) > 0:
                return torch.nn.functional.dropout(x, 0.5, self.training)
            return x

    with pytest.raises(tsopt.CaptureError, match="training mode") as caught:
        tsopt.optimize(Dropping().train(), X, frontend="torchscript", seconds=0.02, isolate=False)
    assert "eval_mode=True" in caught.value.fix
