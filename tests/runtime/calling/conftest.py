"""Fixtures of the tests of calls."""

from __future__ import annotations

import pytest

from tests.runtime.calling.graphs import Clock
from tests.runtime.racing.helpers import fast_timings
from tsopt.runtime.calling import graph_parts, partitioned
from tsopt.runtime.racing.row import EAGER
from tsopt.runtime.racing.speedup import Timing


@pytest.fixture
def clock(monkeypatch):
    """Graphs are timed on it, and weighed as they are for users."""
    monkeypatch.setattr(graph_parts, "time", Clock)
    monkeypatch.setattr(graph_parts, "LEAST_SHARE", 0.02)
    monkeypatch.setattr(graph_parts, "COVERED", 0.8)
    Clock.now = 0.0


@pytest.fixture
def wins(monkeypatch):
    """The first backend wins whatever was measured."""
    fast_timings(monkeypatch, wins="ONNX Runtime")
    monkeypatch.setattr("tsopt.runtime.racing.preparation.HOPELESS", 1e9)


@pytest.fixture
def parts_win(monkeypatch):
    """A model in parts, or as TorchScript, is faster than eager whatever was measured."""

    def measure(calls, inputs, **_):
        return {name: Timing((9.0, 9.01) * 4 if name == EAGER else (1.0, 1.01) * 4, 5) for name in calls}

    monkeypatch.setattr(partitioned, "measure", measure)
