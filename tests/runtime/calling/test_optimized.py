from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

import tsopt
from tests.runtime.racing.helpers import fast_timings
from tsopt.runtime.calling import new_signatures, specializations


@pytest.mark.parametrize("backend", ["eager", "torchscript", "onnxruntime", "model"])
def test_it_is_called_as_the_model_and_returns_what_the_model_returned(optimized_by, mlp, mlp_input, backend):
    fast = optimized_by(backend)
    found = fast(mlp_input)
    torch.testing.assert_close(found, mlp(mlp_input).detach())
    assert type(found) is torch.Tensor
    assert not found.requires_grad
    assert fast.backend == ("eager" if backend == "model" else backend)


def test_a_new_shape_is_captured_once_and_right(optimized_by, mlp, executables):
    captured = []

    def another(example):
        captured.append(example)
        return tsopt.compile(tsopt.capture(mlp, example), "eager")

    fast = optimized_by("eager", another=another)
    for rows in (5, 5, 7, 5, 7):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(fast(x), mlp(x).detach())
    assert len(captured) == 2
    assert fast.report.signatures == (("f32[5, 6]", "captured for eager"), ("f32[7, 6]", "captured for eager"))
    assert "call with a new signature (f32[5, 6]): captured for eager" in fast.report.text


def test_a_form_that_cannot_be_captured_goes_eager_and_says_why(optimized_by, mlp):
    fast = optimized_by("eager")
    x = torch.randn(5, 6)
    for _ in range(2):
        torch.testing.assert_close(fast(x), mlp(x).detach())
    assert fast.report.signatures == (("f32[5, 6]", "runs in eager mode: no other form"),)


def test_another_default_dtype_is_another_signature(monkeypatch, default_dtype):
    def model(x):
        return (x / 3).exp()

    fast_timings(monkeypatch, wins="eager + passes")
    x = torch.arange(4)
    fast = tsopt.optimize(model, x, backends=("eager",), seconds=0.01, isolate=False, cache=False)
    assert fast.executable is not None
    for dtype in (torch.float32, torch.float64, torch.float32):
        default_dtype(dtype)
        assert fast(x).dtype == dtype
        torch.testing.assert_close(fast(x), model(x))


def around_itself():
    made = SimpleNamespace(x=torch.ones(3))
    made.inner = SimpleNamespace(outer=made)
    return made


def deep(levels):
    made = SimpleNamespace(x=torch.ones(3))
    for _ in range(levels):
        made = SimpleNamespace(x=torch.ones(3), inner=made)
    return made


@pytest.mark.parametrize("make", [around_itself, lambda: deep(600), lambda: deep(5000)])
def test_a_later_call_whose_form_cannot_be_told_is_served_by_the_model(monkeypatch, make):
    def model(x, more=None):
        return x * 2 if more is None else x + more.x

    fast_timings(monkeypatch, wins="eager + passes")
    options = {"backends": ("eager",), "seconds": 0.01, "isolate": False, "cache": False}
    fast = tsopt.optimize(model, torch.ones(3), **options)
    assert fast.executable is not None
    for _ in range(2):
        assert torch.equal(fast(torch.ones(3), make()), torch.full((3,), 2.0))
    assert fast.serving((torch.ones(3), make()), {}) is None


def test_the_policy_eager_captures_nothing(optimized_by, mlp):
    fast = optimized_by("torchscript", policy="eager", another=lambda example: pytest.fail("captured"))
    x = torch.randn(5, 6)
    torch.testing.assert_close(fast(x), mlp(x).detach())
    assert fast.report.signatures == ()


def test_the_policy_error_refuses(optimized_by):
    fast = optimized_by("eager", policy="error")
    with pytest.raises(tsopt.SignatureError, match=r"shape|form"):
        fast(torch.randn(5, 6))
    with pytest.raises(tsopt.SignatureError):
        fast(torch.randn(2, 6, dtype=torch.float64))


def test_a_call_that_the_model_itself_refuses_raises_the_models_error(optimized_by):
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        optimized_by("eager")(torch.randn(2, 5))


@pytest.mark.parametrize(
    ("rows", "captured"),
    [
        ((3, 4, 3, 5, 3), [3, 4, 5]),  # 4 goes, which was called before 3
        ((3, 4, 5, 3), [3, 4, 5, 3]),
        ((3, 4, 5, 4, 5), [3, 4, 5]),
    ],
)
@pytest.mark.parametrize("recent", [0, 1])
def test_the_forms_that_were_called_last_are_kept(optimized_by, mlp, monkeypatch, rows, captured, recent):
    monkeypatch.setattr(specializations, "MAX_SPECIALIZATIONS", 2)
    monkeypatch.setattr(specializations, "RECENT", recent)
    made = []

    def another(example):
        made.append(len(example.args[0]))
        return tsopt.compile(tsopt.capture(mlp, example), "eager")

    fast = optimized_by("eager", another=another)
    for count in rows:
        x = torch.randn(count, 6)
        torch.testing.assert_close(fast(x), mlp(x).detach())
    assert made == captured


