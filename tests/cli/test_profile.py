from __future__ import annotations

import json

import pytest

from tests.runtime.racing.helpers import fast_timings
from tsopt import api
from tsopt.errors import UsageError
from tsopt.runtime.profiling import engines

pytestmark = pytest.mark.usefixtures("quick")

WITH_ENGINE = ("--backends", "onnxruntime", "--no-isolate", "--no-cache")


@pytest.fixture
def ran(tsopt, write, monkeypatch):
    """`tsopt profile`, where ONNX Runtime wins."""
    fast_timings(monkeypatch, wins="ONNX Runtime")
    write()

    def run(*options):
        return tsopt("profile", "m.py", *WITH_ENGINE, *options)

    return run


def test_each_layer_has_a_row_with_its_time_in_torch_and_in_the_winner(ran):
    found = ran()
    assert found.code == 0, found.err
    header, *rows = found.out.splitlines()
    assert header.split("  ")[0] == "layer"
    assert "eager + passes ms" in header
    assert "ONNX Runtime ms" in header
    assert {"0", "2", "elsewhere", "the"} <= {row.split()[0] for row in rows if row}
    assert found.out.splitlines()[-1].startswith("ONNX Runtime wins, ")


def test_json_and_a_file_have_all_layers(ran, tmp_path):
    found = ran("--top", "1", "--json", "-o", "new/p.json")
    assert found.code == 0, found.err
    assert found.json["engines"] == ["eager + passes", "ONNX Runtime"]
    assert {"0", "2"} <= {item["layer"] for item in found.json["layers"]}
    assert json.loads((tmp_path / "new" / "p.json").read_text()) == found.json


def test_only_the_most_expensive_layers_are_shown(ran, tmp_path):
    found = ran("--top", "1", "-o", "p.md")
    assert "more layers" in found.out
    assert "saved: p.md" in found.out
    assert "more layers" not in (tmp_path / "p.md").read_text()


def test_the_time_of_training_is_estimated(ran):
    found = ran("--training", "1000x3")
    assert "training on 1,000 samples for 3 epochs would take about" in found.out
    assert ran("--training", "1000x3", "--json").json["training"]["samples"] == 1000


def test_where_eager_wins_its_ops_are_timed(tsopt, write):
    write()
    found = tsopt("profile", "m.py", "--json")
    assert found.code == 0, found.err
    assert found.json["engines"] == ["eager + passes"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--frontend", "parts"), "a partitioned model cannot be profiled"),
        (("--top", "0"), "--top"),
        (("--training", "50000"), "--training '50000' is not SAMPLESxEPOCHS"),
        (("-o", "p.csv"), "unknown suffix"),
        (("-o", "m.py/p.md"), "the output cannot be written"),
        (("--backends", "nonsense"), "unknown backend 'nonsense'"),
    ],
)
def test_mistakes_are_told_before_the_work_and_leave_nothing(tsopt, write, tmp_path, options, message):
    write()
    found = tsopt("profile", "m.py", *options)
    assert found.code == 2
    assert message in found.err
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"m.py"}


def test_a_model_elsewhere_is_refused_before_it_is_optimized(ran, monkeypatch):
    def refuse(inputs):
        assert [value.device.type for value in inputs] == ["cpu"]
        raise UsageError("only a model on the CPU can be profiled")

    def optimize(*args, **options):
        pytest.fail("it was optimized")

    monkeypatch.setattr(engines, "check_on_cpu", refuse)
    monkeypatch.setattr(api, "optimize", optimize)
    found = ran()
    assert found.code == 2
    assert "only a model on the CPU can be profiled" in found.err


def test_a_page_for_a_browser_is_saved(ran, tmp_path):
    found = ran("--html", "new/p.html", "-o", "p.json")
    assert found.code == 0, found.err
    assert found.out.splitlines()[-2:] == ["saved: p.json", "saved: new/p.html"]
    text = (tmp_path / "new" / "p.html").read_text()
    assert "Roofline" in text
    assert "Time over working set" in text


def test_a_page_has_the_suffix_of_one(tsopt, write):
    write()
    for command in ("profile", "export", "quantize", "bench"):
        found = tsopt(command, "m.py", "--html", "p.txt")
        assert found.code == 2
        assert "--html p.txt has an unknown suffix" in found.err
