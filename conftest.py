"""What tests and the examples of README.md and docs/ share: haste, and nothing of the user's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest_plugins = ("pytester",)  # runs of their own, for the plug-in


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


@pytest.fixture(scope="session", autouse=True)
def _hasty() -> Iterator[None]:
    """Timing that takes no care of being right, and no process besides that of the test.

    No test believes what a race in this process measures, and each process that imports torch takes seconds. For the
    whole session, so that fixtures of all scopes are made so.
    """
    from tsopt import hybrid_choice, request
    from tsopt.regression import sessions
    from tsopt.runtime.bundles import store
    from tsopt.runtime.calling import graph_parts, in_service, partitioned
    from tsopt.runtime.racing import between_ops, new_sizes, preparation, timing, tournament

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(partitioned.PART, "seconds", 0.05)
        patch.setattr(graph_parts, "LEAST_SHARE", 0.0)
        patch.setattr(graph_parts, "COVERED", 2.0)
        patch.setattr(preparation, "HOPELESS", float("inf"))
        patch.setattr(preparation, "HOPELESS_IF_LONG", float("inf"))
        patch.setattr(preparation, "seconds_of", lambda *_: 1e-3)  # so many calls as tests count on
        patch.setattr(tournament, "SETTLE", 0.0)
        patch.setattr(tournament, "SAMPLE", 5e-4)
        patch.setattr(tournament, "IN_A_ROW", 1)
        patch.setattr(timing, "LONGEST_REST", 2e-3)
        patch.setattr(sessions, "SECONDS", 0.05)
        patch.setattr(timing, "PAUSE", 1e-3)
        patch.setattr(new_sizes, "NEW_SIZES", 0)  # no winner is slow with new sizes
        patch.setattr(between_ops, "TURNS", 0)  # nor beside torch's threads
        patch.setattr(hybrid_choice, "loss", lambda *_: "")  # nor is what is done around its calls
        patch.setattr(in_service, "LONG", float("inf"))  # nor is it timed in service
        patch.setattr(request, "COMPILED_TOGETHER", float("inf"))  # however long that takes on a busy machine
        patch.setattr(request, "is_on_cpu", lambda example: False)  # candidates run in the process of the test
        patch.setattr(store, "try_out", lambda *args: None)  # bundles are opened without a trial
        yield


@contextmanager
def _in_processes() -> Iterator[None]:
    from tsopt import request
    from tsopt.runtime.bundles import probe, store
    from tsopt.runtime.sandbox import sandbox

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request, "is_on_cpu", sandbox.is_on_cpu)
        patch.setattr(store, "try_out", probe.try_out)
        yield


@pytest.fixture(scope="module")
def as_shipped(_hasty: None) -> Iterator[None]:
    """Candidates and bundles in processes of their own, for the files that test these."""
    with _in_processes():
        yield


@pytest.fixture
def once_as_shipped(_hasty: None) -> Iterator[None]:
    """The same for a single test."""
    with _in_processes():
        yield


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Path]]:
    """Returns a new cache directory at each call; the user's is never touched."""
    place, numbers = tmp_path_factory.mktemp("caches"), itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TSOPT_CACHE_DIR", str(place / "session"))
        yield lambda: place / str(next(numbers))


@pytest.fixture(autouse=True)
def _own_cache(caches: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees what another has raced."""
    # NOTE: not `mktemp`, which reads the names of all directories that exist, for each of thousands of tests.
    monkeypatch.setenv("TSOPT_CACHE_DIR", str(caches()))
