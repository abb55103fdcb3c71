"""The report as a page: all of it, safe whatever names hold, and complete in itself."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import tsopt
from tests.runtime.reports import BASE, FULL, GOOD, record
from tsopt.compiler.graph.drawing import drawing_of
from tsopt.runtime.layer_table import LayerRecord
from tsopt.runtime.page.report import in_notebook, page

HOSTILE = "<script>alert(1)</script>\"'&{{ 7 * 7 }}\u202e\x1b[31m" + "x" * 10_000
VOID = {"meta", "br", "rect", "line", "input"}


class Parsed(HTMLParser):
    """Elements with their attributes, and the text; fails where an element is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements, self.text, self._open = [], "", []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def of(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def full():
    passes = (record("fuse", "conv_batch_norm"), record("idle"), record("algebra", "times_one", "add_add:too_large"))
    layers = (
        LayerRecord("fc", "fc, m.py:3", "linear", 40.0, 4000, 1000),
        LayerRecord("head", "", "linear", 9.0, 8, 2, "loses"),
    )
    stages = (("capture", 1.0), ("timing", 3.0), ("blink", 0.01))
    return replace(FULL, passes=passes, quantization=layers, stages=stages, cached="measured yesterday")


def test_the_page_says_what_the_report_says(full):
    found = Parsed(page(full))
    assert found.of("h1")
    assert f"ONNX Runtime runs {full.model} 2.00x as fast." in found.text
    for row in full.rows:
        assert row.name in found.text
        assert row.reason in found.text
    for text in ("verified: ", "note: takes negative indices", "large: eager raises ValueError", "measured yesterday"):
        assert text in found.text
    for text in (
        "conv_batch_norm",
        "times_one",
        "9 -> 7",
        "loses",
        "40.0",
        "Where the 4.0 s went",
        str(full.environment),
    ):
        assert text in found.text
    assert "idle" not in found.text
    assert "blink" not in found.text
    assert "took 4.0 s" not in found.text, "a chart says that"


def test_the_accuracy_of_the_winner_is_told_by_input(full):
    text = Parsed(page(full)).text
    assert "example21.0e-075.0e-08" in text
    assert "random1.53.0e-072.0e-07" in text
    without = replace(GOOD, accuracy=replace(GOOD.accuracy, sizes=(2.0, 0.0)))
    assert "random03.0e-07-" in Parsed(page(replace(full, rows=(BASE, without)))).text
    assert "Accuracy" not in Parsed(page(replace(full, winner_key=BASE.key))).text


def test_bars_end_at_the_medians(full):
    bars = [item for item in Parsed(page(replace(full, passes=(), stages=()))).of("rect") if item["class"] == "bar"]
    widest = max(row.timing.percentile(90) for row in (BASE, GOOD))
    ends = [round(100 * row.timing.p50 / widest, 2) for row in (GOOD, BASE)]
    assert [float(item["width"].rstrip("%")) for item in bars] == ends
    lines = Parsed(page(full)).of("line")
    assert [float(lines[0][key].rstrip("%")) for key in ("x1", "x2")] == [
        round(100 * GOOD.timing.percentile(q) / widest, 2) for q in (10, 90)
    ]


def test_the_waterfall_begins_where_the_pass_before_has_ended(full):
    steps = Parsed(page(replace(full, stages=(), rows=(BASE,), winner_key=BASE.key))).of("rect")
    places = [(float(item["x"].rstrip("%")), float(item["width"].rstrip("%"))) for item in steps[1:]]
    assert places == [(0.0, 50.0), (50.0, 50.0)]


def test_it_loads_nothing_and_runs_nothing(full):
    text = page(full)
    found = Parsed(text)
    names = {name for name, _ in found.elements}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "form", "a", "base"}
    assert not any(key.startswith("on") or key in ("src", "href", "style") for _, a in found.elements for key in a)
    assert "http://" not in text
    assert "https://" not in text
    (policy,) = (item["content"] for item in found.of("meta") if item.get("http-equiv") == "Content-Security-Policy")
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


