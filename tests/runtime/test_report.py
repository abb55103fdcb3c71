from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.runtime.reports import FULL, record
from tsopt.runtime.report import pass_json, rule_records


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


def test_json_of_a_pass_holds_places_and_counts():
    found = pass_json(record("p", "a a", "a:x b:y"))
    assert found["rules"] == [
        {"rule": "a", "done": 2, "declined": {"x": 1}},
        {"rule": "b", "done": 0, "declined": {"y": 1}},
    ]
    assert found["done"][1] == {"rule": "a", "where": "place 1"}
    assert found["declined"][1] == {"rule": "b", "where": "place 1", "reason": "y"}
    assert found["weight_bytes"] == {"before": 1000, "after": 1500}
