"""Pages with charts and a table: what is on them, and what is left out of a chart."""

from __future__ import annotations

import json
import math
import re

from tests.runtime.page.test_report import HOSTILE, Parsed
from tsopt.runtime.page.chart import Chart, Series
from tsopt.runtime.page.table import page_of

CHART = Chart("Latency", "batch size", "ms", (Series("eager", ((1, 2.0, "one"), (8, 9.0, "eight")), True),))


def data_of(page: str) -> list[dict]:
    return json.loads(re.search(r'<script type="application/json" id="charts">(.*?)</script>', page)[1])


def test_the_page_has_the_table_the_charts_and_the_remarks():
    page = page_of("net", "Fastest: eager.", [CHART], ("name", "ms"), [("eager", "2.0")], ["on a machine"])
    found = Parsed(page)
    for text in ("net", "Fastest: eager.", "Latency", "name", "2.0", "on a machine"):
        assert text in found.text
    (chart,) = data_of(page)
    assert chart == {
        "title": "Latency",
        "x": "batch size",
        "y": "ms",
        "series": [{"name": "eager", "points": [[1, 2.0, "one"], [8, 9.0, "eight"]], "line": True}],
    }
    (holder,) = [item for item in found.of("div") if item.get("class") == "plot"]
    assert holder["data-label"] == "Latency: ms over batch size. The numbers are in the table."


def test_what_a_logarithmic_axis_cannot_show_is_left_out():
    odd = Series("odd", ((0.0, 1.0, "a"), (1.0, math.nan, "b"), (math.inf, 1.0, "c"), (1.0, 2.0, "d")))
    none = Series("none", ((0.0, 1.0, ""),))
    page = page_of("net", "", [Chart("A", "x", "y", (odd, none)), Chart("B", "x", "y", (none,))], ("a",), [], [])
    (chart,) = data_of(page)
    assert [series["points"] for series in chart["series"]] == [[[1.0, 2.0, "d"]]]
    assert ">B<" not in page


def test_names_that_are_hostile_are_text_and_data():
    hostile = Chart(HOSTILE, HOSTILE, HOSTILE, (Series(HOSTILE, ((1.0, 1.0, HOSTILE),)),))
    page = page_of(HOSTILE, HOSTILE, [hostile], (HOSTILE,), [(HOSTILE,)], [HOSTILE])
    found = Parsed(page)
    assert [item.get("type") for item in found.of("script")] == ["application/json", None]
    assert data_of(page)[0]["series"][0]["name"].startswith("<script>alert(1)")
    assert "\u202e" not in page


def test_libraries_are_in_it_with_their_licences():
    assert "Copyright (c) 2022 Leon Sorokin" in page_of("net", "", [CHART], ("a",), [], [])
