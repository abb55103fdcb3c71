"""A race calls a shadow of the model where that does what the model does; nothing of the model is seen to change."""

from __future__ import annotations

import weakref
from queue import SimpleQueue

import pytest
import torch
from torch import nn

import tsopt
from bench.hazards import threads
from tests.runtime.racing.helpers import fast_timings
from tsopt.compiler.capture.capture import capture_apart
from tsopt.compiler.capture.shadow import shadow_of
from tsopt.runtime.racing import rehearsal
from tsopt.runtime.racing.rehearsal import rehearsal_of, stand_in

OPTIONS = {"seconds": 0.02, "isolate": False, "cache": False, "backends": ("eager",)}
X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Told(nn.Module):
    """Tells who is called, the module itself or a copy, and counts in a buffer."""

    called = SimpleQueue()  # a list would be put back to what it was

    def __init__(self, counts=False):
        super().__init__()
        self.layer, self.counts = nn.Linear(4, 4), counts
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        Told.called.put(self)
        if self.counts:
            self.count.add_(1)
        return self.layer(x)


def drained(queue):
    return [queue.get() for _ in range(queue.qsize())]


def rehearsed(model):
    program, apart = capture_apart(model, X)
    assert apart
    return rehearsal_of(model, program.signature, shadow_of(model, written=program.state.values())), program


WINNERS = pytest.mark.parametrize("wins", ["eager", "eager + passes"])


@WINNERS
def test_the_model_itself_is_called_once_where_that_changes_nothing(monkeypatch, wins):
    fast_timings(monkeypatch, wins)
    Told.called, model = SimpleQueue(), Told().eval()
    tsopt.optimize(model, X, **OPTIONS)
    called = drained(Told.called)
    assert sum(who is model for who in called) == 1
    assert len(called) > 5


@WINNERS
def test_a_model_that_counts_is_never_called(monkeypatch, wins):
    fast_timings(monkeypatch, wins)
    Told.called, model = SimpleQueue(), Told(counts=True).eval()
    version = model.count._version
    fast = tsopt.optimize(model, X, **OPTIONS)
    assert not any(who is model for who in drained(Told.called))
    assert (int(model.count), model.count._version) == (0, version)
    assert fast.program.state["count"] is model.count
    fast(X), fast(X)
    assert int(model.count) == 2


def test_what_was_made_writes_the_buffers_of_the_model_and_not_those_of_the_race():
    model = Told(counts=True).eval()
    rehearsal, program = rehearsed(model)
    staged = rehearsal.program(program)
    assert staged.state["count"] is rehearsal.model.count
    executable = rehearsal.ended(tsopt.compile(staged, "eager"))
    executable(X)
    assert (int(model.count), int(rehearsal.model.count)) == (1, 0)
    assert rehearsal.program(staged).state["count"] is model.count


def test_flags_that_eval_mode_sets_are_those_of_the_shadow():
    class Flagged(nn.Linear):
        def forward(self, x):
            flags.put((self is model, self.training))
            return super().forward(x)

    flags, model = SimpleQueue(), Flagged(4, 4).train()
    tsopt.optimize(model, X, eval_mode=True, **OPTIONS)
    seen = drained(flags)
    assert {of_model for of_model in seen if of_model[0]} <= {(True, True)}
    assert (False, False) in seen
    assert model.training


class Sentinel:
    def __init__(self):
        self.name = "linear"


LINEAR = Sentinel()


class Compares(nn.Module):
    """Goes by whether an object is the one that it knows; a copy is another."""

    def __init__(self):
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), LINEAR

    def forward(self, x):
        return self.layer(x) if self.kind is LINEAR else x


def test_a_shadow_that_answers_otherwise_is_not_believed():
    model = Compares().eval()
    program, apart = capture_apart(model, X)
    assert not apart
    assert program.node_count == 1
    fast = tsopt.optimize(model, X, **OPTIONS)
    assert fast.report.rows[1].status == "ok"


def test_a_model_that_returns_an_object_of_its_own_is_called_itself():
    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.kind = nn.Linear(4, 4), Sentinel()

        def forward(self, x):
            return self.layer(x), self.kind

    model = Returns().eval()
    rehearsal, _ = rehearsed(model)
    assert rehearsal.model is model
    fast = tsopt.optimize(model, X, **OPTIONS)
    assert fast(X)[1] is model.kind
    assert fast.report.rows[1].status == "ok"


# ---- two threads that call, and a third that works ---------------------------------------------------------

QUICK = ("a convolution and batch norm", "a counter in a buffer", "a child that knows its parent")
HOW = {
    "optimize": {"work": threads.optimize},
    "engines": {"work": threads.with_engines},
    "hybrid": {"serve": threads.hybrid},
    "new forms": {"serve": threads.optimized},
}


@pytest.mark.parametrize("name", QUICK)
def test_calls_in_other_threads_are_right_while_a_model_is_optimized(name):
    make, given = threads.MODELS[name]
    assert threads.watch(make().eval(), given, **HOW["optimize"]).kind == "right"


def test_flags_of_training_are_not_seen_to_change():
    case = next(case for case in threads.CASES if "eval_mode" in case.name)
    assert case.outcome("tsopt").kind == "right"


@pytest.mark.parametrize("how", HOW)
def test_ten_thousand_calls_in_other_threads(how, fuzz_factor):
    if fuzz_factor == 1:
        pytest.skip("a slow campaign: make fuzz")
    for name, (make, given) in threads.MODELS.items():
        torch.manual_seed(0)
        found = threads.watch(make().eval(), given, calls=10_000, forms=6, **HOW[how])
        assert found.kind == "right", f"{name}: {found.why}"


class Known(nn.Module):
    """What others know by its identity, which a copy does not have."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        return x * SCALES.get(self, 1.0)


class Counted(Known):
    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Reached(Known):
    """Reaches its own state by a table that is too large to be looked through."""

    def forward(self, x):
        TABLE["calls"].add_(1)
        return x + 1


SCALES, TABLE = weakref.WeakKeyDictionary(), dict.fromkeys(range(100))


@pytest.mark.parametrize("kind", [Known, Counted])
def test_what_answers_otherwise_does_not_stand_in(kind):
    model = kind().eval()
    written = [model.calls] if kind is Counted else []
    assert stand_in(model, written, tsopt.example(X), always_compared=True) is not None
    SCALES[model] = 2.0
    assert stand_in(model, written, tsopt.example(X), always_compared=True) is None
    assert float(model.calls) == 0


def test_what_writes_to_the_model_does_not_stand_in(monkeypatch):
    monkeypatch.setattr(rehearsal, "others_run", lambda: False)  # else what it has written may be theirs
    model = Reached().eval()
    TABLE["calls"] = model.calls
    assert stand_in(model, [model.calls], tsopt.example(X)) is None
    assert float(model.calls) == 0
