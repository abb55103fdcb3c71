"""The file of a baseline: what is written is what is read, and what is no baseline is refused."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from tests.runtime.reports import FULL
from tsopt.errors import BundleError, UsageError
from tsopt.regression.baseline import Baseline, read_baseline
from tsopt.runtime.report import MODEL

BASELINE = Baseline("net", "ONNX Runtime", (3.0, 3.1), 10.0, 12, "cosine", 1.0, "a machine")


def test_what_is_written_is_what_is_read(tmp_path):
    assert read_baseline(BASELINE.save(tmp_path / "new" / "b.json")) == BASELINE
    sparse = Baseline("net", "eager", (1.0,))
    assert read_baseline(sparse.save(tmp_path / "b.json")) == sparse


def test_the_winner_of_a_report_counts_as_one_session(tmp_path):
    place = tmp_path / "r.json"
    place.write_text(json.dumps(FULL.to_json()))
    assert read_baseline(place) == Baseline(FULL.model, "ONNX Runtime", (2.0,), 2.0)


def test_a_report_that_eager_won_is_a_baseline_too(tmp_path):
    place = tmp_path / "r.json"
    place.write_text(json.dumps(replace(FULL, winner_key=MODEL).to_json()))
    assert read_baseline(place) == Baseline(FULL.model, "eager", (1.0,), 2.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"),
        ("[1]", "it is not a JSON object"),
        ("{}", "'tsopt_baseline' is not 1"),
        ("\xff\x00", ""),
        ("[" * 100_000, ""),
        ({"speedups": []}, "'speedups' is not a list"),
        ({"speedups": [1.0] * 1001}, "'speedups' is not a list"),
        ({"speedups": [0]}, "'speedups' is not positive"),
        ({"speedups": [True]}, "'speedups' is not a finite number"),
        ({"speedups": [float("nan")]}, "'speedups' is not a finite number"),
        ({"eager_ms": "10"}, "'eager_ms' is not a finite number"),
        ({"eager_ms": -1}, "'eager_ms' is not positive"),
        ({"macs": 1.5}, "'macs' is not a whole number"),
        ({"score": float("inf")}, "'score' is not a finite number"),
        ({"winner": 3}, "'winner' is not a text"),
        ({"tsopt_baseline": 2}, "'tsopt_baseline' is not 1"),
    ],
)
def test_what_is_no_baseline_is_refused(tmp_path, text, said):
    place = BASELINE.save(tmp_path / "b.json")
    place.write_text(text if isinstance(text, str) else json.dumps(json.loads(place.read_text()) | text))
    with pytest.raises(UsageError, match="the file is not a baseline") as caught:
        read_baseline(place)
    assert said in caught.value.why
    assert "--update" in caught.value.fix


@pytest.mark.parametrize("rows", [3, [3], [], [{"name": []}], [{"name": "x", "speedup": 2}]])
def test_a_report_that_says_nothing_of_its_winner_is_refused(tmp_path, rows):
    place = tmp_path / "r.json"
    place.write_text(json.dumps({"model": "net", "winner": "x", "rows": rows}))
    with pytest.raises(UsageError, match="not a baseline"):
        read_baseline(place)


def test_a_file_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="the baseline cannot be read") as caught:
        read_baseline(tmp_path / "none.json")
    assert caught.value.why == "No such file or directory"
    monkeypatch.setattr("tsopt.regression.baseline.MOST_BYTES", 10)
    with pytest.raises(UsageError, match="not a baseline") as caught:
        read_baseline(BASELINE.save(tmp_path / "b.json"))
    assert "more than" in caught.value.why


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError):
        BASELINE.save(tmp_path / "file" / "b.json")
    assert os.listdir(tmp_path) == ["file"]
