from __future__ import annotations

import threading

import pytest

from tsopt.compiler import other_threads


@pytest.fixture
def single_threaded(monkeypatch):
    """No other threads, such as those of whatever runs the tests."""
    monkeypatch.setattr(other_threads, "_is_other", lambda thread: False)


@pytest.fixture
def another_thread():
    """One that runs for as long as a test does."""
    go = threading.Event()
    thread = threading.Thread(target=go.wait)
    thread.start()
    yield thread
    go.set()
    thread.join()
