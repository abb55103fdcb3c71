"""A clock that only callables move."""

from __future__ import annotations

import pytest

from tsopt.runtime.racing import timing, tournament


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.spins_until = 0.0  # threads that nobody waits for use a core until then

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


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    monkeypatch.setattr(tournament, "time", made)
    return made
