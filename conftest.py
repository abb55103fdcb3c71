"""What tests and the examples of README.md and docs/ share: haste, and nothing of the user's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.hookimpl(tryfirst=True)  # before those that are not asked for are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test under `sliced(count)` so many stay in `make test`, spread evenly; the others are slow."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sliced") is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_one in cases.values():
        count = of_one[0].get_closest_marker("sliced").args[0]  # type: ignore[union-attr]
        kept = {i * len(of_one) // count for i in range(count)}
        for i, item in enumerate(of_one):
            if i not in kept:
                item.add_marker("slow")


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing that takes no care of being right: no test believes what a race in this process measures."""
    from tsopt.runtime.calling import partitioned
    from tsopt.runtime.racing import preparation, timing, tournament

    monkeypatch.setitem(partitioned.PART, "seconds", 0.05)
    monkeypatch.setattr(preparation, "HOPELESS", float("inf"))
    monkeypatch.setattr(preparation, "HOPELESS_IF_LONG", float("inf"))
    monkeypatch.setattr(preparation, "seconds_of", lambda call, inputs: 1e-3)  # so many calls as tests count on
    monkeypatch.setattr(tournament, "SETTLE", 0.0)
    monkeypatch.setattr(timing, "PAUSE", 1e-3)


@pytest.fixture(autouse=True)
def _together(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates run in the process of the test, which saves seconds each; test_sandbox.py is about the others."""
    if request.node.path.name != "test_sandbox.py":
        from tsopt import request as optimize_request

        monkeypatch.setattr(optimize_request, "is_on_cpu", lambda example: False)


@pytest.fixture(autouse=True)
def _untried(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bundles are opened without a process of their own first, which saves seconds each; test_probe.py is about it."""
    if request.node.path.name != "test_probe.py":
        from tsopt.runtime.bundles import store

        monkeypatch.setattr(store, "try_out", lambda *args: None)


@pytest.fixture(scope="session", autouse=True)
def _not_the_users_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TSOPT_CACHE_DIR", str(tmp_path_factory.mktemp("cache") / "tsopt"))
        yield


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees what another has raced."""
    monkeypatch.setenv("TSOPT_CACHE_DIR", str(tmp_path_factory.mktemp("cache") / "tsopt"))
