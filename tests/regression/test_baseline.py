"""Baseline files: they are read as they were written, and other files are refused."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace

import pytest

from tests.runtime.reports import FULL
from tsopt.errors import BundleError, UsageError
from tsopt.regression.baseline import Baseline, check_replaceable, machine_of, read_baseline, versions_of
from tsopt.regression.sessions import QUICKEST
from tsopt.runtime.racing.row import MODEL
from tsopt.runtime.racing.speedup import Timing

BASELINE = Baseline(
    "net", "ONNX Runtime", (3.0, 3.1), "f32[1]", 10.0, 13.0, 12, 4, 30, "cosine", 1.0, "here", "torch 2"
)


def test_what_is_written_is_what_is_read(tmp_path):
    assert read_baseline(BASELINE.save(tmp_path / "new" / "b.json")) == BASELINE
    sparse = Baseline("net", "eager", (1.0,))
    assert read_baseline(sparse.save(tmp_path / "b.json")) == sparse


def test_the_winner_of_a_report_counts_as_one_session(tmp_path):
    place = tmp_path / "r.json"
    place.write_text(json.dumps(FULL.to_json()))
    found = read_baseline(place)
    where = machine_of(FULL.environment), versions_of(FULL.environment)
    assert found == Baseline(FULL.model, "ONNX Runtime", (2.0,), eager_ms=2.0, machine=where[0], versions=where[1])
    assert all(where)


def test_of_a_report_count_calls_that_nothing_has_disturbed(tmp_path):
    eager, *others = FULL.rows
    disturbed = replace(eager, timing=Timing(tuple(range(2, 42))))  # milliseconds: most take longer than the quickest
    place = tmp_path / "r.json"
    place.write_text(json.dumps(replace(FULL, rows=(disturbed, *others)).to_json()))
    assert read_baseline(place).eager_ms == pytest.approx(disturbed.timing.percentile(QUICKEST))
    old = json.loads(place.read_text())
    del old["rows"][0]["p5_ms"]
    place.write_text(json.dumps(old))
    with pytest.raises(UsageError, match="the file is not a baseline") as caught:
        read_baseline(place)
    assert "p5_ms" in caught.value.why
    place.write_text(json.dumps(old | {"winner": "eager"}))  # which is not timed where there is nothing to race with
    assert (read_baseline(place).speedups, read_baseline(place).eager_ms) == ((1.0,), None)


def test_a_report_that_eager_won_is_a_baseline_too(tmp_path):
    place = tmp_path / "r.json"
    place.write_text(json.dumps(replace(FULL, winner_key=MODEL).to_json()))
    found = read_baseline(place)
    assert (found.winner, found.speedups, found.eager_ms) == ("eager", (1.0,), 2.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"),
        ("[1]", "it is not a JSON object"),
        ("{}", "'tsopt_baseline' is not 2"),
        ("\xff\x00", ""),
        ("[" * 100_000, ""),
        ({"speedups": []}, "'speedups' is not a list"),
        ({"speedups": [1.0] * 1001}, "'speedups' is not a list"),
        ({"speedups": [0]}, "'speedups' is not positive"),
        ({"speedups": [True]}, "'speedups' is not a number"),
        ({"speedups": [float("nan")]}, "'speedups' is not a number"),
        ({"speedups": [1e-300]}, "'speedups' is not positive"),
        ({"eager_ms": "10"}, "'eager_ms' is not a number"),
        ({"eager_ms": -1}, "'eager_ms' is not positive"),
        ({"macs": 1.5}, "'macs' is not a number"),
        ({"macs": 10**400}, "'macs' is not a number"),
        ({"ops": -1}, "'ops' is not a number of ops"),
        ({"functions": True}, "'functions' is not a number of functions"),
        ({"score": float("inf")}, "'score' is not a number"),
        ({"score": 10**400}, "'score' is not a number"),
        ({"winner": 3}, "'winner' is not a text"),
        ({"over_layers": [1.0]}, "'over_layers' is not a list of as many numbers as there are speed-ups"),
        ({"over_layers": 1.0}, "'over_layers' is not a list"),
        ({"are_short": 1}, "'are_short' is neither true nor false"),
        ({"tsopt_baseline": 1}, "'tsopt_baseline' is not 2"),
    ],
)
def test_other_files_are_refused(tmp_path, text, said):
    place = BASELINE.save(tmp_path / "b.json")
    place.write_text(text if isinstance(text, str) else json.dumps(json.loads(place.read_text()) | text))
    with pytest.raises(UsageError, match="the file is not a baseline") as caught:
        read_baseline(place)
    assert said in caught.value.why
    assert "--update" in caught.value.fix


def test_a_baseline_of_any_version_may_be_replaced(tmp_path):
    place = BASELINE.save(tmp_path / "b.json")
    for text in ("", place.read_text(), json.dumps(json.loads(place.read_text()) | {"tsopt_baseline": 3})):
        place.write_text(text)
        check_replaceable(place)
    check_replaceable(tmp_path / "new.json")


def test_a_report_may_be_replaced_also_one_that_is_no_baseline(tmp_path):
    place = tmp_path / "r.json"
    for report in (FULL, replace(FULL, winner_key="torchscript")):
        place.write_text(json.dumps(report.to_json()))
        check_replaceable(place)


@pytest.mark.parametrize(
    "text",
    [
        *('{"name": "a package"}', "[1]", "import torch", "[" * 100_000, "\0"),
        *('{"rows": [["mine"]]}', '{"rows": [{"name": "eager"}], "winner": "eager", "model": "net"}'),
    ],
)
def test_nothing_else_is_replaced(tmp_path, text):
    (tmp_path / "other").write_text(text)
    with pytest.raises(UsageError, match="the file is not a baseline, and would be overwritten"):
        check_replaceable(tmp_path / "other")


def test_a_link_still_leads_to_the_baseline(tmp_path):
    real, link = tmp_path / "shared" / "b.json", tmp_path / "b.json"
    link.symlink_to(real)
    assert BASELINE.save(link) == link
    real.chmod(0o640)
    newer = replace(BASELINE, score=0.5)
    newer.save(link)
    assert link.is_symlink()
    assert read_baseline(real) == newer
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_no_device_or_pipe_is_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="it is not a file"):
        check_replaceable(tmp_path / "pipe")
    with pytest.raises(UsageError, match="it is not a file"):
        check_replaceable(os.devnull)


@pytest.mark.parametrize("rows", [3, [3], [], [{"name": []}], [{"name": "x", "speedup": 2}]])
def test_a_report_that_says_nothing_of_its_winner_is_refused(tmp_path, rows):
    place = tmp_path / "r.json"
    place.write_text(json.dumps({"model": "net", "winner": "x", "rows": rows}))
    with pytest.raises(UsageError, match="not a baseline"):
        read_baseline(place)


def test_an_environment_that_is_none_is_refused(tmp_path):
    place = tmp_path / "r.json"
    place.write_text(json.dumps(FULL.to_json() | {"environment": {"cpu": 3}}))
    with pytest.raises(UsageError, match="not a baseline"):
        read_baseline(place)


def test_texts_are_lines_that_a_table_can_hold(tmp_path):
    found = read_baseline(replace(BASELINE, winner="a\nb | \u202e" + "x" * 10_000).save(tmp_path / "b.json"))
    assert found.winner.startswith("a b | ?")
    assert len(found.winner) <= 400


def test_a_file_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="the baseline cannot be read") as caught:
        read_baseline(tmp_path / "none.json")
    assert caught.value.why == "No such file or directory"
    with pytest.raises(UsageError, match="the baseline cannot be read"):
        read_baseline("a\0b")
    monkeypatch.setattr("tsopt.regression.baseline.MOST_BYTES", 10)
    with pytest.raises(UsageError, match="not a baseline") as caught:
        read_baseline(BASELINE.save(tmp_path / "b.json"))
    assert "more than" in caught.value.why


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError):
        BASELINE.save(tmp_path / "file" / "b.json")
    assert os.listdir(tmp_path) == ["file"]
