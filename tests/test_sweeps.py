"""One model in several settings: what is measured, how it is shown, what is refused."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import tsopt
from tests.runtime.reports import BASE, FULL, GOOD
from tsopt import sweeps
from tsopt.runtime.racing.speedup import Speedup
from tsopt.sweeps import COLUMNS, Result, Setting, Sweep, batch_of, resized

MODEL = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
X = torch.arange(8.0).reshape(2, 4)
QUICK = {"seconds": 0.05, "backends": ("eager",), "isolate": False}


class Fixed(nn.Module):
    """Takes one row."""

    def forward(self, x):
        return x.reshape(1, 4).relu()


@pytest.fixture(scope="module")
def found():
    return tsopt.sweep(MODEL, X, threads=(1, 2), batch_sizes=(1, 3), **QUICK)


def test_every_combination_is_raced(found):
    settings = [(result.setting.threads, result.setting.batch) for result in found.results]
    assert settings == [(1, 1), (2, 1), (1, 3), (2, 3)]
    assert [str(result.setting) for result in found.results][:2] == [
        "cpu, 1 thread, batch 1",
        "cpu, 2 threads, batch 1",
    ]
    assert all(result.report.winner for result in found.results)


def test_records_are_flat_and_have_numbers(found):
    records = found.records()
    assert len(records) == 8
    assert {record["candidate"] for record in records} == {"eager", "eager + passes"}
    for record in records:
        assert record["samples_per_second"] == pytest.approx(1e3 / record["p50_ms"] * record["batch"])
    winners = [[record["wins"] for record in result.records()] for result in found.results]
    assert winners == [[True, False]] * 4, "the winner is first"


def test_the_table_marks_the_winner_and_names_a_setting_once(found):
    cells = found.cells()
    assert all(len(row) == len(COLUMNS) for row in cells)
    assert [row[:3] for row in cells[:3]] == [("cpu", "1", "1"), ("", "", ""), ("cpu", "2", "1")]
    assert sum(row[3].endswith(" *") for row in cells) == 4
    assert "samples/s" in found.text
    assert "torch" in str(found).splitlines()[-1]
    assert " threads" not in found.machine[0], "each setting has its own"
    assert found.markdown.startswith("| device | threads | batch |")


def test_the_machine_is_no_part_of_a_reason_in_markdown(found):
    failed = Result(Setting("cpu", 1, 9), None, "it fails")
    _, reasons, machine = Sweep((*found.results, failed)).markdown.split("\n\n")
    assert "- eager: it fails" in reasons.splitlines()
    assert [machine] == found.machine
    assert found.markdown.split("\n\n")[-1:] == found.machine


def test_a_reason_of_several_lines_is_one_line():
    failed = Sweep((Result(Setting("cpu", 1, 9), None, "it fails\n* eager"),))
    assert failed.text.splitlines()[-1] == "eager: it fails * eager"


def test_json_and_csv_hold_the_same(found):
    results = json.loads(json.dumps(found.to_json()))["results"]
    assert [result["setting"]["batch"] for result in results] == [1, 1, 3, 3]
    assert results[0]["report"]["rows"][0]["p50_ms"] > 0
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [float(row["p50_ms"]) for row in rows] == [record["p50_ms"] for record in found.records()]


def test_names_that_no_file_can_hold_do_not_lose_the_races(found):
    failed = Result(Setting("cpu", 1, 9), None, "no float8 (mod\udce8le.py:12)\x1b[2J")
    made = Sweep((*found.results, failed)).to_csv()
    assert list(csv.DictReader(io.StringIO(made)))[-1]["reason"] == "no float8 (mod?le.py:12)?[2J"
    assert made.encode()


@pytest.mark.parametrize(("batch", "rate"), [(None, None), (0, 0.0), (4, 4000.0)])
def test_samples_are_counted_where_the_batch_is_known(batch, rate):
    made = Sweep((Result(Setting("cpu", 1, batch), FULL),))
    assert made.records()[0]["samples_per_second"] == rate
    assert made.cells()[0][6] == {None: "-", 0.0: "0.0"}.get(rate, "4,000")
    assert len(made.charts[1].series[0].points) == (rate is not None)


def test_an_interval_without_an_end_is_no_error():
    row = replace(GOOD, speedup=Speedup(2.0, 1.5, math.inf))
    made = Sweep((Result(Setting("cpu", 1, 1), replace(FULL, rows=(BASE, row))),))
    assert made.cells()[0][7:] == ("-", "undecided")


def test_frames_need_pandas(found, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    for made in (found, found.results[0].report):
        with pytest.raises(tsopt.UsageError, match="pandas") as caught:
            made.to_frame()
        assert caught.value.fix == "pip install pandas"


def test_frames_have_a_row_for_each_record(found):
    pytest.importorskip("pandas")
    assert list(found.to_frame()["batch"]) == [record["batch"] for record in found.records()]
    assert list(found.results[0].report.to_frame()["candidate"]) == ["eager", "eager + passes"]


def test_threads_are_set_back(found):
    before = torch.get_num_threads()
    tsopt.sweep(MODEL, X, threads=(before + 1,), **QUICK)
    assert torch.get_num_threads() == before


def test_a_setting_that_fails_is_a_result(capsys):
    found = tsopt.sweep(Fixed().eval(), X[:1], batch_sizes=(1, 2), **QUICK)
    assert found.results[0].report is not None
    assert "fails on the example" in found.results[1].reason
    assert found.records()[-1]["verdict"] == "failed"
    assert any("fails on the example" in reason for reason in found.reasons)
    assert found.to_json()["results"][1]["report"] is None


def test_one_setting_alone_raises_what_optimize_raises():
    with pytest.raises(tsopt.CaptureError):
        tsopt.sweep(Fixed().eval(), X[:1], batch_sizes=(2,), **QUICK)


def test_a_model_that_runs_in_no_setting_raises_what_optimize_raises():
    with pytest.raises(tsopt.NotReady, match="training mode") as caught:
        tsopt.sweep(nn.Sequential(nn.Linear(4, 2), nn.Dropout()).train(), X, threads=(1, 2), **QUICK)
    assert "eval()" in caught.value.fix


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_rows_are_repeated_or_dropped(batch):
    made = resized(tsopt.example(X, y=torch.tensor([7, 9])), batch)
    rows = [i % 2 for i in range(batch)]
    assert torch.equal(made.args[0], X[rows])
    assert made.kwargs["y"].tolist() == [[7, 9][i] for i in rows]
    assert batch_of(made) == batch


def test_images_keep_their_layout():
    image = torch.randn(1, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    assert resized(tsopt.example(image), 2).args[0].is_contiguous(memory_format=torch.channels_last)


def test_the_model_is_left_where_it_is():
    found = tsopt.sweep(MODEL, X, devices=("cpu",), **QUICK)
    assert found.results[0].setting.device == "cpu"
    assert all(parameter.device.type == "cpu" for parameter in MODEL.parameters())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"threads": (0,)}, "threads must be an integer from 1 to 1024, got 0"),
        ({"threads": (1, 10**6)}, "threads must be an integer from 1 to 1024, got 1000000"),
        ({"threads": ("2",)}, "threads must be integers, got '2'"),
        ({"threads": (True,)}, "threads must be integers, got True"),
        ({"threads": 2}, "threads must be a tuple, got 2"),
        ({"threads": range(0)}, "threads is empty"),
        ({"batch_sizes": 2}, "batch_sizes must be a tuple, got 2"),
        ({"batch_sizes": (1.5,)}, "batch_sizes must be integers, got 1.5"),
        ({"devices": "cpu"}, "devices must be a tuple, got 'cpu'"),
        ({"devices": (0,)}, "devices must be names, got 0"),
        ({"batch_sizes": (-1,)}, "batch size must be at least 1, got -1"),
        ({"devices": ()}, "devices is empty"),
        ({"devices": ("tpu9",)}, "'tpu9' cannot be used"),
        ({"devices": ("cuda:99",)}, "'cuda:99' cannot be used"),
        ({"devices": ("meta",)}, "'meta' cannot be used"),
        ({"backends": ("nonsense",), "threads": (1, 2)}, "unknown backend"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_before_the_work(options, text):
    with pytest.raises(tsopt.UsageError, match=text) as caught:
        tsopt.sweep(MODEL, X, **QUICK | options)
    assert caught.value.fix


@pytest.fixture
def asked(monkeypatch):
    """What each race was asked for; none is run."""
    seen = []

    def optimize(model, example, *, threads, **options):
        seen.append((threads, example.args[0].shape[0]))
        return SimpleNamespace(report=FULL)

    monkeypatch.setattr(sweeps, "optimize", optimize)
    return seen


def test_settings_may_be_read_once_and_be_numbers_of_numpy(asked):
    found = tsopt.sweep(MODEL, X, threads=iter((1, 2)), batch_sizes=np.array([1, 3]), devices=[torch.device("cpu")])
    assert asked == [(1, 1), (2, 1), (1, 3), (2, 3)]
    assert json.loads(json.dumps(found.to_json()))["results"][3]["setting"] == {
        "device": "cpu",
        "threads": 2,
        "batch": 3,
    }


def test_a_mistake_that_only_one_setting_shows_is_a_result():
    dynamic = {"input": {0: "b[2..4]"}}
    found = tsopt.sweep(MODEL, X, batch_sizes=(8, 2), dynamic=dynamic, **QUICK)
    failed, raced = found.results
    assert (failed.report, raced.reason) == (None, "")
    assert "8" in failed.reason
    with pytest.raises(tsopt.UsageError):
        tsopt.sweep(MODEL, X, batch_sizes=(8, 9), dynamic=dynamic, **QUICK)


def test_a_batch_that_no_memory_holds_is_a_result(asked):
    found = tsopt.sweep(MODEL, X, batch_sizes=(1, 1 << 60))
    assert asked == [(None, 1)]
    assert found.results[1].reason.startswith(f"no input with batch {1 << 60} can be made")


def test_memory_that_is_exhausted_without_a_word_is_a_result(asked, monkeypatch):
    def exhausted(example, batch):
        raise MemoryError

    monkeypatch.setattr(sweeps, "resized", exhausted)
    found = tsopt.sweep(MODEL, X, batch_sizes=(None, 8))
    assert asked == [(None, 2)]
    assert found.results[1].reason == "no input with batch 8 can be made; MemoryError"


@pytest.mark.parametrize("second", [torch.ones(3, 4), torch.tensor(1.0)])
def test_inputs_without_a_common_batch_cannot_be_resized(second):
    with pytest.raises(tsopt.UsageError, match="no common batch axis"):
        tsopt.sweep(lambda x, y: x.sum() + y, (X, second), batch_sizes=(1, 2), **QUICK)


def test_the_page_has_a_line_for_each_candidate_over_the_batch_size(found):
    latency, throughput = found.charts
    assert (latency.x, latency.y, throughput.y) == ("batch size", "ms of a call", "samples/s")
    assert {series.name for series in latency.series} == {
        f"{name}, {threads} threads" for name in ("eager", "eager + passes") for threads in (1, 2)
    }
    assert all([x for x, *_ in series.points] == [1, 3] for series in latency.series)
    assert found.html.count("<tr>") == 9
    assert "Fastest: eager (cpu, 1 thread, batch 1)" in found.html
    assert "iframe" in found._repr_html_()


def test_over_threads_where_the_batch_size_is_one(monkeypatch):
    found = tsopt.sweep(MODEL, X, threads=(1, 2), **QUICK)
    assert found.charts[0].x == "threads"
    assert [x for x, *_ in found.charts[0].series[0].points] == [1, 2]


def test_of_a_single_race_it_is_the_page_of_the_report():
    found = tsopt.sweep(MODEL, X, **QUICK)
    assert found.html == found.results[0].report.html


def test_calibration_that_can_be_read_once_serves_all_races(monkeypatch):
    seen = []

    def optimize(model, example, *, calibration, **options):
        seen.append(list(calibration))
        return SimpleNamespace(report=FULL)

    monkeypatch.setattr(sweeps, "optimize", optimize)
    tsopt.sweep(nn.Linear(2, 2), torch.ones(1, 2), threads=(1, 2), calibration=iter([1, 2, 3]))
    assert seen == [[1, 2, 3]] * 2
