"""Fixtures that several rooms of the tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write what the programs are now")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing that takes no care of being right: no test believes what a race in this process measures."""
    from tsopt.runtime import timing

    monkeypatch.setattr(timing, "SETTLE", 0.0)
    monkeypatch.setattr(timing, "PAUSE", 1e-3)


@pytest.fixture(autouse=True)
def _together(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates run in the process of the test, which saves seconds each; test_isolation.py is about the others."""
    if request.node.path.name != "test_isolation.py":
        from tsopt import api

        monkeypatch.setattr(api, "is_on_cpu", lambda example: False)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing that torch.compile keeps from another test, or for the next one."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session", autouse=True)
def _not_the_users_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TSOPT_CACHE_DIR", str(tmp_path_factory.mktemp("cache") / "tsopt"))
        yield


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees what another has raced."""
    monkeypatch.setenv("TSOPT_CACHE_DIR", str(tmp_path_factory.mktemp("cache") / "tsopt"))


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    """Compares a text with tests/golden/NAME.txt; `--update-golden` writes it."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert path.exists(), f"no golden {path.name}: run pytest --update-golden and read what it wrote"
        assert text == path.read_text()

    return check


@pytest.fixture(scope="session")
def fuzz_factor() -> int:
    """How many times more examples the slow campaigns run."""
    return 40 if os.environ.get("TSOPT_FUZZ") else 1
