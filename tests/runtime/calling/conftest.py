"""Fixtures of the tests of calls."""

from __future__ import annotations

import pytest

from tests.runtime.racing.helpers import fast_timings


@pytest.fixture
def wins(monkeypatch):
    """The first backend wins whatever was measured."""
    fast_timings(monkeypatch, wins="ONNX Runtime")
    monkeypatch.setattr("tsopt.runtime.racing.preparation.HOPELESS", 1e9)