@pytest.mark.parametrize("of", ["model", "why", "reason", "name", "pass", "layer", "size", "cached", "note"])
def test_names_that_are_hostile_are_text(full, of):
    first, *others = full.passes
    changed = {
        "model": {"model": HOSTILE},
        "why": {"why": HOSTILE},
        "reason": {"rows": (*full.rows[:2], replace(full.rows[2], reason=HOSTILE))},
        "name": {"rows": (full.rows[0], replace(full.rows[1], name=HOSTILE))},
        "pass": {"passes": (replace(first, name=HOSTILE), *others)},
        "layer": {"quantization": (replace(full.quantization[0], name=HOSTILE),)},
        "size": {"sizes": HOSTILE},
        "cached": {"cached": HOSTILE},
        "note": {"rows": (full.rows[0], replace(full.rows[1], notes=(HOSTILE,)))},
    }[of]
    text = page(replace(full, **changed))
    found = Parsed(text)
    assert not found.of("script")
    assert "<script>alert(1)</script>" in found.text, "it is shown as it is"
    assert "{{ 7 * 7 }}" in found.text
    assert "\u202e" not in text
    assert "\x1b" not in text


def test_where_eager_wins_that_is_said():
    report = replace(FULL, rows=(BASE,), winner_key=BASE.key, why="no candidate is faster")
    text = Parsed(page(report)).text
    assert f"{report.model} runs in eager mode: no candidate is faster." in text
    assert "backends=" not in text


def test_nothing_was_timed():
    text = Parsed(page(replace(FULL, rows=(replace(BASE, timing=None),), winner_key=BASE.key))).text
    assert "eager" in text


def test_tables_are_told_to_those_who_do_not_see_them(full):
    found = Parsed(page(full))
    assert [attributes.get("scope") for attributes in found.of("th")].count(None) == 0
    assert found.of("html")[0]["lang"] == "en"
    assert all(item.get("aria-hidden") == "true" for item in found.of("svg")), "the numbers are beside them"
    scrolled = [item for item in found.of("div") if item.get("class") == "scroll"]
    assert scrolled
    assert all("tabindex" in item and "aria-labelledby" in item for item in scrolled)


def test_a_notebook_shows_it_in_a_frame_without_access_to_the_notebook(full):
    (frame,) = Parsed(in_notebook(full)).of("iframe")
    assert frame["sandbox"] == "allow-scripts"
    assert frame["srcdoc"] == page(full)
    assert full._repr_html_() == in_notebook(full)
    assert full.html == page(full)


INT8 = replace(GOOD, name="OpenVINO, precision int8-static", key="openvino?precision=int8-static")
AS_THEY_WERE = "with the other options as they were"


@pytest.mark.parametrize(
    ("row", "others", "options", "besides"),
    [
        (GOOD, (), "backends=('onnxruntime',)", f"{AS_THEY_WERE}."),
        (GOOD, (INT8,), "backends=('onnxruntime',), precision='fp32'", f"{AS_THEY_WERE}, but without calibration, "),
        (INT8, (), f"backends=('{INT8.key}',), calibration=data", f"{AS_THEY_WERE}."),
        (replace(GOOD, name="partitioned", key="parts"), (), "frontend='parts'", AS_THEY_WERE),
        (replace(GOOD, name="TorchScript, frozen", key="torchscript"), (), "frontend='torchscript'", AS_THEY_WERE),
        (replace(GOOD, name="TorchScript", key="torchscript"), (), "backends=('torchscript',)", AS_THEY_WERE),
        (replace(GOOD, name="mine", key="it's:B"), (), """backends=("it's:B",)""", AS_THEY_WERE),
    ],
)
def test_the_page_says_how_to_have_the_winner_again(row, others, options, besides):
    found = Parsed(page(replace(FULL, rows=(BASE, row, *others), winner_key=row.key))).text
    assert f"tsopt.optimize(model, example_input, {options}), {besides}" in found


def digests_allowed(text: str) -> list[bool]:
    """Of each script that runs, whether the policy of its page has its hash."""
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    return [f"script-src 'sha256-{digest}'" in text for digest in digests]


def test_the_scripts_of_a_page_are_the_same_in_a_frame(full):
    program = tsopt.capture(nn.Linear(4, 4).eval(), torch.ones(1, 4))
    drawn = replace(full, graphs=(drawing_of(program), drawing_of(program)))
    (frame,) = Parsed(in_notebook(drawn)).of("iframe")
    assert frame["srcdoc"] == page(drawn)
    assert digests_allowed(frame["srcdoc"]) == [True]
