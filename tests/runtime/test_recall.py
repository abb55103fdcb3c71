"""The second `optimize` of a model: what was raced is taken over, and checked again before it is believed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import tsopt
from tsopt.runtime import cache, recall
from tsopt.runtime.backend import Executable
from tsopt.runtime.eager import EagerBackend
from tsopt.runtime.race import EAGER, Race
from tsopt.runtime.report import Row
from tsopt.runtime.timing import Speedup, Timing

X = torch.linspace(-1, 1, 8).reshape(2, 4)
TITLE = "eager + passes"


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()


class Slow(nn.Module):
    """So slow in eager that any executable wins: it sleeps when it is not traced."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x):
        if not torch.compiler.is_compiling():
            nap()
        return self.model(x)


def nap() -> None:
    torch.ones(400, 400) @ torch.ones(400, 400)


@pytest.fixture(autouse=True)
def _steady(monkeypatch):
    monkeypatch.setattr(recall, "STEADY", math.inf)


@pytest.fixture
def races(monkeypatch):
    """The backends of every race that is run."""
    seen = []

    def counted(*args, **options):
        seen.append(options["backends"])
        return real(*args, **options)

    real = recall.race
    monkeypatch.setattr(recall, "race", counted)
    return seen


def optimize(model=None, **options):
    given = {"backends": ("eager", "torchscript"), "seconds": 0.02} | options
    return tsopt.optimize(Slow(make()) if model is None else model, X, **given)


def entry() -> cache.Entry:
    (path,) = cache.entries()
    return cache.find(path.stem, ("eager", "torchscript"), 0.0)


def test_the_second_time_only_the_winner_is_raced(races):
    first = optimize()
    assert first.report.winner != EAGER
    assert first.report.cached == ""
    again = optimize()
    assert races[0] == ("eager", "torchscript")
    assert [len(backends) for backends in races] == [2, 1]
    assert again.report.winner == first.report.winner
    assert [row.timing for row in again.report.rows] == [row.timing for row in first.report.rows]
    assert "verified and timed again now" in again.report.cached
    assert "from the cache: raced 20" in str(again.report)
    assert again.report.to_json()["cached"] == again.report.cached
    torch.testing.assert_close(again(X), make()(X).detach())


def test_other_weights_take_the_winner_over_and_compute_their_own(races):
    optimize()
    other = optimize(Slow(make(seed=1)))
    assert [len(backends) for backends in races] == [2, 1]
    torch.testing.assert_close(other(X), make(seed=1)(X).detach())


def test_without_the_cache_nothing_is_taken_over_and_nothing_kept(races):
    optimize(cache=False)
    assert cache.entries() == []
    optimize()
    fast = optimize(cache=False)
    assert fast.report.cached == ""
    assert [len(backends) for backends in races] == [2]


def test_eager_that_won_wins_again_without_a_race(races, monkeypatch):
    optimize()
    (path,) = cache.entries()
    cache.keep(path.stem, replace(entry(), winner=EAGER, backend="eager", why="nothing is faster"))
    found = optimize()
    assert (found.backend, found.report.winner, found.report.why) == ("eager", EAGER, "nothing is faster")
    assert [len(backends) for backends in races] == [2]


def test_a_winner_that_is_not_faster_any_more_is_raced_anew(races):
    optimize()
    (path,) = cache.entries()
    plain = make()
    program = tsopt.capture(plain, X)
    key = cache.key_of(program, tsopt.transform(program), ("null",), None)
    title = "null"
    cache.keep(key, replace(entry(), rows=(*entry().rows, Row(title)), winner=title, backend="null"))
    path.unlink()
    races.clear()
    found = optimize(plain, backends=("null",))
    assert races == [("null",), ("null",)]
    assert found.report.cached == ""


def test_a_winner_that_is_wrong_now_is_raced_anew(races, monkeypatch):
    optimize(backends=("eager",))
    real = EagerBackend.compile

    def wrong(self, program) -> Executable:
        made = real(self, program)
        run = made._run
        made._run = lambda inputs: [value + 1 for value in run(inputs)]
        made.quick = None
        return made

    monkeypatch.setattr(EagerBackend, "compile", wrong)
    found = optimize(backends=("eager",))
    assert [len(backends) for backends in races] == [1, 1, 1]
    assert (found.report.winner, found.report.cached) == (EAGER, "")
    torch.testing.assert_close(found(X), make()(X).detach())


def test_an_entry_whose_winner_has_another_title_is_not_believed(races):
    optimize()
    (path,) = cache.entries()
    cache.keep(path.stem, replace(entry(), winner=TITLE, backend="torchscript"))
    assert optimize().report.cached == ""


@pytest.mark.parametrize("status", ["timed out", "out of memory", "crashed"])
def test_a_race_in_which_somebody_was_out_of_luck_is_not_kept(status, monkeypatch):
    rows = (Row(EAGER, timing=Timing((1.0,))), Row("x", speedup=Speedup(1.0, 1.0, 1.0)), Row("y", status))
    monkeypatch.setattr(recall, "race", lambda *_, **__: Race(rows, EAGER, "", None))
    optimize()
    assert cache.entries() == []


def test_a_race_on_a_busy_machine_is_not_kept(monkeypatch):
    rows = (Row(EAGER, timing=Timing((1.0,))), Row("x", speedup=Speedup(2.0, 0.7, 5.0)))
    monkeypatch.setattr(recall, "race", lambda *_, **__: Race(rows, EAGER, "", None))
    monkeypatch.setattr(recall, "STEADY", 1.5)
    optimize()
    assert cache.entries() == []


def test_a_race_with_a_backend_of_ones_own_is_not_kept():
    optimize(backends=("tsopt.runtime.eager:EagerBackend",))
    assert cache.entries() == []


def test_a_sweep_measures_anew(races):
    optimize()
    tsopt.sweep(Slow(make()), X, backends=("eager",), seconds=0.02)
    assert [len(backends) for backends in races] == [2]
