"""What tsopt cannot do with a model does not keep it from running: eager stands at the end of the ladder."""

from __future__ import annotations

import json
import logging
import warnings

import pytest
import torch
from torch import nn

import tsopt
from tsopt import prepared, request
from tsopt.compiler.rewriting.pass_base import Pass
from tsopt.runtime.calling import partitioned

OPTIONS = {"seconds": 0.02, "isolate": False, "cache": False, "backends": ("eager",)}
X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Net(nn.Module):
    def __init__(self, function=lambda x: x):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.layer(x))


def halves(x):
    while float(x.norm()) > 1:
        x = x * 0.5
    return x


@pytest.fixture
def no_parts(monkeypatch):
    def fails(*args, **kwargs):
        raise tsopt.CaptureError("TorchDynamo cannot run the model", why="a reason")

    monkeypatch.setattr(request, "optimize_partitioned", fails)


@pytest.mark.usefixtures("no_parts")
def test_every_reason_is_in_the_report():
    model = Net(halves).eval()
    fast = tsopt.optimize(model, X, frontend="auto", **OPTIONS)
    assert isinstance(fast, tsopt.InEager)
    assert (fast.backend, fast.report.winner, fast.report.speedup) == ("eager", "eager", 1.0)
    assert "the model has data-dependent control flow" in fast.report.why
    assert "; then: TorchDynamo cannot run the model; a reason" in fast.report.frontend
    for said in (fast.report.text, fast.report.markdown, json.dumps(fast.report.to_json()), repr(fast)):
        assert "the model has data-dependent control flow" in said
    assert len(fast.errors) == 2
    with torch.no_grad():
        wanted = model(X)
    assert torch.equal(fast(X), wanted)
    assert not fast(X).requires_grad


@pytest.mark.usefixtures("no_parts")
def test_it_cannot_be_saved_or_compiled_and_says_why(tmp_path):
    fast = tsopt.optimize(Net(halves).eval(), X, **OPTIONS)
    with pytest.raises(
        tsopt.BundleError, match=r"(?s)cannot be saved.*the model has data-dependent control flow.*fix: "
    ):
        fast.save(tmp_path / "m.tsopt")
    with pytest.raises(
        tsopt.BackendError, match=r"(?s)cannot be compiled with onnxruntime.*the model has data-dependent control flow"
    ):
        fast.verified("onnxruntime")
    with pytest.raises(tsopt.BackendError, match=r"(?s)cannot be profiled.*the model has data-dependent control flow"):
        fast.profile()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_parts")
@pytest.mark.parametrize("frontend", ["one-graph", "export", "fx", "torchscript", "parts"])
def test_a_front_end_that_is_asked_for_by_name_refuses(frontend):
    with pytest.raises(tsopt.CaptureError):
        tsopt.optimize(Net(lambda x: torch.from_numpy(x.detach().numpy())).eval(), X, frontend=frontend, **OPTIONS)


@pytest.mark.usefixtures("no_parts")
def test_hybridize_runs_eager_and_says_so_once():
    net = tsopt.hybridize(Net(halves).eval(), **OPTIONS)
    with (
        torch.no_grad(),
        pytest.warns(UserWarning, match="runs in eager mode: .*the model has data-dependent control flow"),
    ):
        assert torch.equal(net(X), Net(halves).eval()(X))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        net(X)


UNREADABLE = {
    "a sparse input": (lambda: nn.Identity(), torch.eye(4).to_sparse()),
    "no tensor in the answer": (lambda: Net(lambda x: x.shape[0]).eval(), X),
    "a sparse weight": (lambda: _with_table(torch.eye(2).to_sparse()), X),
    "no finite value": (lambda: Net(lambda x: x * float("nan")).eval(), X),
}


def _with_table(table):
    net = Net(lambda x: torch.sparse.mm(net.table, x)).eval()
    net.register_buffer("table", table)
    return net


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_no_program_takes_runs_as_it_is(name):
    make, example = UNREADABLE[name]
    model = make()
    fast = tsopt.optimize(model, example, **OPTIONS)
    args = example if isinstance(example, tuple) else (example,)
    with torch.no_grad():
        found, wanted = fast(*args), model(*args)
    if isinstance(wanted, torch.Tensor):
        found, wanted = (t.to_dense() if t.is_sparse else t for t in (found, wanted))
        torch.testing.assert_close(found, wanted, equal_nan=True)
    else:
        assert found == wanted
    assert isinstance(fast, tsopt.InEager)
    assert fast.report.why


