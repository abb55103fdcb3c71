"""A pytest plug-in: the fixture `tsopt_check`, which fails a test where a model has become slower or less accurate.

    def test_it_is_still_fast(tsopt_check):
        tsopt_check(model, example_input, max_slowdown=0.05)

`pytest --tsopt-baseline DIRECTORY` compares with the baselines there, a file for each call; `--tsopt-update` as well
writes them. Without `--tsopt-baseline` such tests are skipped. Imports nothing heavy.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tsopt.regression.outcome import Check

FOUND = pytest.StashKey[list["Check"]]()
DIRECTORY = pytest.StashKey[Path]()  # of the baselines
READABLE = 80  # characters of a test's name in that of its file


class Undecided(UserWarning):
    """Noise leaves open whether a model has become slower."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tsopt", "speed and accuracy of optimized models")
    group.addoption(
        "--tsopt-baseline",
        metavar="DIRECTORY",
        type=Path,
        help="Compare with the baselines in this directory; without it, tests with `tsopt_check` are skipped.",
    )
    group.addoption("--tsopt-update", action="store_true", help="Measure, and write these baselines.")


def pytest_configure(config: pytest.Config) -> None:
    directory, update = config.getoption("--tsopt-baseline"), config.getoption("--tsopt-update")
    if update and directory is None:
        raise pytest.UsageError("--tsopt-update needs --tsopt-baseline DIRECTORY")
    if directory is not None and _is_distributed(config):
        raise pytest.UsageError(
            "--tsopt-baseline cannot be combined with -n and --dist: models must not be timed side by side"
        )
    if directory is not None:
        config.stash[DIRECTORY] = config.invocation_params.dir / directory


def _is_distributed(config: pytest.Config) -> bool:
    """Whether pytest-xdist runs tests in processes of its own, or this is one of them."""
    return config.getoption("dist", "no") != "no" or hasattr(config, "workerinput")


@pytest.fixture
def tsopt_check(request: pytest.FixtureRequest) -> Callable[..., Check]:
    """`tsopt.check` with a baseline for each call of each test: `tsopt_check(model, example_input, **options)`."""
    directory = request.config.stash.get(DIRECTORY, None)
    if directory is None:
        pytest.skip("pass --tsopt-baseline DIRECTORY to compare with the baselines there")
    update: bool = request.config.getoption("--tsopt-update")
    count = 0

    def checked(model: Any, example_input: Any, **options: Any) -> Check:
        nonlocal count
        from tsopt.regression.check import check

        count += 1
        place = directory / _file_name(request.node.nodeid, count)
        if not update and not place.exists():
            pytest.fail(f"no baseline at {place}: create it with --tsopt-update", pytrace=False)
        found = check(model, example_input, place, update=update, **options)
        request.config.stash.setdefault(FOUND, []).append(found)
        if not found.ok:
            pytest.fail(found.text, pytrace=False)
        if found.verdict == "undecided":
            warnings.warn(Undecided(found.text), stacklevel=2)
        return found

    return checked


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    found = config.stash.get(FOUND, [])
    if found:
        terminalreporter.section("tsopt")
        for item in found:
            slowdown = "" if item.slowdown is None else f", {item.slowdown}"
            terminalreporter.write_line(f"{item.sentence}{slowdown}")


def _file_name(node: str, count: int) -> str:
    """`tests-test_model-test_it-2-1f0c52ab.json`: with a digest, because other names may look the same."""
    readable = re.sub(r"[^A-Za-z0-9_]+", "-", node.replace(".py::", "-")).strip("-")[-READABLE:]
    digest = hashlib.sha256(f"{node} {count}".encode()).hexdigest()[:8]
    return f"{readable}-{count}-{digest}.json"
