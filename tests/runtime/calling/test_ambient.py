"""Calls under gradients, transforms, tracing, autocast: the model itself serves them, or they are refused."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import tsopt
from bench.hazards.ambient import autocast, backward, jacrev, traced, vmap
from tsopt.runtime.calling import eager_calls
from tsopt.runtime.calling.ambient import POLICIES, RECORDING, Unserved, fast_names, objection

X = torch.linspace(-1, 1, 12).reshape(2, 6)


class Watches(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", ["eager", "onnxruntime", "model"])
@pytest.mark.parametrize("use", [jacrev, vmap, backward, autocast], ids=lambda use: use.__name__)
def test_the_model_itself_serves_and_a_warning_says_so_once(optimized_by, mlp, backend, use):
    fast = optimized_by(backend)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, again = use(fast), use(fast)
    torch.testing.assert_close(found, use(mlp))
    torch.testing.assert_close(again, use(mlp))
    said = [str(item.message) for item in caught if "runs in eager mode" in str(item.message)]
    # Where the model itself has won and gradients are off, a call is the model's own, whatever is around it.
    assert len(said) == (0 if (backend, use) == ("model", autocast) else 1), said


@pytest.mark.parametrize("backend", ["onnxruntime", "model"])
def test_on_gradients_error_refuses(mlp, backend, optimized_by):
    fast = optimized_by(backend)
    fast._unserved = Unserved(mlp, "mlp", "error")
    with pytest.raises(tsopt.SignatureError, match=r"(?s)only the model itself.*torch\.func.*on_gradients='eager'"):
        jacrev(fast)
    with pytest.raises(tsopt.SignatureError, match="gradients are required for an input"):
        fast(X.clone().requires_grad_())
    torch.testing.assert_close(fast(X), mlp(X).detach())


def test_optimize_takes_the_policy_and_refuses_others():
    fast = tsopt.optimize(torch.relu, X, backends=("eager",), seconds=0.05, on_gradients="error")
    with pytest.raises(tsopt.SignatureError, match="only the model itself"):
        fast(X.clone().requires_grad_())
    with pytest.raises(tsopt.UsageError, match=r"on_gradients='no'(?s:.*)eager, error"):
        tsopt.optimize(torch.relu, X, on_gradients="no")
    assert POLICIES == ("eager", "error")


def test_a_trace_records_the_model():
    fast = tsopt.optimize(torch.relu, X, backends=("eager",), seconds=0.05)
    with pytest.warns(UserWarning, match=r"runs in eager mode: torch\.jit\.trace is recording the call"):
        made = traced(fast)
    torch.testing.assert_close(made, torch.relu(X + 1))


def test_a_model_in_parts_is_served_alike():
    def halves(x):
        while float(x.detach().norm()) > 1:
            x = x * 0.5
        return x

    fast = tsopt.optimize(halves, X, backends=("eager",), seconds=0.05)
    assert "partitioned" in fast.report.frontend
    given = X.clone().requires_grad_()
    with pytest.warns(UserWarning, match="runs in eager mode: gradients are required"):
        fast(given).sum().backward()
    assert given.grad is not None
    assert bool((given.grad != 0).all())


@pytest.mark.parametrize("name", ["eager", "onnxruntime"])
def test_an_executable_alone_refuses(executables, name):
    executable = executables[name]
    for use in (jacrev, vmap, backward, autocast):
        with pytest.raises(tsopt.SignatureError, match="cannot serve this call"):
            use(executable)


def test_nothing_is_objected_to_in_an_ordinary_call():
    assert objection([X]) == ""
    with torch.no_grad():
        assert objection([X.clone().requires_grad_()]) == ""
    with torch.inference_mode():
        assert objection([X]) == ""


def test_each_objection_has_its_words():
    with Watches():
        assert "Watches intercepts the ops" in objection([X])
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast is enabled" in objection([X])
    with forward_ad.dual_level():
        assert objection([X]) == ""
        assert "forward-mode gradients" in objection([forward_ad.make_dual(X, X)])
    assert "gradients are required for an input" in objection([X.clone().requires_grad_()])


@pytest.mark.parametrize("name", ["eager", "onnxruntime"])
def test_torch_compile_calls_what_was_made_as_it_is(optimized_by, executables, mlp, name):
    torch.compiler.reset()
    for made in (executables[name], optimized_by(name)):
        outer = torch.compile(lambda x, made=made: made(x + 1) * 2, backend="eager")
        with torch.no_grad():
            torch.testing.assert_close(outer(X), mlp(X + 1) * 2)
    torch.compiler.reset()


def test_cuda_is_not_queried_before_it_is_initialized(monkeypatch):
    """Without a driver, a CUDA build of torch raises when asked."""

    def raises():
        raise RuntimeError("CUDA driver version is insufficient")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", raises)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert fast_names()["recording"]() is False
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert fast_names()["recording"]() is True


def test_while_a_cuda_graph_records_the_model_itself_runs(monkeypatch):
    """For hybrids, and for any call with tensors on a GPU: nothing may be compiled or synchronized then."""
    monkeypatch.setitem(fast_names(), "recording", lambda: True)
    with FakeTensorMode():
        on_gpu = torch.empty(2, device="cuda")
    assert objection([on_gpu]) == RECORDING
    assert objection([torch.ones(2)]) == ""
    monkeypatch.setattr(eager_calls, "_recording", lambda: True)
    hybrid = tsopt.hybridize(torch.nn.Linear(3, 2).eval())
    with torch.no_grad():
        with pytest.warns(UserWarning, match=RECORDING):
            hybrid(torch.ones(1, 3))
        hybrid(torch.ones(1, 3))
    assert dict(tsopt.report(hybrid).in_eager) == {RECORDING: 2}