def test_a_mistake_of_tsopts_own_costs_the_speed_only_and_is_logged(monkeypatch, caplog):
    def fails(*args, **kwargs):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(prepared, "transform_with_records", fails)
    model = Net().eval()
    with caplog.at_level(logging.WARNING, "tsopt"):
        fast = tsopt.optimize(model, X, **OPTIONS)
    assert "internal error in tsopt, please report it: ZeroDivisionError: ours" in fast.report.why
    assert torch.equal(fast(X), model(X))
    (record,) = [record for record in caplog.records if record.name == "tsopt"]
    assert record.exc_info[0] is ZeroDivisionError


def test_a_mistake_in_one_part_costs_that_part(monkeypatch):
    real = prepared.transform_with_records

    def fails(program, *args, **kwargs):
        if "norm" in program.text:
            raise ZeroDivisionError("ours")
        return real(program, *args, **kwargs)

    monkeypatch.setattr(prepared, "transform_with_records", fails)
    fast = tsopt.optimize(Net(halves).eval(), X * 4, **OPTIONS)
    assert isinstance(fast, partitioned.Partitioned)
    assert any(
        "internal error in tsopt while optimizing a part" in note for row in fast.report.rows for note in row.notes
    )


@pytest.mark.parametrize(
    ("model", "error", "match"),
    [
        (lambda: Net(lambda x: x @ x.new_ones(7)).eval(), tsopt.CaptureError, "the model fails on the example input"),
        (lambda: nn.LazyLinear(3), tsopt.NotReady, "a lazy module"),
        (lambda: nn.Linear(4, 4, device="meta"), tsopt.NotReady, "meta device"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout()), tsopt.NotReady, "training mode"),
        (lambda: 3, tsopt.NotReady, "the model is a int"),
    ],
    ids=["fails", "lazy", "meta", "training", "not callable"],
)
def test_a_model_that_is_not_ready_is_refused(model, error, match):
    with pytest.raises(error, match=match):
        tsopt.optimize(model(), X, **OPTIONS)


def test_weights_that_are_nan_are_refused_until_they_are_asked_for():
    model = Net().eval()
    with torch.no_grad():
        model.layer.weight[0, 0] = float("nan")
    with pytest.raises(tsopt.NotReady, match="NaN in 1 of"):
        tsopt.optimize(model, X, **OPTIONS)


def test_what_the_callers_progress_raises_is_the_callers():
    def progress(text):
        raise LookupError("stop")

    with pytest.raises(LookupError, match="stop"):
        tsopt.optimize(Net().eval(), X, progress=progress, **OPTIONS)


def test_a_pass_that_fails_is_left_out_and_the_report_says_so():
    class Faulty(Pass):
        name = "faulty"

        def run(self, program, limits):
            raise KeyError("oops")

    model = Net().eval()
    with pytest.warns(UserWarning, match="the pass faulty was left out: it raises KeyError; 'oops'"):
        fast = tsopt.optimize(model, X, passes=(*tsopt.STANDARD, Faulty()), **OPTIONS)
    assert isinstance(fast, tsopt.Optimized)
    assert "the pass faulty was left out: it raises KeyError; 'oops'" in fast.report.text
    assert "left out" in fast.report.markdown
    failed = [item["failed"] for item in fast.report.to_json()["passes"] if item["failed"]]
    assert failed == ["the pass faulty raises KeyError; 'oops'"]
    with pytest.raises(tsopt.errors.PassError, match="the pass faulty raises KeyError"):
        tsopt.transform(tsopt.capture(model, X), (Faulty(),))


def test_a_number_that_values_decide_is_refused_by_name():
    """It was a TypeError from the types of a program: an offset that values decide cannot be hashed."""

    def rows(x, index):
        return torch.stack([x[i] for i in index.tolist()])

    with pytest.raises(tsopt.GraphBreakError, match="computed from tensor values"):
        tsopt.capture(rows, (X, torch.tensor([0, 1, 1])))


def test_sizes_that_cannot_be_dynamic_are_those_of_the_example_and_the_report_says_why(monkeypatch):
    def fails(*args, **kwargs):
        raise tsopt.CaptureError("the captured program is wrong at n=7")

    monkeypatch.setattr(prepared, "validate_ranges", fails)
    fast = tsopt.optimize(Net().eval(), X, dynamic={"x": {0: "n"}}, **OPTIONS)
    assert isinstance(fast, tsopt.Optimized)
    assert fast.report.sizes == "none is dynamic: the captured program is wrong at n=7"
    with pytest.raises(tsopt.CaptureError, match="wrong at n=7"):
        tsopt.optimize(Net().eval(), X, dynamic={"x": {0: "n"}}, frontend="export", **OPTIONS)
