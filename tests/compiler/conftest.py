from __future__ import annotations

import pytest

from tsopt.compiler import other_threads


@pytest.fixture
def single_threaded(monkeypatch):
    """No other threads, such as those of whatever runs the tests."""
    monkeypatch.setattr(other_threads, "_is_other", lambda thread: False)
