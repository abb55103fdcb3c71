"""Models that torch.export does not take as they are, and front ends by name."""

from __future__ import annotations

import copy
import re
import threading

import numpy as np
import pytest
import torch
from torch import nn

import tsopt
from bench.untouched import changed, state_of
from tests.passes.helpers import assert_computes
from tsopt.compiler.capture import capture
from tsopt.compiler.frontends import computes_the_same
from tsopt.compiler.verify import verify_program
from tsopt.errors import NotOneGraph, UsageError

X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Layered(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)


class Plain(Layered):
    def forward(self, x):
        return self.layer(x).relu()


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


class Marked(torch.Tensor):
    pass


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
    ("model", "reader", "because"),
    [
        (ThroughNumpy(), "torch.export in strict mode", "the model goes through numpy; .*test_frontends.py:"),
        (InAThread(), "torch.fx", "a part of the model runs where it cannot be traced"),
        (Converting(), "torch.fx", "the model converts its own weights while it runs"),
    ],
    ids=["numpy", "a thread", "converted weights"],
)
def test_another_reads_what_torch_export_does_not(model, reader, because):
    model.eval()
    before = state_of(model, tsopt.example(X))
    program = capture(model, X)
    assert not changed(before, state_of(model, tsopt.example(X)))
    verify_program(program)
    assert_computes(program, model, [X], exact=True)
    assert program.frontend.startswith(f"by {reader}, because without: ")
    assert re.search(because, program.frontend)
    assert "layer" in program.text
    assert "test_frontends.py:" in program.text


def test_the_report_says_who_has_read_the_model():
    model = ThroughNumpy().eval()
    fast = tsopt.optimize(model, X, backends=("eager", "onnxruntime"), seconds=0.05, isolate=False, cache=False)
    assert "captured by torch.export in strict mode, because without: the model goes through numpy" in str(fast.report)
    assert [row.status for row in fast.report.rows] == ["ok"] * 3
    assert fast(X)["n"] == 3
    with torch.no_grad():
        torch.testing.assert_close(fast(X * 2)["out"], model(X * 2)["out"])


def test_what_is_read_otherwise_is_for_many_sizes_too():
    program = capture(InAThread().eval(), [X, torch.cat([X, X])])
    assert [dim.name for dim in program.signature.dims] == ["batch"]
    with pytest.raises(NotOneGraph, match="through numpy"):
        capture(ThroughNumpy().eval(), [X, torch.cat([X, X])])


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (OfAClass(), "a subclass of torch.Tensor"),
        (Copying(), "reads the memory of a tensor"),
        (ByValues(), "an if"),
    ],
)
def test_what_nobody_reads_is_refused_as_torch_export_refuses_it(model, what):
    with pytest.raises(NotOneGraph, match=what):
        capture(model, X)


def test_export_by_name_does_not_go_on_to_fx():
    with pytest.raises(NotOneGraph, match="runs where it cannot be traced"):
        capture(InAThread().eval(), X, frontend="export")
    assert capture(ThroughNumpy().eval(), X, frontend="export").frontend


def test_fx_by_name():
    model = ManyInputs().eval()
    call = tsopt.example(X, True, 3.0, X + 1, pair={"a": X * 2})
    program = capture(model, call, frontend="fx")
    verify_program(program)
    assert program.frontend == "by torch.fx"
    assert_computes(program, model, [call], exact=True)
    assert "# layer, tests/compiler/test_frontends.py:" in program.text
    fast = tsopt.optimize(model, call, frontend="fx", backends=("eager",), seconds=0.05, isolate=False, cache=False)
    assert "captured by torch.fx" in str(fast.report)
    assert fast(*call.args, **call.kwargs)[1] is None


@pytest.mark.parametrize(
    ("model", "what", "why"),
    [
        (ByValues(), "torch.fx cannot trace the model", "control flow"),
        (Drawing(), "torch.fx would freeze the numbers that aten.rand.default draws", "drawn once"),
    ],
)
def test_what_fx_cannot_trace_is_refused(model, what, why):
    with pytest.raises(NotOneGraph, match=what) as caught:
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
def test_a_script_whose_values_decide_runs_as_it_is(training):
    model = ByValues().train(training)
    before = state_of(model, tsopt.example(X))
    fast = tsopt.optimize(model, X, frontend="torchscript", seconds=0.05, isolate=False, eval_mode=training)
    assert not changed(before, state_of(model, tsopt.example(X)))
    assert "as TorchScript with its own optimizations: a decision in TorchScript depends" in fast.report.frontend
    for x in (X + 1, X - 1):
        assert torch.equal(fast(x), model(x))


def test_what_torchscript_cannot_compile_is_refused():
    with pytest.raises(NotOneGraph, match="TorchScript cannot compile the model") as caught:
        capture(ThroughNumpy().eval(), X, frontend="torchscript")
    assert caught.value.why
    assert caught.value.fix.startswith('frontend="auto"')
    with pytest.raises(NotOneGraph, match="TorchScript cannot compile the model"):
        tsopt.optimize(ThroughNumpy().eval(), X, frontend="torchscript")


def test_there_is_no_other():
    with pytest.raises(UsageError, match="frontend='parts'") as caught:
        capture(ByValues(), X, frontend="parts")
    assert caught.value.fix == "one of: auto, export, fx, torchscript"


def test_an_exported_program_keeps_the_places_of_its_calls():
    exported = torch.export.export(Plain().eval(), (X,))
    assert "# layer, tests/compiler/test_frontends.py:" in capture(exported, X).text


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (torch.relu, True),
        (lambda x: x.clamp(min=0) + (x[0, 0] != -1), False),
        (lambda x: x.relu().double(), False),
        (lambda x: (x.relu(),), False),
        (lambda x: x.relu().as_subclass(Marked), False),
    ],
    ids=["the same", "on other values", "dtype", "structure", "class"],
)
def test_a_program_is_compared_with_the_model(other, same):
    program = capture(torch.relu, X)
    assert computes_the_same(program, other, tsopt.example(X)) == same


def test_state_is_put_back_after_the_comparison():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count.add_(1)
            return x + self.count

    model = Counting()
    assert computes_the_same(capture(model, X), model, tsopt.example(X))
    assert model.count == 0
