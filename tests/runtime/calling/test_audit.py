"""Audits: when calls are audited, what counts as a difference, and that nobody notices otherwise."""

from __future__ import annotations

import random
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import tsopt
from tests.runtime.helpers import Counter
from tsopt.compiler.calls.example import Example
from tsopt.runtime.calling.audit import FAR, FIRST, NEVER, Audits, difference, executable_difference
from tsopt.runtime.calling.optimized import Optimized

X = torch.randn(2, 6, generator=torch.Generator().manual_seed(3))


class Clock:
    """Seconds that tests let pass."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def middle(below):
    return below // 2


def serve(audits, calls, clock, call=1e-3, audit=5e-3):
    """Serves calls as whoever serves them does; the numbers of those that were audited."""
    made = []

    def served():
        clock.now += call

    for number in range(calls):
        audits.left -= 1
        if audits.left < 0:
            with audits.turn() as due:
                if due:
                    made.append(number)
                    clock.now += audit
            audits.timed(served)
        else:
            served()
    return made


@pytest.mark.parametrize("choice", [0, FIRST // 2 - 1])
def test_the_first_audit_is_among_the_first_calls_whatever_is_chosen(choice):
    clock = Clock()
    audits = Audits(clock=clock, choose=lambda below: min(choice, below - 1))
    assert len(serve(audits, FIRST, clock)) == 1


@pytest.mark.parametrize(("call", "audit"), [(3e-5, 5e-4), (1e-3, 5e-3), (1e-2, 4e-2)])
def test_audits_take_at_most_their_share_of_ten_thousand_calls(call, audit):
    clock = Clock()
    audits = Audits(clock=clock, choose=random.Random(0).randrange)
    made = serve(audits, 10_000, clock, call, audit)
    spent, served = len(made) * audit, 10_000 * call
    assert len(made) > 1
    assert spent <= 0.01 * served + audit, "the first one is made before anything was served"
    assert spent >= 0.004 * served, "what may be spent is"


def test_a_call_that_had_to_wait_does_not_stand_for_hundreds():
    clock = Clock()
    audits = Audits(clock=clock, choose=middle)
    serve(audits, FIRST, clock)
    audits.left, before = 0, audits.served
    audits._since = 500
    audits.timed(lambda: setattr(clock, "now", clock.now + 10.0))
    assert audits.served - before <= 10.0 + FIRST * 1e-3


def test_a_share_of_none_is_none():
    audits = Audits(0)
    assert audits.left == NEVER
    audits = Audits()
    audits.end()
    audits.timed(lambda: None)
    assert audits.left == NEVER


def test_the_cold_first_audit_does_not_count_when_it_was_warmed_up():
    made = []
    assert Audits().warm(lambda: made.append(1)).spent == 0
    assert made == [1]
    Audits(0).warm(lambda: pytest.fail("nothing to warm up"))


def test_a_call_that_raises_is_not_time_served_and_audits_go_on():
    audits = Audits(choose=middle)

    def fails():
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        audits.timed(fails)
    assert audits.served == 0
    assert 0 <= audits.left <= FAR


@pytest.mark.parametrize("share", [-0.1, 1.5, "0.01", True, float("nan")])
def test_what_is_no_share_is_refused(share):
    with pytest.raises(tsopt.UsageError, match="audit must be"):
        Audits(share)
    with pytest.raises(tsopt.UsageError, match="audit must be"):
        tsopt.optimize(nn.Linear(2, 2).eval(), torch.ones(1, 2), audit=share)


def test_what_is_wrong_once_in_a_hundred_calls_is_caught_in_the_share_that_the_documentation_says():
    """Of candidates that are wrong in 1 % of calls at random: after n audits, 1 - 0.99^n of them."""
    draw, caught = random.Random(0), 0
    for _ in range(200):
        clock = Clock()
        audits = Audits(clock=clock, choose=draw.randrange)
        made = serve(audits, 20_000, clock)
        caught += any(draw.random() < 0.01 for _ in made)
    assert 0.2 <= caught / 200 <= 0.45  # about 40 audits of 5 calls each in 20,000 calls: 33 %


# What counts as a difference.


def scaled(model, factor):
    return lambda *args, **kwargs: model(*args, **kwargs) * factor


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval().requires_grad_(False)


def test_what_rounds_otherwise_is_no_difference(model):
    assert difference(scaled(model, 1 + 1e-7), model, Example((X,))) == ""


def test_a_difference_names_the_output_and_how_much(model):
    def outer(called):
        return lambda x: {"logits": called(x), "x": x}

    found = difference(outer(scaled(model, 1.5)), outer(model), Example((X,)))
    assert found.startswith("logits: 6 of 6 values exceed rtol")
    assert "max difference" in found


def test_an_answer_of_another_form_is_a_difference(model):
    assert "structure of its outputs" in difference(lambda x: (model(x),), model, Example((X,)))


def test_where_one_of_both_raises_is_a_difference(model):
    def raises(x):
        raise IndexError("out of range")

    assert difference(model, raises, Example((X,))) == "eager raises IndexError: out of range"
    assert difference(raises, model, Example((X,))) == "it raises IndexError: out of range, eager does not"
    assert difference(raises, raises, Example((X,))) == ""


def test_nothing_is_decided_where_memory_runs_out_or_inputs_are_not_finite(model):
    def full(x):
        raise torch.OutOfMemoryError("no room")

    assert difference(model, full, Example((X,))) is None
    assert difference(scaled(model, 2), model, Example((X * float("nan"),))) is None


def test_weights_that_have_become_nan_are_a_difference(model):
    executable = tsopt.compile(tsopt.capture(model, X), "eager")
    model[0].weight.data.fill_(float("nan"))
    assert "NaN" in executable_difference(executable, model, Example((X,)))


def test_the_float64_reference_says_what_is_only_rounding():
    """Far from zero by cancellation: eager itself is no nearer to the truth."""

    def model(x):
        return (x / 3 + 1e3) * 3 - 3e3

    def reordered(x):
        return (x + 3e3) - 3e3

    x = torch.rand(2000, generator=torch.Generator().manual_seed(0)) - 0.5
    program = tsopt.capture(model, x)
    assert "exceed" in difference(reordered, model, Example((x,)))
    assert difference(reordered, model, Example((x,)), reference=program) == ""
    assert difference(scaled(model, 3), model, Example((x,)), reference=program)


def test_inputs_are_taken_before_they_are_written():
    def adds(x):
        x.add_(1)
        return x * 2

    x = torch.zeros(3)
    assert difference(adds, adds, Example((x,))) == ""
    assert torch.equal(x, torch.zeros(3))
    assert "an input differs from eager after the call" in difference(lambda x: (x + 1) * 2, adds, Example((x,)))


def test_caches_of_the_call_grow_once():
    def grows(x, cache):
        cache.append(x)
        return torch.stack(cache).sum(0)

    cache = [torch.ones(3)]
    assert difference(grows, grows, Example((torch.ones(3), cache))) == ""
    assert len(cache) == 1
    assert difference(lambda x, cache: x + cache[0], grows, Example((torch.ones(3), cache)))


def test_state_is_advanced_once_and_left_as_it_was():
    model = Counter().eval()
    executable = tsopt.compile(tsopt.capture(model, torch.zeros(2)), "eager")
    version = model.count._version
    assert executable_difference(executable, model, Example((torch.zeros(2),))) == ""
    assert torch.equal(model.count, torch.zeros(2))
    assert model.count._version > version, "written and put back"
    assert "state" in difference(lambda x: x + 1, model, Example((torch.zeros(2),)))


def test_what_the_python_of_the_model_counts_is_left_as_it_was():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls, self.seen = 0, []

        def forward(self, x):
            self.calls += 1
            self.seen.append(1)
            return x

    model = Counts()
    assert difference(lambda x: x, model, Example((X,))) == ""
    assert difference(model, model, Example((X,)), runs_python=True) == ""
    assert (model.calls, model.seen) == (0, [])


def test_random_models_draw_the_same_and_leave_random_numbers_as_they_were():
    def draws(x):
        return x + torch.rand(2, 6) + random.random() + float(np.random.rand())

    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    wanted = torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    assert difference(draws, draws, Example((X,))) == ""
    found = torch.rand(3), random.random(), np.random.rand()
    assert torch.equal(found[0], wanted[0])
    assert found[1:] == wanted[1:]


def test_the_grad_mode_is_that_of_the_call(model):
    seen = []

    def asks(x):
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return x

    with torch.inference_mode():
        difference(asks, asks, Example((X,)))
    with torch.no_grad():
        difference(asks, asks, Example((X,)))
    assert seen == [(False, True)] * 2 + [(False, False)] * 2


# Optimized.


@pytest.fixture
def audited(model, optimized_by):
    """What `optimize` makes, with an audit at every call from the third."""

    def make(candidate=None, **options):
        program = tsopt.capture(model, X)
        executable = tsopt.compile(program, "eager")
        if candidate is not None:
            executable._runs(candidate)
        audits = Audits(1.0, clock=Clock(), choose=lambda below: 0)
        audits.left = 2
        report = optimized_by("eager").report
        return Optimized(
            *(model, program, executable, report, Example((X,)), lambda example: None, "eager"),
            audits=audits,
            **options,
        )

    return make


def test_a_right_engine_is_audited_in_silence(audited, model):
    fast = audited()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            torch.testing.assert_close(fast(X), model(X))
    assert fast._audits.count >= 1
    assert fast.backend == "eager"
    assert fast.executable is not None


def test_a_wrong_engine_is_eager_from_the_audited_call_on_and_says_so_once(audited, model):
    fast = audited(lambda inputs: [model(inputs[0]) + 1])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = [fast(X) for _ in range(5)]
    wanted = model(X)
    assert [torch.allclose(value, wanted) for value in found] == [False, False, True, True, True]
    assert len(said) == 1
    assert "output: 6 of 6 values" in str(said[0].message)
    assert "attributes, globals, hooks" in str(said[0].message)
    assert fast.executable is None
    assert "since then: Sequential runs in eager mode from now on" in fast.report.text
    assert fast.report.to_json()["audits"]


def test_what_eager_raises_is_raised_from_the_audit_on(audited, model):
    fast = audited()
    model.register_forward_pre_hook(lambda module, args: 1 / 0)
    fast(X)
    fast(X)
    with pytest.warns(UserWarning, match="eager raises ZeroDivisionError"), pytest.raises(ZeroDivisionError):
        fast(X)


def test_a_model_in_training_mode_says_nothing(audited, model):
    fast = audited()
    wanted = fast(X)
    model.append(nn.Dropout(0.9))
    model.train()
    for _ in range(4):
        assert torch.equal(fast(X), wanted)
    assert fast.executable is not None


def test_threads_may_call_while_one_audits(audited, model):
    fast = audited()
    wanted, wrong = model(X), []

    def calls():
        for _ in range(50):
            with torch.no_grad():
                if not torch.allclose(fast(X), wanted):
                    wrong.append(1)

    workers = [threading.Thread(target=calls) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []
    assert fast._audits.count >= 1


def test_optimize_audits_unless_told_otherwise(mlp, mlp_input):
    options = {"seconds": 0.05, "isolate": False, "cache": False, "backends": ("eager",)}
    fast = tsopt.optimize(mlp, mlp_input, **options)
    assert fast.executable is None or fast._audits.share == 0.01
    fast = tsopt.optimize(mlp, mlp_input, audit=0, **options)
    assert fast._audits.share == 0


def test_in_a_fork_nobody_has_the_turn_of_a_thread_that_is_gone():
    audits = Audits(clock=Clock(), choose=middle)
    with audits.turn():  # as by a thread of the parent
        audits.forked()
        assert audits.left < NEVER
        with audits.turn() as audited:
            assert audited


@pytest.mark.parametrize("dynamic", [None, {"x": {0: "n"}, "y": {0: "m"}}])
@pytest.mark.parametrize("twice", [True, False])
def test_audits_and_verification_find_the_tensors_of_a_call_wherever_they_stand(twice, dynamic):
    model = lambda x, y: x @ y.T + 1  # noqa: E731
    x, y = torch.randn(3, 4), torch.randn(5, 4)
    program = tsopt.capture(model, (x, x.clone()) if twice else {"x": x, "y": y}, dynamic=dynamic)
    run = tsopt.compile(program, "eager")
    call = Example((x, x)) if twice else Example((), {"y": y, "x": x})
    for other in (model, lambda x, y: run(x=x, y=y) if not twice else run(x, y)):
        assert difference(other, model, call, reference=program) == ""
        assert difference(lambda x, y, other=other: other(x, y) * (1 + 2e-6), model, call, reference=program) == ""
        assert difference(lambda x, y, other=other: other(x, y) + 1, model, call, reference=program)
    assert tsopt.verify(model, run, tsopt.example(*call.args, **call.kwargs)).ok
