"""A sandbox for all tests of a file, and races in it."""

from __future__ import annotations

import os

import pytest

from tests.runtime.helpers import candidates
from tests.runtime.sandbox.helpers import FAULTY, leftovers, running
from tsopt.compiler.calls.example import Example
from tsopt.runtime.racing import race as race_module
from tsopt.runtime.racing.contenders import RaceSettings
from tsopt.runtime.racing.race import race
from tsopt.runtime.racing.speedup import Timing
from tsopt.runtime.sandbox.processes import descendants
from tsopt.runtime.sandbox.sandbox import Sandbox


@pytest.fixture(scope="module")
def sandbox(mlp_program):
    """One helper process for all tests: it must live through what its children do."""
    files, children = set(leftovers(os.getpid())), set(running(descendants(os.getpid())))  # of other tests
    with Sandbox() as made:
        made.open({"fp32": mlp_program}, threads=1, memory=4 << 30)
        yield made
    assert set(leftovers(os.getpid())) <= files
    assert set(running(descendants(os.getpid()))) <= children


@pytest.fixture
def try_all(sandbox, mlp, mlp_input, mlp_program):
    def run(*backends: str, seconds: float = 60.0, progress=None, **options):
        sandbox.seconds = seconds
        sandbox.open = lambda *_, **__: None  # it is open
        found = race(
            mlp,
            mlp_program,
            {"fp32": mlp_program},
            Example((mlp_input,)),
            RaceSettings(candidates=candidates(*backends), seconds=0.2, **options),
            sandbox=sandbox,
            progress=progress,
        )
        return {row.name.removeprefix(FAULTY): row for row in found.rows}, found

    return run


@pytest.fixture
def no_winner(monkeypatch):
    """A winner would be compiled in this process."""
    monkeypatch.setattr(race_module, "measure", lambda calls, *_, **__: {name: Timing((1.0,) * 7) for name in calls})
