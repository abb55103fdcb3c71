from __future__ import annotations

import json

import pytest

from tests.regression.conftest import paces  # noqa: F401
from tests.runtime.racing.helpers import fast_timings

pytestmark = pytest.mark.usefixtures("quick")

WITH_ENGINE = ("--backends", "torchscript", "--no-isolate", "--no-cache")


@pytest.fixture
def ran(tsopt, write, paces, monkeypatch):  # noqa: F811
    """`tsopt check` against a baseline of 5 ms beside 10 ms in eager, where calls take `now` milliseconds."""
    fast_timings(monkeypatch, wins="TorchScript")
    write()
    paces(now=5.0)
    made = tsopt("check", "m.py", "--baseline", "new/b.json", "--update", *WITH_ENGINE)
    assert made.code == 0, made.err
    assert "saved as the baseline" in made.out
    assert "saved: new/b.json" in made.out

    def run(*options, now=5.0):
        paces(now=now)
        return tsopt("check", "m.py", "--baseline", "new/b.json", *WITH_ENGINE, *options)

    return run


def test_a_regression_has_exit_code_1(ran):
    good, bad = ran(), ran(now=5.6)
    assert (good.code, bad.code) == (0, 1)
    assert good.out.startswith("Sequential: ok")
    assert bad.out.startswith("Sequential: slower")
    quiet = ran("-q", now=5.6)
    assert (quiet.code, quiet.out) == (1, "")
    assert "Sequential: slower" in quiet.err


def test_limits_may_be_percentages(ran):
    assert ran("--max-slowdown", "20%", now=5.6).code == 0
    assert ran("--max-slowdown", "0.2", now=5.6).code == 0
    found = ran("--max-slowdown", "a lot")
    assert found.code == 2
    assert "'a lot' is not a fraction" in found.err
    found = ran("--max-slowdown", "5")
    assert found.code == 2
    assert "--max-slowdown 5 would be 500%" in found.err
    assert ran("--max-slowdown", "500%", now=5.6).code == 0


def test_the_comparison_is_saved_for_a_pull_request_and_for_programs(ran, tmp_path):
    found = ran("-o", "sum/c.md")
    assert "saved: sum/c.md" in found.out
    assert "created the directory sum" in found.out
    assert (tmp_path / "sum" / "c.md").read_text().startswith("### ")
    found = ran("--json", "-o", "c.json", now=5.6)
    assert found.code == 1
    assert json.loads((tmp_path / "c.json").read_text()) == found.json
    assert found.json["verdict"] == "slower"


def test_a_baseline_that_is_not_there_is_told_how_to_make(tsopt, write):
    write()
    found = tsopt("check", "m.py", "--baseline", "none.json", *WITH_ENGINE)
    assert found.code == 2
    assert "the baseline cannot be read" in found.err
    assert "--update" in found.err


def test_places_that_cannot_be_written_are_refused_before_the_work(tsopt, write, tmp_path):
    write()
    (tmp_path / "d").mkdir()
    assert "the output path is a directory" in tsopt("check", "m.py", "--baseline", "d", "--update").err
    assert "unknown suffix" in tsopt("check", "m.py", "--baseline", "b.json", "-o", "c.txt").err
    assert "-o b.json is the baseline" in tsopt("check", "m.py", "--baseline", "b.json", "-o", "b.json").err
