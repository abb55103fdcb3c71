"""What a report looks like: winner first, reasons below their rows, as wide as the terminal and no wider."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.runtime.reports import BASE, BEFORE, FULL, GOOD, WRONG, record
from tsopt.runtime.layer_table import LayerRecord
from tsopt.runtime.racing.row import Row
from tsopt.runtime.racing.speedup import Timing
from tsopt.runtime.rendering import (
    ANOTHER_LIMIT,
    COLUMNS,
    ITSELF,
    PASS_COLUMNS,
    amount,
    arrow,
    pass_cells,
    pass_lines,
    row_cells,
    rule_cells,
    text_table,
    three_digits,
)
from tsopt.runtime.report import rule_records

WIDE = replace(FULL, rows=(*FULL.rows, Row("a.module.of.mine:" + "Backend" * 6, "failed", "it " * 60, key="mine")))


def test_a_row_has_a_cell_for_every_column():
    assert {len(row_cells(row)) for row in FULL.rows} == {len(COLUMNS)}
    assert row_cells(BASE) == ("eager", "2.00", "3.60", "1.00x", "baseline", "-", "-", "-")
    assert row_cells(GOOD) == ("ONNX Runtime", "1.00", "1.16", "2.00x [1.80, 2.20]", "faster", "3.0e-07", "1.2", "9.00")
    assert row_cells(WRONG) == ("TorchScript", "-", "-", "-", "wrong", "-", "-", "-")


def test_the_winner_is_first_and_marked_then_come_the_others_by_speed():
    slow = Row("slow", timing=Timing((9.0,) * 7), key="slow")
    lines = replace(FULL, rows=(slow, *FULL.rows)).text.splitlines()
    assert lines[0] == "Model: ONNX Runtime wins, 2.00x as fast"
    names = ["* ONNX Runtime", "  eager ", "  slow", "  TorchScript", "  eager + passes"]
    places = [next(i for i, line in enumerate(lines) if line.startswith(name)) for name in names]
    assert places == sorted(places)


def test_bars_are_as_long_as_the_calls():
    by_name = {line.split()[0]: line.count("#") for line in FULL.text.splitlines() if "#" in line}
    assert by_name == {"*": 5, "eager": 10}
    assert "=" * 10 in "\n".join(line.text for line in FULL.lines(bar="="))
    assert "#" not in replace(FULL, rows=(replace(BASE, timing=None), WRONG), winner_key="model").text


def test_reasons_stand_below_the_rows_that_they_explain():
    lines = FULL.text.splitlines()
    at = {line.split("  ")[1].strip(): i for i, line in enumerate(lines) if line.startswith("  ")}
    assert lines[at["TorchScript"] + 1] == "    output on the large input: NaN at other places than eager"
    assert lines[at["eager + passes"] + 1] == "    no float8 (fc1, model.py:12)"


def test_the_winner_says_how_it_was_verified_and_what_was_not_compared():
    lines = FULL.text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("* ONNX Runtime"))
    assert lines[first + 1].startswith("    verified: equal within rounding on 2 input sets, max difference 3.00e-07")
    assert lines[first + 2 : first + 4] == [
        "    not compared: large: eager raises ValueError",
        "    note: takes negative indices",
    ]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(width):
    passes = tuple(record(name, "a b", "c:why") for name in ("one", "two"))
    lines = [line.text for line in replace(WIDE, passes=passes).lines(width=width)]
    assert max(map(len, lines)) <= width
    assert " ".join(" ".join(lines).split()).count("it it it") > 10, "nothing is cut off"
    assert width < 80 or any("2.00x [1.80, 2.20]" in line for line in lines)
    assert any("first ms" in line for line in lines) == (width == 200)


def test_lines_know_their_verdict():
    styled = {line.verdict for line in FULL.lines() if line.verdict}
    assert styled == {"faster", "baseline", "wrong", "unsupported"}


def test_what_was_not_measured_is_not_there():
    bare = replace(FULL, nodes=(0, 0), peak_bytes=(0, 0), stages=())
    for said in ("op nodes", "peak", "took", "numerics"):
        assert said not in bare.text
    full = replace(FULL, nodes=(9, 7), peak_bytes=(2_000_000, 1_500_000))
    assert "op nodes 9 -> 7; peak activation memory 2.0 MB -> 1.5 MB; numerics EXACT\n" in full.text


def test_what_took_the_time_is_said_without_what_took_none():
    spent = (("capture", 1.25), ("passes", 0.01), ("timing", 3.0))
    assert "\ntook 4.3 s: capture 1.2, timing 3.0\n" in replace(FULL, stages=spent).text
    assert "\ntook 0.0 s\n" in replace(FULL, stages=(("passes", 0.01),)).text


def test_what_comes_from_the_cache_is_said_at_once():
    assert replace(FULL, cached="raced 2026-01-01").text.splitlines()[1].startswith("from the cache: raced 2026-01-01")


def test_the_rest_is_said_at_the_end():
    found = replace(
        FULL,
        sizes="batch: 1..8",
        frontend="by TorchScript",
        not_isolated_because="no space",
        signatures=(("f32[2]", "captured"),),
        audits=("it differs",),
        files=(("tsopt", "m.tsopt"),),
        winner_key="model",
    ).text
    for said in (
        "sizes: batch: 1..8",
        "captured by TorchScript",
        "candidates ran in this process: no space",
        "call with a new signature (f32[2]): captured",
        "since then: it differs",
        "tsopt: m.tsopt",
        ITSELF,
    ):
        assert f"\n{said}" in found


def test_names_cannot_drive_a_terminal():
    assert "\x1b" not in replace(FULL, model="\x1b[2J").text


# ---- passes -----------------------------------------------------------------------------------------------


def test_passes_that_did_nothing_are_one_line():
    records = [record("dce"), record("fold", "a a b", "c:why"), record("cse"), record("dce")]
    lines = [line.text for line in pass_lines([replace(item, changed=bool(item.done)) for item in records])]
    assert [line.split()[0] for line in lines[:3]] == ["pass", "----", "fold"]
    assert lines[3:] == ["    rewrites: a x2, b", "    near misses: c", "2 passes found nothing to do: dce, cse"]


def test_a_pass_that_did_something_in_another_round_is_not_idle():
    lines = [line.text for line in pass_lines([record("dce"), record("dce", "a")])]
    assert not any("nothing to do" in line for line in lines)


def test_a_pass_that_failed_says_why():
    lines = list(pass_lines([replace(record("faulty"), failed="KeyError: 'oops'")]))
    assert [line.verdict for line in lines[2:]] == ["failed", ""]
    assert lines[3].text == "    the pass faulty was left out: KeyError: 'oops'"


def test_a_pass_has_a_cell_for_every_column():
    (cells,) = pass_cells([record("fuse", "a a b", "c:why c:why")])
    assert len(cells) == len(PASS_COLUMNS)
    assert cells == ("fuse", "9 -> 7", "1.0 kB -> 1.5 kB", "64 B -> 32 B", "a x2, b", "c x2", "250")
    assert pass_cells([record("idle", after=BEFORE)])[0][1:6] == ("9", "1.0 kB", "64 B", "-", "-")


def test_a_pass_of_many_rules_names_the_most_frequent():
    (cells,) = pass_cells([record("algebra", "a b b c d d d e f")])
    assert cells[4] == "d x3, b x2, a, 3 more"


def test_markdown_has_all_columns_and_the_peak():
    found = replace(FULL, passes=(record("fuse", "a"),)).markdown
    assert found.startswith("### Model: ONNX Runtime wins")
    assert "| " + " | ".join(COLUMNS) + " |" in found
    assert found.index("| ONNX Runtime |") < found.index("| eager |")
    assert "64 B -> 32 B" in found


def test_a_rule_has_a_row_for_each_reason():
    assert rule_cells(rule_records([record("p", "a a b", "a:x a:y a:y c:z")])) == [
        ("a", "p", "2", "2", "y"),
        ("", "", "", "1", "x"),
        ("b", "p", "1", "-", ""),
        ("c", "p", "-", "1", "z"),
    ]


# ---- numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999_960, "1.0 MB"),
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


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.01234, "0.0123"), (99.96, "100"), (999.7, "1,000"), (123456.7, "123,457"), (30e-6, "3e-05")],
)
def test_three_digits(value, text):
    assert three_digits(value) == text


LAYERS = (LayerRecord("fc", "fc, m.py:3", "linear", 30.0, 8, 4),)


def int8_row(**values):
    return replace(GOOD, name="OpenVINO, precision int8-static", key="openvino?precision=int8-static", **values)


def test_a_report_says_why_int8_was_not_chosen():
    slow = int8_row(timing=Timing((1.5, 1.5, 1.5)))
    found = replace(FULL, rows=(*FULL.rows, slow), quantization=LAYERS)
    why = "int8 was not chosen: OpenVINO, precision int8-static takes 1.50 ms, ONNX Runtime 1.00 ms"
    assert f"{why}\nint8, which was not chosen: 1 of 1 layers in int8" in found.text
    wrong = int8_row(timing=None, status="not accurate enough", reason="relative error 9 %, limit 4 %")
    found = replace(FULL, rows=(*FULL.rows, wrong), quantization=LAYERS)
    assert "int8 was not chosen: OpenVINO, precision int8-static: relative error 9 %, limit 4 %" in found.text
    assert f"\n{ANOTHER_LIMIT}\n" in found.text
    won = replace(FULL, rows=(*FULL.rows, int8_row()), winner_key=int8_row().key, quantization=LAYERS)
    assert "int8 was not chosen" not in won.text
    assert ANOTHER_LIMIT not in won.text
    assert "\nint8: 1 of 1 layers in int8" in won.text


@pytest.mark.parametrize("status", ["wrong", "not accurate enough", "slower"])
def test_an_int8_candidate_that_is_out_did_not_lose_by_its_time(status):
    out = int8_row(timing=Timing((0.5,) * 7), status=status, reason="after timing: it differs")
    found = replace(FULL, rows=(*FULL.rows, out), quantization=LAYERS).text
    assert "\nint8 was not chosen: OpenVINO, precision int8-static: after timing: it differs\n" in found


def test_int8_that_is_as_fast_as_the_winner_is_not_called_slower():
    level = int8_row(timing=GOOD.timing)
    found = replace(FULL, rows=(*FULL.rows, level), quantization=LAYERS).text
    said = "int8 was not chosen: OpenVINO, precision int8-static: no faster than ONNX Runtime within noise"
    assert f"\n{said}\n" in found


def test_a_backend_of_the_users_own_is_not_int8_by_its_name():
    own = replace(GOOD, name="my_int8.fast:Backend", key="my_int8.fast:Backend")
    slow = int8_row(timing=Timing((1.5,) * 3))
    found = replace(FULL, rows=(BASE, own, slow), winner_key=own.key, quantization=LAYERS).text
    assert "int8 was not chosen: OpenVINO, precision int8-static takes 1.50 ms, my_int8.fast:Backend 1.00 ms" in found
    found = replace(FULL, rows=(BASE, GOOD, replace(own, timing=Timing((1.2,) * 3)), slow), quantization=LAYERS).text
    assert "int8 was not chosen: OpenVINO" in found


@pytest.mark.parametrize("width", [None, 60])
def test_a_reason_of_several_lines_does_not_pose_as_rows(width):
    posing = "RuntimeError: failed\n* eager            0.001  ########## 99.00x [98.00, 99.00]  faster"
    found = replace(FULL, rows=(*FULL.rows[:2], replace(WRONG, reason=posing)))
    lines = [line.text for line in found.lines(width=width)]
    assert not any("\n" in line for line in lines)
    assert [line.split("  ")[0] for line in lines if line.startswith("* ")] == ["* ONNX Runtime"]
    first = next(i for i, line in enumerate(lines) if "RuntimeError" in line)
    assert lines[first].startswith("    RuntimeError: failed * eager")


def test_a_cell_of_a_table_is_on_one_line():
    assert text_table(("name",), [("a\nb",)]) == ["name", "----", "a b"]


def test_a_long_name_is_whole_where_there_is_room_and_keeps_its_ends_where_there_is_none():
    name = "OpenVINO, other ops bf16, precision int8-weights"
    found = replace(FULL, rows=(BASE, replace(GOOD, name=name)))
    assert f"\n* {name}  " in found.text
    assert any(line.text.startswith(f"* {name}  ") for line in found.lines(width=200))
    (cut,) = (line.text for line in found.lines(width=90) if line.text.startswith("* "))
    assert cut.startswith("* OpenVINO, other ...on int8-weights  ")