def test_a_call_that_eager_refuses_as_well_leaves_no_trace_in_the_report(optimized_by):
    def refuse(example):
        raise tsopt.CaptureError("the model itself fails")

    fast = optimized_by("eager", another=refuse)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes"):
            fast(torch.randn(5, 7))
    assert fast.report.signatures == ()


def test_captures_have_a_limit(optimized_by, mlp, monkeypatch):
    monkeypatch.setattr(new_signatures, "MAX_CAPTURES", 2)
    made = []

    def another(example):
        made.append(1)
        return tsopt.compile(tsopt.capture(mlp, example), "eager")

    fast = optimized_by("eager", another=another)
    for rows in (3, 4, 5, 6, 5, 3):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(fast(x), mlp(x).detach())
    assert len(made) == 2
    what, outcome = fast.report.signatures[-1]
    assert (what, outcome) == (
        "any further one",
        "runs in eager mode: 2 were captured; dynamic= captures one program for many sizes",
    )


def test_many_calls_beyond_the_limit_do_not_grow_memory(optimized_by, monkeypatch):
    monkeypatch.setattr(specializations, "MAX_SPECIALIZATIONS", 2)
    fast = optimized_by("eager")
    for rows in range(3, 13):
        fast(torch.randn(rows, 6))
    assert len(fast.new_signatures.kept) <= 3


def test_a_parameter_and_a_strided_input_are_not_another_form(optimized_by, mlp, mlp_input):
    fast = optimized_by("onnxruntime", policy="error")
    with torch.no_grad():
        for value in (
            torch.nn.Parameter(mlp_input),
            mlp_input.t().contiguous().t(),
            mlp_input.clone().requires_grad_(),
        ):
            torch.testing.assert_close(fast(value), mlp(value))


@pytest.mark.parametrize("backend", ["eager", "onnxruntime", "model"])
def test_a_numpy_array_is_refused_as_the_model_refuses_it(optimized_by, mlp_input, backend):
    with pytest.raises((TypeError, tsopt.TsoptError)):
        optimized_by(backend)(mlp_input.numpy())


def test_threads_may_call_together(optimized_by, mlp):
    made = []

    def another(example):
        made.append(1)
        return tsopt.compile(tsopt.capture(mlp, example), "eager")

    fast = optimized_by("eager", another=another)
    inputs = [torch.randn(3, 6) for _ in range(8)]
    found: dict[int, torch.Tensor] = {}
    workers = [threading.Thread(target=lambda i=i: found.update({i: fast(inputs[i])})) for i in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(made) == 1
    for i, x in enumerate(inputs):
        torch.testing.assert_close(found[i], mlp(x).detach())


def test_its_name_says_what_runs(optimized_by):
    assert repr(optimized_by("torchscript")) == "<tsopt.Optimized Sequential on torchscript, chosen>"


@pytest.mark.parametrize("winner", ["model", "onnxruntime"])
def test_its_layers_can_be_timed(optimized_by, winner):
    found = optimized_by(winner).profile()
    assert found.engines == ("eager + passes", "ONNX Runtime")[: 1 if winner == "model" else 2]
    assert {"0", "2"} <= {item.layer for item in found.layers}


def test_timing_layers_leaves_the_model_as_it_was():
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))
            self.fc = torch.nn.Linear(4, 4)

        def forward(self, x):
            self.count += 1
            return self.fc(x) + self.count

    model, x = Counting().eval(), torch.ones(2, 4)
    fast = tsopt.optimize(model, x, backends=("eager",), seconds=0.01, isolate=False, cache=False)
    fast.profile()
    assert float(model.count) == 0
    assert torch.equal(x, torch.ones(2, 4))


def test_when_eager_won_the_program_is_what_is_saved(optimized_by, mlp, mlp_input, tmp_path):
    loaded = tsopt.load(optimized_by("model").save(tmp_path / "m.tsopt"))
    torch.testing.assert_close(loaded(mlp_input), mlp(mlp_input).detach())


def test_a_program_that_is_wrong_is_not_saved(tmp_path):
    """Eager wins where every candidate is wrong, and what is stored would not be eager."""

    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.count = 0

        def forward(self, x):
            self.count += 1
            return x * self.count

    fast = tsopt.optimize(Counting(), torch.ones(3), backends=("eager",), seconds=0.02, isolate=False, cache=False)
    assert fast.backend == "eager"
    with pytest.raises(tsopt.AccuracyError, match="does not compute the same values as the model"):
        fast.save(tmp_path / "m.tsopt")
    assert list(tmp_path.iterdir()) == []
