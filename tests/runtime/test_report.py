from __future__ import annotations

import json
from dataclasses import replace

from tests.runtime.helpers import report
from tsopt.runtime.accuracy import Verdict
from tsopt.runtime.report import COLUMNS, Row
from tsopt.runtime.timing import Speedup, Timing

BASE = Row("eager", timing=Timing((2.0, 2.0, 4.0), 9.0))
GOOD = Row(
    "ONNX Runtime",
    timing=Timing((1.0, 1.0, 1.2), 9.0),
    speedup=Speedup(2.0, 1.8, 2.2),
    accuracy=Verdict(True, "element", 3e-7, ("example", "random"), ("large: eager raises ValueError",)),
    compile_seconds=1.25,
    notes=("takes negative indices",),
)
WRONG = Row("TorchScript", "wrong", "output on the large input: NaN at other places than eager")
GONE = Row("eager + passes", "unsupported", "no float8 (fc1, model.py:12)")
FULL = replace(report(), rows=(BASE, GOOD, WRONG, GONE), winner="ONNX Runtime", why="2.00x as fast")


def test_a_row_has_a_cell_for_every_column():
    assert {len(row.cells()) for row in FULL.rows} == {len(COLUMNS)}
    assert BASE.cells() == ("eager", "2.00", "3.60", "1.00x", "baseline", "-", "-")
    assert GOOD.cells() == ("ONNX Runtime", "1.00", "1.16", "2.00x [1.80, 2.20]", "faster", "3.0e-07", "1.2")
    assert WRONG.cells() == ("TorchScript", "-", "-", "-", "wrong", "-", "-")


def test_every_loser_has_its_reason_in_the_text():
    assert "  TorchScript: output on the large input: NaN" in FULL.text
    assert "  eager + passes: no float8 (fc1, model.py:12)" in FULL.text


def test_the_text_says_how_the_winner_was_verified_and_what_was_not_compared():
    assert "verified: equal within rounding on 2 input sets, max difference 3.00e-07" in FULL.text
    assert "  not compared: large: eager raises ValueError" in FULL.text
    assert "note (ONNX Runtime): takes negative indices" in FULL.text


def test_the_speed_up_is_the_winners():
    assert FULL.speedup == 2.0
    assert replace(FULL, winner="eager").speedup == 1.0


def test_json_keeps_what_machines_compare():
    found = json.loads(json.dumps(FULL.to_json(), allow_nan=False))
    assert found["rows"][1]["speedup"] == {"ratio": 2.0, "low": 1.8, "high": 2.2}
    assert found["rows"][1]["accuracy"]["skipped"] == ["large: eager raises ValueError"]
    assert found["rows"][1]["first_call_ms"] == 9.0
    assert (found["rows"][2]["status"], found["rows"][2]["verdict"]) == ("wrong", "wrong")
