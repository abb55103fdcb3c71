"""The plug-in for pytest, in runs of their own."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from tsopt.pytest_plugin import _file_name

TEST = """
import torch, tsopt

class Telling:
    def __init__(self, verdict):
        self.ok, self.verdict, self.slowdown = verdict != "slower", verdict, None
        self.sentence = self.text = f"net: {verdict}"

def test_it(tsopt_check):
    tsopt_check(None, None)
    tsopt_check(None, None, max_slowdown=0.1)
"""
CHECK = """
import pytest
from tsopt.regression import check

VERDICT = "ok"
CALLS = []

@pytest.fixture(autouse=True)
def _told(monkeypatch):
    def told(model, example, place, *, update, **options):
        from test_it import Telling
        if update:
            place.parent.mkdir(exist_ok=True)
            place.write_text("{}")
        print("CALLED", place.name, update, options)
        return Telling(VERDICT)
    monkeypatch.setattr(check, "check", told)
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """pytest on TEST, where each check has this verdict."""
    importlib.import_module("tsopt.regression.check")  # pytester forgets what a run inside has imported
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(test_it=TEST)

    def ran(*options, verdict="ok"):
        pytester.makeconftest(CHECK.replace('"ok"', repr(verdict)))
        return pytester.runpytest_inprocess("-p", "tsopt.pytest_plugin", "-s", "-W", "always", *options)

    return ran


def test_without_a_baseline_it_is_skipped(run):
    found = run("-rs")
    found.assert_outcomes(skipped=1)
    found.stdout.fnmatch_lines(["*pass --tsopt-baseline DIRECTORY*"])


def test_a_baseline_that_is_missing_fails_and_says_what_to_do(run):
    found = run("--tsopt-baseline", "base")
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(["no baseline at */base/test_it-test_it-1-*.json: create it with --tsopt-update"])


def test_each_call_has_a_file_of_its_own(run, pytester):
    run("--tsopt-baseline", "base", "--tsopt-update").assert_outcomes(passed=1)
    assert sorted(item.name[:17] for item in (pytester.path / "base").iterdir()) == [
        "test_it-test_it-1",
        "test_it-test_it-2",
    ]
    found = run("--tsopt-baseline", "base")
    found.assert_outcomes(passed=1)
    found.stdout.fnmatch_lines(["*CALLED test_it-test_it-2-*.json False {'max_slowdown': 0.1}", "*tsopt*", "net: ok"])


def test_a_regression_fails_the_test_and_noise_warns(run):
    run("--tsopt-baseline", "base", "--tsopt-update").assert_outcomes(passed=1)
    found = run("--tsopt-baseline", "base", verdict="slower")
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(["net: slower"])
    found = run("--tsopt-baseline", "base", verdict="undecided")
    found.assert_outcomes(passed=1)
    found.stdout.fnmatch_lines(["*Undecided: net: undecided"])


def test_names_that_look_the_same_as_files_are_not_the_same_file():
    names = ["t.py::test[a.b]", "t.py::test[a-b]", "t-py::test[a b]", "x" * 1000, "y" + "x" * 999]
    made = [_file_name(name, count) for name in names for count in (1, 2)]
    assert len(set(made)) == len(made)
    assert max(map(len, made)) < 120


def test_options_that_make_no_sense_together_are_refused(run):
    found = run("--tsopt-update")
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines(["*--tsopt-update needs --tsopt-baseline*"])


@pytest.mark.parametrize("options", ["-n 2", "-n 1", "--tx 2*popen --dist load", "--tx popen -d"])
def test_models_are_not_timed_side_by_side(run, options):
    pytest.importorskip("xdist")
    found = run("-p", "xdist", *options.split(), "--tsopt-baseline", "base")
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines(["*must not be timed side by side*"])


def test_it_is_what_the_package_gives_to_pytest():
    (point,) = [point for point in entry_points(group="pytest11") if point.value == "tsopt.pytest_plugin"]
    assert point.load() is sys.modules["tsopt.pytest_plugin"]


def test_it_imports_nothing_heavy():
    program = "import sys, tsopt.pytest_plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
