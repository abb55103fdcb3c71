"""Which threads count as those of the user."""

from __future__ import annotations

import threading

import pytest

from tsopt.compiler import other_threads
from tsopt.compiler.other_threads import OURS, others_run


class _RefreshThread(threading.Thread):
    """Named as that of rich, which only redraws."""


@pytest.mark.parametrize(
    ("made", "name", "counts"),
    [(threading.Thread, "work", True), (threading.Thread, f"{OURS}work", False), (_RefreshThread, "work", False)],
)
def test_threads_of_our_own_and_those_that_only_draw_do_not_count(monkeypatch, made, name, counts):
    found = [threading.current_thread(), made(name=name)]
    monkeypatch.setattr(other_threads.threading, "enumerate", lambda: found)
    assert others_run() is counts
