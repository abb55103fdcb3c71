"""Eager that won a race: believed for a while, and compared again before it is believed for longer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.runtime.racing.cached import entry, optimize, set_paces
from tsopt.runtime.racing import cache, cached_race
from tsopt.runtime.racing.row import EAGER, LOOPS, MODEL, Loop, Row
from tsopt.runtime.racing.speedup import Speedup, Timing


@pytest.fixture(autouse=True)
def _paced(monkeypatch):
    set_paces(monkeypatch)


class Clock:
    """The time, as a test says it."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(cached_race, "time", made)
    return made


def with_eager_as_winner(**changes) -> None:
    """Makes the one entry say that eager has won, and that the others were twice as slow."""
    (path,) = cache.entries()
    base = Timing((1.0,) * 7)
    slower = {"speedup": Speedup(0.5, 0.45, 0.55), "timing": Timing((2.0,) * 7)}
    rows = [replace(row, timing=base) if row.name == EAGER else replace(row, **slower) for row in entry().rows]
    said = replace(entry(), rows=tuple(rows), winner=MODEL, why="nothing is faster")
    cache.keep(path.stem, replace(said, **changes))


def measured_again(monkeypatch, **gains):
    """The best of the others has these gains when it is timed against eager again. Returns for how long it is."""
    real, asked = cached_race.race, []

    def race(*args, **options):
        asked.append(args[4].seconds)
        found = real(*args, **options)
        return replace(found, rows=(*found.rows[:-1], replace(found.rows[-1], **gains)), winner=MODEL, executable=None)

    monkeypatch.setattr(cached_race, "race", race)
    return asked


def test_eager_that_won_wins_again_without_a_race(races, clock):
    optimize()
    with_eager_as_winner()
    found = optimize()
    assert (found.backend, found.report.winner, found.report.why) == ("eager", EAGER, "nothing is faster")
    assert [len(backends) for backends in races] == [2]


def test_that_eager_wins_is_not_believed_for_ever(races, clock):
    """The entry is wrong: anything beats this model in eager. The best of its others is timed again, and then all."""
    optimize()
    with_eager_as_winner()
    winners = [optimize().report.winner for _ in range(cached_race.REUSES)]
    assert winners[:-1] == [EAGER] * (cached_race.REUSES - 1)
    assert winners[-1] != EAGER
    assert [len(backends) for backends in races] == [2, 1, 2]


def test_that_eager_wins_is_not_believed_for_long(races, clock):
    optimize()
    with_eager_as_winner()
    clock.now += cached_race.UNCHECKED - 1
    assert optimize().report.winner == EAGER
    clock.now += 1
    assert optimize().report.winner != EAGER
    assert [len(backends) for backends in races] == [2, 1, 2]


def test_eager_that_still_wins_is_taken_over_for_as_long_again(races, clock, monkeypatch):
    optimize()
    with_eager_as_winner(recalls=cached_race.REUSES - 1)
    asked = measured_again(monkeypatch, speedup=Speedup(0.8, 0.7, 0.9))
    clock.now += cached_race.UNCHECKED
    found = optimize()
    assert "timed against eager again: 0.80x [0.70, 0.90]" in found.report.cached
    assert (entry().recalls, entry().checked) == (0, clock.now)
    assert optimize().report.cached == f"raced on {entry().date}"
    assert asked == [0.02]
    assert [len(backends) for backends in races] == [2, 1]


@pytest.mark.parametrize("when", LOOPS)
def test_eager_that_loses_in_another_loop_loses(races, clock, monkeypatch, when):
    optimize()
    with_eager_as_winner(recalls=cached_race.REUSES - 1)
    with monkeypatch.context() as patch:
        loop = Loop(when, Timing((1.0,) * 7), Speedup(1.5, 1.4, 1.6))
        measured_again(patch, speedup=Speedup(1.0, 0.99, 1.01), loops=(loop,))
        assert not optimize().report.cached


def test_a_busy_machine_decides_nothing_about_eager(races, clock, monkeypatch):
    optimize()
    with_eager_as_winner(recalls=cached_race.REUSES - 1)
    measured_again(monkeypatch, speedup=Speedup(3.0, 0.1, 90.0))
    assert [optimize().report.winner for _ in range(2)] == [EAGER, EAGER]
    assert [len(backends) for backends in races] == [2, 1, 1]


def test_eager_that_won_against_nobody_is_raced_anew_when_it_is_time(races, clock):
    optimize()
    wrong = (row if row.name == EAGER else Row(row.name, "failed", "it did", key=row.key) for row in entry().rows)
    with_eager_as_winner(
        rows=tuple(replace(row, timing=Timing((1.0,) * 7), speedup=None) if row.name == EAGER else row for row in wrong)
    )
    found = [optimize().report.winner for _ in range(cached_race.REUSES)]
    assert found[-1] != EAGER
    assert [len(backends) for backends in races] == [2, 2]


@pytest.mark.parametrize("winner", [True, False], ids=["eager", "another"])
def test_an_old_race_is_run_again(races, clock, winner):
    optimize()
    if winner:
        with_eager_as_winner(checked=clock.now)
    (path,) = cache.entries()
    cache.keep(path.stem, replace(entry(), when=clock.now, checked=clock.now + cached_race.OLDEST))
    clock.now += cached_race.OLDEST + 1
    assert optimize().report.cached == ""
    assert [len(backends) for backends in races] == [2, 2]
