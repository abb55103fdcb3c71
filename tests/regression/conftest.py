"""A model with its baseline, and sessions whose times are told, not measured."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

import tsopt
from tests.regression.models import OPTIONS, Net, X
from tests.runtime.racing.helpers import fast_timings
from tsopt.regression import sessions
from tsopt.regression.machine_state import FixedLayers, Meeting
from tsopt.runtime.racing.row import EAGER
from tsopt.runtime.racing.speedup import Timing

WOBBLE = (0.0, 0.01, -0.01, 0.005, -0.005)  # from session to session


@pytest.fixture
def paces(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """`paces(now=5.0, eager=10.0)`: milliseconds of a call, in each session off by a little.

    Args:
        scatter: times that little, for what is called `now`.
        error: what `now` fails with.
        meeting: microseconds that threads take to meet.
        layers: milliseconds of fixed layers, if they are known.
        small: milliseconds of small layers, which are timed beside short calls, if they are known.
        disturbed: how many of 20 calls of `now` take twice as long in each second session.

    Returns:
        What was timed in each session.
    """

    def told(
        *,
        now: float,
        eager: float = 10.0,
        before: float = 5.0,
        scatter: float = 1.0,
        error: str = "",
        meeting: float | None = 12.0,
        layers: float | None = None,
        small: float | None = None,
        disturbed: int = 0,
    ):
        timed: list[list[str]] = []

        def measure(calls, inputs, **_):
            off = 1 + scatter * WOBBLE[len(timed) % len(WOBBLE)]
            timed.append([*calls])
            ms = {EAGER: eager, sessions.NOW: now * off, sessions.BEFORE: before, sessions.SMALL: small}
            timings = {name: Timing((ms[name],) * 20) for name in timed[-1] if ms[name] is not None}
            slow = disturbed if len(timed) % 2 else 0
            timings[sessions.NOW] = Timing(tuple(ms[sessions.NOW] * (1 + (i < slow)) for i in range(20)))
            if error:
                timings[sessions.NOW] = Timing((), error=error)
            return timings

        monkeypatch.setattr(sessions, "measure", measure)
        monkeypatch.setattr(sessions, "rest", lambda: None)
        monkeypatch.setattr(Meeting, "__init__", lambda self: None)
        monkeypatch.setattr(Meeting, "microseconds", lambda self: meeting)
        monkeypatch.setattr(FixedLayers, "__init__", lambda self: None)
        monkeypatch.setattr(FixedLayers, "milliseconds", lambda self: layers)
        # A collection takes longer than all else here. The module itself stays as it is: `optimize` uses it too.
        monkeypatch.setattr(sessions, "gc", SimpleNamespace(collect=lambda: 0))
        return timed

    return told


@pytest.fixture
def model():
    return Net().eval()


@pytest.fixture
def baseline(model, paces, monkeypatch, tmp_path):
    """A file, with calls of 5 ms beside 10 ms in eager."""
    fast_timings(monkeypatch, wins="TorchScript")
    paces(now=5.0)
    tsopt.check(model, X, tmp_path / "b.json", update=True, **OPTIONS)
    return tmp_path / "b.json"
