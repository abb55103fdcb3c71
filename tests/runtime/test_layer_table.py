from __future__ import annotations

from dataclasses import replace

from tsopt.runtime.layer_table import ATTENTION, COLUMNS, LayerRecord, by_loss, layer_table, lines, summary

GOOD = LayerRecord("stem", "stem, m.py:3", "conv2d", 41.26, 6912, 1984, output_sqnr=45.04)
BAD = LayerRecord("head", "head, m.py:9", "linear", 12.0, 4000, 1400, "SQNR below 20 dB")
OTHER = LayerRecord("tail", "", "linear", None, 4000, 1400, "its input is not finite")


def test_a_row_has_a_cell_for_each_column():
    assert dict(zip(COLUMNS, GOOD.cells(), strict=True)) == {
        "layer": "stem",
        "op": "conv2d",
        "SQNR dB": "41.3",
        "output dB": "45.0",
        "KB fp32": "6.9",
        "KB int8": "2.0",
        "ms fp32": "-",
        "ms int8": "-",
        "precision": "int8",
        "because": "",
    }
    assert OTHER.cells()[2:] == ("-", "-", "4.0", "1.4", "-", "-", "fp32", "its input is not finite")


def test_times_are_shown_where_there_are_some():
    header, rows = layer_table([GOOD, BAD])
    assert "ms fp32" not in header
    assert [len(row) for row in rows] == [len(header)] * 2
    header, rows = layer_table([replace(GOOD, ms_float=1.25, ms_int8=0.5), BAD])
    assert header == COLUMNS
    assert [row[6:8] for row in rows] == [("-", "-"), ("1.25", "0.5")]


def test_what_loses_most_comes_first():
    assert by_loss([OTHER, GOOD, BAD]) == [BAD, GOOD, OTHER]
    far = LayerRecord("far", "", "linear", 25.0, 1, 1, output_sqnr=80.0)
    assert by_loss([far, GOOD]) == [GOOD, far], "its error hardly reaches the outputs"
    assert summary([GOOD, far]) == "2 of 2 layers in int8; lowest SQNR 25.0 dB (far)"


def test_a_report_says_how_many_run_in_int8_and_why_others_do_not():
    assert summary([GOOD, BAD]) == "1 of 2 layers in int8; lowest SQNR 41.3 dB (stem)"
    many = [LayerRecord(f"l{i}", "", "linear", 10.0, 1, 1, "SQNR below 20 dB") for i in range(5)]
    assert lines([GOOD, *many, OTHER], "9 inputs") == [
        "int8: 1 of 7 layers in int8; lowest SQNR 41.3 dB (stem)",
        "calibration: 9 inputs",
        "kept in float32 (SQNR below 20 dB): l0, l1, l2 and 2 more",
        "kept in float32 (its input is not finite): tail",
    ]
    assert lines([], "9 inputs") == []


def test_json_has_no_infinity():
    record = LayerRecord("a", "", "linear", float("inf"), 1, 1, output_sqnr=float("nan")).record()
    assert (record["sqnr"], record["output_sqnr"]) == (None, None)
    assert GOOD.record()["output_sqnr"] == 45.04
    assert BAD.record()["kept"] == "SQNR below 20 dB"


def test_attention_is_counted_apart():
    attention = replace(GOOD, op=ATTENTION, sqnr=None)
    assert summary([GOOD, attention, replace(attention, kept="why")]) == (
        "1 of 1 layers in int8, 1 of 2 calls of attention; lowest SQNR 41.3 dB (stem)"
    )


def test_layers_that_take_seconds_have_no_exponent():
    assert replace(GOOD, ms_float=1234.5, ms_int8=99.96).cells()[6:8] == ("1234", "100")
