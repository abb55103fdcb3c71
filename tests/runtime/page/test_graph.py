"""The drawings of a program on a page: as data that nothing in it can end, and with the script that draws them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace

from tests.runtime.page.test_report import HOSTILE, Parsed
from tests.runtime.reports import FULL
from tsopt.compiler.graph.drawing import INPUT, OUTPUT, Drawn, states_of
from tsopt.runtime.page.graph import compared, page_of, with_times

DRAWING = (
    Drawn("x", INPUT, "f32[1,4]"),
    Drawn("fc", "aten.linear", "f32[1,8]", "fc", ("fc, m.py:3",), weights=("fc.weight",), reads=(0,)),
    Drawn("relu", "aten.relu", "f32[1,8]", "", ("m.py:4",), "some_rule", reads=(1,)),
    Drawn(OUTPUT, OUTPUT, reads=(2,)),
)


def of(page: str) -> list[list[list[object]]]:
    """The drawings in a page."""
    return json.loads(re.search(r'<script type="application/json" id="graphs">(.*?)</script>', page)[1])["drawings"]


def test_the_page_has_both_programs():
    found = of(page_of("net", DRAWING, DRAWING[:3]))
    assert [len(drawing) for drawing in found] == [4, 3]
    assert found[0][1] == ["fc", "aten.linear", "f32[1,8]", "fc", ["fc, m.py:3"], "", ["fc.weight"], [0], "kept", 0.0]


def test_what_became_of_a_value_is_told():
    before = (Drawn("x", INPUT), Drawn("conv", "conv2d", reads=(0,)), Drawn("norm", "batch_norm", reads=(1,)))
    after = (Drawn("x", INPUT), Drawn("norm", "conv2d", rule="conv_batch_norm", reads=(0,)))
    assert states_of(before, after) == (["kept", "gone", "gone"], ["kept", "made"])


def test_the_page_of_a_report_has_them_if_the_report_has():
    with_graphs = replace(FULL, graphs=(DRAWING, DRAWING)).html
    assert of(with_graphs)
    assert "The program" in Parsed(with_graphs).text
    assert "<script" not in FULL.html


def test_a_browser_runs_the_script_of_the_page_and_no_other():
    page = page_of("net", DRAWING, DRAWING)
    parsed = Parsed(page)
    data, script = re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)
    assert json.loads(data)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = (item["content"] for item in parsed.of("meta") if item.get("http-equiv") == "Content-Security-Policy")
    assert f"script-src 'sha256-{digest}';" in policy
    assert "default-src 'none'" in policy
    assert not any(key.startswith("on") or key in ("src", "href", "style") for _, a in parsed.elements for key in a)


def test_names_that_are_hostile_are_data():
    hostile = [Drawn(HOSTILE, HOSTILE, HOSTILE, HOSTILE, (HOSTILE,), HOSTILE, (HOSTILE,), ())]
    page = page_of(HOSTILE, hostile, hostile)
    assert [attributes.get("type") for attributes in Parsed(page).of("script")] == ["application/json", None]
    (drawn,) = of(page)[0]
    assert drawn[0].startswith("<script>alert(1)</script>")
    assert "\u202e" not in json.dumps(drawn, ensure_ascii=False)
    assert "<" not in compared(hostile, hostile)["graphs"]


def test_times_are_told_with_the_whole_call():
    (drawn,) = json.loads(with_times([replace(DRAWING[1], ms=1.23456)], 4.0, "eager")["graphs"])["drawings"]
    assert drawn[0][-1] == 1.235
    assert json.loads(with_times(DRAWING, 4.0, "eager")["graphs"])["call"] == 4.0
    assert with_times(DRAWING, 4.0, "ONNX Runtime")["figures"] == ("With the times of ONNX Runtime",)


def test_libraries_are_in_it_with_their_licences():
    page = page_of("net", DRAWING, DRAWING)
    assert "Copyright (c) 2012-2014 Chris Pettitt" in page
    assert "THE SOFTWARE IS PROVIDED" in page
    assert "sourceMappingURL" not in page


def test_a_page_that_says_its_encoding_says_it_first():
    assert page_of("x" * 10_000, DRAWING, DRAWING).index("<meta charset") < 1024
