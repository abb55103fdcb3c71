from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.runtime.helpers import report
from tsopt.compiler.rewriting.pipeline import Declined, Done, PassRecord, Size
from tsopt.runtime.checking.accuracy import Verdict
from tsopt.runtime.racing.timing import ColdStart, Speedup, Timing
from tsopt.runtime.report import (
    COLUMNS,
    PASS_COLUMNS,
    Row,
    amount,
    arrow,
    pass_cells,
    pass_json,
    rule_cells,
    rule_records,
)

BASE = Row("eager", timing=Timing((2.0, 2.0, 4.0)))
GOOD = Row(
    "ONNX Runtime",
    key="onnxruntime",
    timing=Timing((1.0, 1.0, 1.2)),
    speedup=Speedup(2.0, 1.8, 2.2),
    accuracy=Verdict(True, "element", 3e-7, ("example", "random"), ("large: eager raises ValueError",)),
    compile_seconds=1.25,
    cold=ColdStart(9.0, 2),
    notes=("takes negative indices",),
)
WRONG = Row(
    "TorchScript", "wrong", "output on the large input: NaN at different positions than in eager", key="torchscript"
)
GONE = Row("eager + passes", "unsupported", "no float8 (fc1, model.py:12)", key="eager")
FULL = replace(report(), rows=(BASE, GOOD, WRONG, GONE), winner_key="onnxruntime", why="2.00x as fast")


def test_a_row_has_a_cell_for_every_column():
    assert {len(row.cells()) for row in FULL.rows} == {len(COLUMNS)}
    assert BASE.cells() == ("eager", "2.00", "3.60", "1.00x", "baseline", "-", "-", "-")
    assert GOOD.cells() == ("ONNX Runtime", "1.00", "1.16", "2.00x [1.80, 2.20]", "faster", "3.0e-07", "1.2", "9.00")
    assert WRONG.cells() == ("TorchScript", "-", "-", "-", "wrong", "-", "-", "-")


def test_every_loser_has_its_reason_in_the_text():
    assert "  TorchScript: output on the large input: NaN" in FULL.text
    assert "  eager + passes: no float8 (fc1, model.py:12)" in FULL.text


def test_the_text_says_how_the_winner_was_verified_and_what_was_not_compared():
    assert "verified: equal within rounding on 2 input sets, max difference 3.00e-07" in FULL.text
    assert "  not compared: large: eager raises ValueError" in FULL.text
    assert "note (ONNX Runtime): takes negative indices" in FULL.text


def test_the_speed_up_is_the_winners():
    assert FULL.speedup == 2.0
    assert replace(FULL, winner_key="model").speedup == 1.0


def test_json_keeps_what_machines_compare():
    found = json.loads(json.dumps(FULL.to_json(), allow_nan=False))
    assert found["rows"][1]["speedup"] == {"ratio": 2.0, "low": 1.8, "high": 2.2}
    assert found["rows"][1]["accuracy"]["skipped"] == ["large: eager raises ValueError"]
    assert found["rows"][1]["cold_start"] == {"first_call_ms": 9.0, "slow_calls": 2}
    assert "cold_start" not in found["rows"][0]
    assert (found["rows"][2]["status"], found["rows"][2]["verdict"]) == ("wrong", "wrong")


# ---- passes -----------------------------------------------------------------------------------------------


BEFORE, AFTER = Size(9, 1000, 64), Size(7, 1500, 32)


def record(name, done="", declined="", before=BEFORE, after=AFTER):
    """done: rules, by spaces; declined: `rule:reason`."""
    near = [item.split(":") for item in declined.split()]
    return PassRecord(
        name,
        bool(done),
        before,
        after,
        0.25,
        tuple(Done(rule, f"place {i}") for i, rule in enumerate(done.split())),
        tuple(Declined(rule, f"place {i}", reason) for i, (rule, reason) in enumerate(near)),
    )


def test_a_pass_has_a_cell_for_every_column():
    (cells,) = pass_cells([record("fuse", "a a b", "c:why c:why")])
    assert len(cells) == len(PASS_COLUMNS)
    assert cells == ("fuse", "9 -> 7", "1.0 kB -> 1.5 kB", "64 B -> 32 B", "a x2, b", "c x2", "250")
    assert pass_cells([record("idle", after=BEFORE)])[0][1:6] == ("9", "1.0 kB", "64 B", "-", "-")


def test_a_pass_of_many_rules_names_the_most_frequent():
    (cells,) = pass_cells([record("algebra", "a b b c d d d e f")])
    assert cells[4] == "d x3, b x2, a, 3 more"


def test_the_peak_is_in_the_text_and_in_json():
    found = replace(FULL, nodes=(9, 7), peak_bytes=(2_000_000, 1_500_000), passes=(record("fuse", "a"),))
    assert "op nodes 9 -> 7; peak of activations 2.0 MB -> 1.5 MB; numerics " in found.text
    assert found.to_json()["peak_bytes"] == {"before": 2_000_000, "after": 1_500_000}
    assert "64 B -> 32 B" in found.text
    assert "64 B -> 32 B" in found.markdown


def test_rules_are_counted_over_all_passes_in_order():
    found = rule_records([record("one", "a b"), record("two", "b c", "d:why"), record("one")])
    assert [(item.name, item.passes, len(item.done)) for item in found] == [
        ("a", ("one",), 1),
        ("b", ("one", "two"), 2),
        ("c", ("two",), 1),
        ("d", ("two",), 0),
    ]


@pytest.mark.parametrize(
    ("runs", "left"),
    [
        (["a:x a:y", "a:x a:y"], {"x": 1, "y": 1}),  # the same near misses, met again
        (["a:x a:y", "a:y"], {"y": 1}),
        (["a:x a:y", "b:z"], {}),  # gone, although nothing is said of the rule any more
        (["", "a:x a:x a:y"], {"x": 2, "y": 1}),
    ],
)
def test_near_misses_are_those_that_the_last_run_of_a_pass_left(runs, left):
    found = {item.name: item for item in rule_records([record("p", "c", run) for run in runs])}
    assert (found["a"].reasons if "a" in found else {}) == left


def test_a_rule_has_a_row_for_each_reason():
    assert rule_cells(rule_records([record("p", "a a b", "a:x a:y a:y c:z")])) == [
        ("a", "p", "2", "2", "y"),
        ("", "", "", "1", "x"),
        ("b", "p", "1", "-", ""),
        ("c", "p", "-", "1", "z"),
    ]


def test_json_of_a_pass_holds_places_and_counts():
    found = pass_json(record("p", "a a", "a:x b:y"))
    assert found["rules"] == [
        {"rule": "a", "done": 2, "declined": {"x": 1}},
        {"rule": "b", "done": 0, "declined": {"y": 1}},
    ]
    assert found["done"][1] == {"rule": "a", "where": "place 1"}
    assert found["declined"][1] == {"rule": "b", "where": "place 1", "reason": "y"}
    assert found["weight_bytes"] == {"before": 1000, "after": 1500}


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (44_600_000, "44.6 MB"),
        (2 * 10**9, "2.0 GB"),
        (5 * 10**15, "5000.0 TB"),
    ],
)
def test_amounts_of_bytes(count, text):
    assert amount(count) == text


def test_an_arrow_only_where_something_changed():
    assert arrow(3, 2) == "3 -> 2"
    assert arrow(3, 3) == "3"
    assert arrow(1_000_001, 1_000_002, amount) == "1.0 MB"
