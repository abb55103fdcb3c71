"""Fixtures of the tests of calls."""

from __future__ import annotations

import pytest

from tests.runtime.racing.helpers import fast_timings
from tsopt.runtime.calling import partitioned
from tsopt.runtime.calling.partitioned import PARTS
from tsopt.runtime.racing.speedup import Timing


@pytest.fixture
def wins(monkeypatch):
    """The first backend wins whatever was measured."""
    fast_timings(monkeypatch, wins="ONNX Runtime")
    monkeypatch.setattr("tsopt.runtime.racing.preparation.HOPELESS", 1e9)


@pytest.fixture
def parts_win(monkeypatch):
    def measure(calls, inputs, **_):
        return {name: Timing((1.0, 1.01) * 4 if name == PARTS else (9.0, 9.01) * 4, 5) for name in calls}

    monkeypatch.setattr(partitioned, "measure", measure)
