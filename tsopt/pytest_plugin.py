"""A pytest plug-in: the fixture `tsopt_check`, which fails a test where a model has become slower or less accurate.

    def test_it_is_still_fast(tsopt_check):
        tsopt_check(model, example_input, max_slowdown=0.05)

`pytest --tsopt-baseline DIRECTORY` compares with the baselines there, a file for each call; `--tsopt-update` as well
writes them. Without `--tsopt-baseline` such tests are skipped. Imports nothing heavy.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tsopt.regression.outcome import Check

FOUND = pytest.StashKey[list["Check"]]()


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


@pytest.fixture
def tsopt_check(request: pytest.FixtureRequest) -> Callable[..., Check]:
    """`tsopt.check` with a baseline for each call of each test: `tsopt_check(model, example_input, **options)`."""
    directory: Path | None = request.config.getoption("--tsopt-baseline")
    if directory is None:
        pytest.skip("pass --tsopt-baseline DIRECTORY to compare with the baselines there")
    update: bool = request.config.getoption("--tsopt-update")
    count = 0

    def checked(model: Any, example_input: Any, **options: Any) -> Check:
        nonlocal count
        from tsopt.regression.check import check

        count += 1
        place = directory / f"{_file_name(request.node.nodeid)}{'' if count == 1 else f'-{count}'}.json"
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


def _file_name(node: str) -> str:
    """`tests/test_model.py::test_it[2]` as a name of a file."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", node.removesuffix("]").replace(".py::", "-")).strip("-")
