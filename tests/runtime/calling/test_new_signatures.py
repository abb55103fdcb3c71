"""Calls with other sizes than before: after the second one, one program serves them all."""

from __future__ import annotations

import os
import signal
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import tsopt
from tests.runtime.calling.helpers import OPTIONS, outcomes
from tsopt.compiler.capture.thread_patches import apart
from tsopt.runtime.calling import new_signatures, specializations
from tsopt.runtime.calling.specializations import call_key, sizes_of

A, B = torch.zeros(2, 3), torch.ones(2, 3)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


class Positions(nn.Module):
    """Takes 30 rows at most."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(30, 6))
        self.inner = net()

    def forward(self, x):
        return self.inner(x + self.table[torch.arange(x.shape[0])])


class Counts(nn.Module):
    """A model that counts its own calls."""

    def __init__(self):
        super().__init__()
        self.inner = net()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x)


def test_sizes_are_those_of_tensors_wherever_arrays_are():
    key = call_key((np.ones(2), torch.eye(3).to_sparse(), torch.ones(4, 5)), {})
    assert sizes_of(key) == {(2, 0): 4, (2, 1): 5}


def test_a_model_that_calls_what_it_is_compiled_to_is_served_by_itself(optimized_by, mlp):
    found = []

    def another(example):
        found.append(fast(torch.ones(7, 6)))
        return tsopt.compile(tsopt.capture(mlp, example), "eager")

    fast = optimized_by("eager", another=another)
    calls = threading.Thread(target=lambda: found.append(fast(torch.ones(5, 6))), daemon=True)
    calls.start()
    calls.join(30)
    assert [len(rows) for rows in found] == [7, 5]
    assert [signature for signature, _ in fast.report.signatures] == ["f32[5, 6]"]


def test_a_thread_that_compiles_another_model_does_not_wait(optimized_by, mlp):
    begun, may_end = threading.Event(), threading.Event()

    def another(example):
        begun.set()
        may_end.wait(60)
        return tsopt.compile(tsopt.capture(mlp, example), "eager")

    fast = optimized_by("eager", another=another)
    compiles = threading.Thread(target=lambda: fast(torch.ones(5, 6)), daemon=True)

    def call_within_a_capture():
        with apart():
            compiles.start()
            begun.wait(60)
            found.append(fast(torch.ones(5, 6)))

    found = []
    calls = threading.Thread(target=call_within_a_capture, daemon=True)
    calls.start()
    calls.join(60)
    may_end.set()
    compiles.join(60)
    assert [len(rows) for rows in found] == [5]
    assert [signature for signature, _ in fast.report.signatures] == ["f32[5, 6]"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks")
def test_a_fork_does_not_wait_for_what_its_parent_compiles(optimized_by):
    begun, may_end = threading.Event(), threading.Event()

    def another(example):
        begun.set()
        may_end.wait(30)
        raise tsopt.BackendError("no other form")

    fast = optimized_by("eager", another=another)
    compiles = threading.Thread(target=lambda: fast(torch.ones(5, 6)), daemon=True)
    compiles.start()
    assert begun.wait(30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which the child does not need
        child = os.fork()
    if not child:
        signal.alarm(20)
        may_end.set()
        os._exit(0 if fast(torch.ones(7, 6)).shape == (7, 3) else 1)
    status = os.waitpid(child, 0)[1]
    may_end.set()
    compiles.join(30)
    assert os.waitstatus_to_exitcode(status) == 0


def test_the_second_size_makes_it_dynamic(wins):
    model = net()
    fast = tsopt.optimize(model, torch.randn(4, 6), **OPTIONS)
    for rows in (6, 4, 5, 1, 2, 12, 7):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(fast(x), model(x).detach())
    assert outcomes(fast) == ["captured for onnxruntime, batch: 1..12"]


def test_another_order_of_collected_keywords_is_another_signature(wins):
    fast = tsopt.optimize(lambda **rest: torch.cat(list(rest.values()), -1).tanh(), {"a": A, "b": B}, **OPTIONS)
    torch.testing.assert_close(fast(b=B, a=A), torch.cat([B, A], -1).tanh())
    torch.testing.assert_close(fast(a=A, b=B), torch.cat([A, B], -1).tanh())
    assert len(fast.report.signatures) == 1


def test_a_range_grows_with_the_calls_without_another_capture(wins):
    model = net()
    fast = tsopt.optimize(model, torch.randn(4, 6), **OPTIONS)
    for rows in (5, 11, 40, 79, 80, 200):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(fast(x), model(x).detach())
    assert outcomes(fast) == ["captured for onnxruntime, batch: 1..10"]
    served = fast.serving((torch.randn(399, 6),), {})
    assert served is not None
    assert str(served.signature.dims[0]) == "batch: 1..400"


def test_the_range_of_several_examples_grows_as_well(wins):
    model = net()
    fast = tsopt.optimize(model, [torch.randn(4, 6), torch.randn(6, 6)], **OPTIONS)
    assert fast.report.sizes.startswith("batch: 1..12")
    for rows in (13, 26, 200):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(fast(x), model(x).detach())
    assert outcomes(fast) == []


class Decides(nn.Module):
    """Decides by a size that is far from the examples, or by two sizes together."""

    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, x):
        return x * 2 if self.by(*x.shape) else x.tanh() + 1


@pytest.mark.parametrize(
    ("by", "served", "others"),
    [
        (lambda rows, width: rows == 16000, [(11, 6), (20000, 6), (15000, 6)], [(16000, 6)]),
        (lambda rows, width: rows * width == 77, [(12, 7), (6, 8), (40, 40)], [(7, 11), (11, 7)]),
    ],
)
def test_where_the_model_branches_on_sizes_one_program_serves_one_branch(wins, by, served, others):
    model = Decides(by)
    fast = tsopt.optimize(model, [torch.randn(5, 6), torch.randn(8, 9)], **OPTIONS)
    for x in map(torch.randn, [*served, *others, *served]):
        torch.testing.assert_close(fast(x), model(x))
    serving = [{fast.serving((x,), {}) for x in map(torch.randn, sizes)} - {None} for sizes in (served, others)]
    one, rest = ({id(executable.reference) for executable in found} for found in serving)
    assert len(one) == 1
    assert rest
    assert one.isdisjoint(rest)


def test_the_report_tells_of_conditions_that_sizes_may_fail(wins):
    model = Decides(lambda rows, width: rows * width == 24)
    fast = tsopt.optimize(model, [torch.randn(5, 5), torch.randn(7, 7)], **OPTIONS)
    assert fast.report.sizes.endswith("; only where batch * x_1 != 24"), fast.report.sizes


def test_a_range_that_was_asked_for_does_not_grow(wins):
    model = net()
    fast = tsopt.optimize(model, torch.randn(4, 6), dynamic={"input": {0: "batch[1..8]"}}, **OPTIONS)
    x = torch.randn(9, 6)
    torch.testing.assert_close(fast(x), model(x).detach())
    assert outcomes(fast) == ["captured for onnxruntime"]


def test_a_range_does_not_grow_to_where_the_model_fails(wins):
    model = Positions().eval()
    fast = tsopt.optimize(model, torch.randn(4, 6), **OPTIONS)
    for rows in (5, 11, 29, 30):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(fast(x), model(x).detach())
    with pytest.raises((IndexError, RuntimeError)):
        fast(torch.randn(31, 6))
    torch.testing.assert_close(fast(x), model(x).detach())


def test_where_one_program_cannot_serve_two_sizes_each_is_captured(wins):
    class BySize(nn.Module):
        def forward(self, x):
            return x * 2 if x.shape[0] < 5 else x - 1

    model = BySize().eval()
    fast = tsopt.optimize(model, torch.randn(4, 6), **OPTIONS)
    for rows in (6, 7, 3, 6, 7):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(fast(x), model(x))


class Pairs(nn.Module):
    """Adds rows up in pairs where that is possible."""

    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, x):
        return self.inner(x.reshape(-1, 2, 6).sum(1) if x.shape[0] % 2 == 0 else x)


def test_where_one_program_is_for_one_of_two_sizes_each_is_captured(wins):
    model = Pairs().eval()
    fast = tsopt.optimize(model, torch.randn(8, 6), **OPTIONS)
    for rows in (5, 8, 5, 7):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(fast(x), model(x).detach())
    assert outcomes(fast)[0] == "captured for onnxruntime"
    several = tsopt.optimize(model, [torch.randn(5, 6), torch.randn(8, 6)], **OPTIONS)
    assert several.backend == "onnxruntime"
    assert several.report.sizes.startswith("none is dynamic: the model depends on a size")


def test_an_error_in_tsopt_costs_a_new_signature_its_speed(optimized_by, mlp, caplog):
    asked = []

    def broken(example):
        asked.append(example)
        raise ZeroDivisionError("a mistake")

    fast, x = optimized_by("eager", another=broken), torch.randn(5, 6)
    for _ in range(3):
        torch.testing.assert_close(fast(x), mlp(x).detach())
    assert len(asked) == 1
    assert outcomes(fast) == ["runs in eager mode: internal error in tsopt (ZeroDivisionError)"]
    assert "internal error in tsopt at a call with a new signature" in caplog.text
    assert "a mistake" in caplog.text


def test_an_error_in_tsopt_while_a_range_grows(wins, monkeypatch, caplog):
    def broken(*_):
        raise ZeroDivisionError("a mistake")

    model, x = net(), torch.randn(40, 6)
    fast = tsopt.optimize(model, [torch.randn(4, 6), torch.randn(6, 6)], **OPTIONS)
    monkeypatch.setattr(new_signatures, "widened", broken)
    torch.testing.assert_close(fast(x), model(x).detach())
    assert "a mistake" in caplog.text


def test_what_comes_and_goes_is_served_by_the_model(wins):
    model = Counts().eval()
    fast = tsopt.optimize(model, torch.randn(4, 6), warmup=2, audit=0, **OPTIONS)
    model.calls = 0
    for rows in (5, 6):
        fast(torch.randn(rows, 6))
    assert (model.calls, outcomes(fast)) == (2, [])
    fast(torch.randn(7, 6))
    assert len(outcomes(fast)) == 1
    model.calls = 0
    for rows in (5, 6, 8, 14):
        fast(torch.randn(rows, 6))
    assert model.calls == 0


@pytest.mark.parametrize("warmup", [-1, 1.5, True, "2"])
def test_an_invalid_warmup_is_refused(warmup):
    with pytest.raises(tsopt.UsageError, match="warmup must be a number of calls"):
        tsopt.optimize(net(), torch.randn(4, 6), warmup=warmup)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, x, y):
        return self.inner(x * y) + self.inner(y)


def test_one_tensor_in_two_places_is_a_call_like_the_example(wins):
    model, x = Pair().eval(), torch.randn(4, 6)
    fast = tsopt.optimize(model, (x, x), **OPTIONS)
    for x in (torch.randn(5, 6), torch.randn(6, 6), torch.randn(30, 6)):
        torch.testing.assert_close(fast(x, x), model(x, x).detach())
    assert outcomes(fast) == ["captured for onnxruntime, batch: 1..10"]


@pytest.mark.parametrize("hybrid", [True, False])
def test_one_tensor_in_two_places(wins, hybrid):
    model, x = Pair().eval(), torch.randn(4, 6)
    fast = tsopt.hybridize(model, audit=0, **OPTIONS) if hybrid else tsopt.optimize(model, (x, x), **OPTIONS)
    with torch.no_grad():
        for rows in (4, 5, 6, 7, 30, 31, 100):
            for second in (False, True):
                x = torch.randn(rows, 6)
                y = torch.randn(rows, 6) if second else x
                torch.testing.assert_close(fast(x, y), model(x, y))


def test_forms_are_forgotten(wins, monkeypatch):
    monkeypatch.setattr(specializations, "MAX_FORMS", 3)

    class Named(nn.Module):
        def forward(self, x, **more):
            return x + sum(more.values())

    fast = tsopt.optimize(Named().eval(), tsopt.example(torch.ones(2), a=torch.ones(1)), warmup=9, **OPTIONS)
    for number in range(6):
        assert fast(torch.ones(2), **{f"b{number}": torch.ones(1)}).sum() == 4
    assert len(fast.new_signatures.kept._forms) <= 3


def test_a_call_that_a_range_cannot_reach_is_compared_once(wins, monkeypatch):
    asked, real = [], new_signatures.widened
    monkeypatch.setattr(new_signatures, "widened", lambda *args: asked.append(args) or real(*args))

    model = Positions().eval()
    fast = tsopt.optimize(model, [torch.randn(4, 6), torch.randn(8, 6)], warmup=9, **OPTIONS)
    for _ in range(4):
        with pytest.raises((IndexError, RuntimeError)):
            fast(torch.randn(31, 6))
    assert len(asked) == 1


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, x, name=""):
        return self.inner(x) + len(name)


def test_of_calls_with_another_constant_each_time_few_are_captured(always_faster, monkeypatch):
    monkeypatch.setattr(new_signatures, "OFTEN", 5)
    model = Named().eval()
    fast = tsopt.optimize(model, (torch.ones(2, 6), "a"), **OPTIONS)
    for number in range(12):
        x = torch.full((2, 6), float(number))
        torch.testing.assert_close(fast(x, str(number)), model(x, str(number)))
    assert len(fast.new_signatures.kept) == new_signatures.FREE_CAPTURES
    told = "run in eager mode until one has come 5 times; in each, argument 1 is another str"
    assert told in [outcome for _, outcome in fast.report.signatures]
    for _ in range(6):
        fast(torch.ones(2, 6), "b")
    assert len(fast.new_signatures.kept) == new_signatures.FREE_CAPTURES + 1
