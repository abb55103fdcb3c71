"""A clock that only callables move; races with a backend that goes wrong as each test likes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.helpers import candidates
from tests.runtime.racing.helpers import Behaviour
from tsopt.compiler.calls.example import Example
from tsopt.runtime.backends.table import BACKENDS, BackendInfo
from tsopt.runtime.racing import cached_race, timing, tournament
from tsopt.runtime.racing.contenders import RaceSettings
from tsopt.runtime.racing.race import race


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.spins_until = 0.0  # background threads use a core until then

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return min(self.now, self.spins_until)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def taking(self, seconds: float, log: list | None = None, name: str = ""):
        def call(*args, **kwargs):
            self.now += seconds
            if log is not None:
                log.append((name, args, kwargs))

        return call


SHIPPED = {
    (module, name): getattr(module, name)
    for module, name in ((timing, "LONGEST_REST"), (tournament, "SAMPLE"), (tournament, "IN_A_ROW"))
}


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    monkeypatch.setattr(timing, "THREADS", Path("no such directory"))
    monkeypatch.setattr(tournament, "time", made)
    for (module, name), shipped in SHIPPED.items():  # a clock that only jumps costs no time
        monkeypatch.setattr(module, name, shipped)
    return made


@pytest.fixture
def faulty_backend(monkeypatch):
    monkeypatch.setitem(BACKENDS, "faulty", BackendInfo("faulty", f"{Behaviour.__module__}:FaultyBackend", "faulty"))
    for name in ("compile", "run"):
        monkeypatch.setattr(Behaviour, name, None)
    monkeypatch.setattr(Behaviour, "refuses", False)


@pytest.fixture
def run_race(faulty_backend, mlp, mlp_input, mlp_program):
    def go(backends=("faulty", "eager"), sandbox=None, progress=None, **options):
        return race(
            mlp,
            mlp_program,
            {"fp32": mlp_program},
            Example((mlp_input,)),
            RaceSettings(candidates=candidates(*backends), seconds=1e-3, **options),
            sandbox=sandbox,
            progress=progress,
        )

    return go


@pytest.fixture
def races(monkeypatch):
    """The candidates of every race that is run."""
    seen = []

    def counted(*args, **options):
        seen.append(args[4].candidates)
        return real(*args, **options)

    real = cached_race.race
    monkeypatch.setattr(cached_race, "race", counted)
    return seen
