"""The pages in a real browser: no message on the console, every control does what it says, accessible.

Skipped where Chromium is not installed (`apt install chromium`).
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from axe_playwright_python import sync_playwright as axe
from playwright import sync_api as playwright
from torch import nn

import tsopt
from tests.runtime.calling import parts
from tests.runtime.page.test_report import HOSTILE
from tests.runtime.reports import FULL, record
from tsopt.compiler.graph.drawing import Drawn, drawing_of
from tsopt.runtime.page.chart import Chart, Series
from tsopt.runtime.page.graph import page_of, with_times
from tsopt.runtime.page.table import page_of as table_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
expect = playwright.expect
if CHROMIUM is None:
    pytest.skip("the pages were not opened: Chromium is not installed", allow_module_level=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)) + x)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def report():
    model = nn.Sequential(*(Block() for _ in range(12))).eval()
    program = tsopt.capture(model, torch.ones(1, 4, 8, 8))
    graphs = drawing_of(program), drawing_of(tsopt.transform(program))
    return replace(FULL, graphs=graphs, passes=(record("fuse", "conv_batch_norm"),), stages=(("capture", 1.0),))


@pytest.fixture
def opened(browser, tmp_path: Path):
    """Opens a page; whatever a browser says on its console fails the test."""
    said: list[str] = []
    context = browser.new_context(viewport={"width": 1280, "height": 900})

    def show(text: str, **media):
        (tmp_path / "page.html").write_text(text)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url) if not request.url.startswith("file:") else None)
        page.emulate_media(**media)
        page.goto((tmp_path / "page.html").as_uri())
        return page

    yield show
    context.close()
    assert said == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_accessible(opened, report, scheme):
    page = opened(report.html, color_scheme=scheme)
    found = axe.Axe().run(page).response["violations"]
    assert [(item["id"], item["nodes"][0]["html"][:200]) for item in found] == []


def test_the_page_of_a_model_in_parts_tells_of_each_part(opened):
    page = opened(parts.optimized(parts.Branches().eval()).report.html)
    assert page.get_by_role("heading", name="Branches").count() == 1
    row = page.get_by_role("row", name="partitioned")
    for part in ("part 1: ", "part 2: "):
        expect(row.locator("small", has_text=part)).to_have_count(1)
    assert page.locator("figure.graph").count() == 0  # it is not one program
    page.set_viewport_size({"width": 375, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        found = axe.Axe().run(page).response["violations"]
        assert [(item["id"], item["nodes"][0]["html"][:200]) for item in found] == []


def test_every_control_does_what_it_says(opened, report):
    page = opened(report.html)
    before, after = page.locator("figure.graph").all()
    values = before.locator(".thing:not(.frame)")
    shown = values.count()
    before.get_by_role("button", name="fold all").click()
    assert 0 < values.count() < shown
    before.get_by_role("button", name="Unfold: Before").click()
    assert values.count() == len(report.graphs[0])
    width = float(before.locator("svg").get_attribute("width"))
    before.get_by_role("button", name="larger").click()
    assert float(before.locator("svg").get_attribute("width")) == pytest.approx(1.25 * width)
    before.get_by_role("button", name="smaller").click()
    assert float(before.locator("svg").get_attribute("width")) == pytest.approx(width)
    before.get_by_role("button", name="fit").click()
    assert after.locator(".made").count() > 0
    assert before.locator(".gone").count() > 0


def test_a_frame_in_a_notebook_draws_the_program(opened, report):
    page = opened(f"<!doctype html><html lang='en'><meta charset='utf-8'><title>cell</title>{report._repr_html_()}")
    figures = page.frame_locator("iframe").locator("figure.graph")
    expect(figures.locator("svg")).to_have_count(2)


def test_a_module_is_unfolded_and_folded_by_keys_and_keeps_the_focus(opened, report):
    page = opened(report.html)
    figure = page.locator("figure.graph").first
    figure.get_by_role("button", name="fold all").click()
    values = figure.locator(".thing:not(.frame)")
    folded = values.count()
    figure.locator(".module").first.focus()
    page.keyboard.press("Enter")
    assert values.count() > folded
    assert page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "true"
    page.keyboard.press(" ")
    assert values.count() == folded


def test_a_value_tells_where_it_comes_from(opened, report):
    page = opened(report.html)
    after = page.locator("figure.graph").last
    after.locator(".made").first.click()
    text = after.locator(".details").inner_text()
    assert "conv_batch_norm" in text
    assert "test_in_browser.py" in text
    assert "f32[1, 4, 8, 8]" in text


def test_what_is_looked_for_is_found_wherever_it_is_folded(opened, report):
    page = opened(report.html)
    page.get_by_role("button", name="Fold all: Before").click()
    page.get_by_label("Find in the program").fill("batch_norm")
    expect(page.locator("#found")).to_have_text("12 before the passes, 12 after them")
    assert page.locator("figure.graph").first.locator(".match:not(.frame)").count() == 12
    page.get_by_label("Find in the program").fill("")
    expect(page.locator("#found")).to_have_text("")
    assert page.locator(".match").count() == 0


def profile_page() -> str:
    """A page with charts, a table, and a program with times."""
    drawing = [Drawn("x", "input"), Drawn("cheap", "aten.relu", "f32[1]", "", reads=(0,), ms=0.001)]
    drawing += [Drawn(f"hot_{i}", "aten.linear", "f32[1]", "block", reads=(i + 1,), ms=0.1 * i) for i in range(4)]
    series = Series("engine", ((1.0, 2.0, "one"), (8.0, 9.0, "eight")))
    program = with_times(drawing, 0.65, "eager")
    return table_page("net", "", [Chart("A", "x", "y", (series,))], ("layer", "ms"), [("a", "1")], ["b"], program)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_program_with_times_is_coloured_by_them_and_accessible(opened, scheme):
    page = opened(profile_page(), color_scheme=scheme)
    figure = page.locator("figure.graph")
    figure.get_by_role("button", name="unfold").first.click()
    assert figure.locator(".thing.heat-4").count() == 2
    assert figure.locator(".thing.heat-3").count() == 1
    assert figure.get_by_text("aten.linear f32[1], 0.3 ms").count() == 1
    figure.locator(".thing.heat-4").last.click()
    assert "0.3 ms, 46.2 % of the call" in figure.locator(".details").inner_text()
    figure.get_by_role("button", name="fold all").click()
    assert figure.get_by_text("4 values, 0.6 ms").count() == 1
    assert figure.locator(".module.heat-4").count() == 1
    found = axe.Axe().run(page).response["violations"]
    assert [(item["id"], item["nodes"][0]["html"][:200]) for item in found] == []


def test_what_is_looked_for_in_a_program_with_times_is_counted(opened):
    page = opened(profile_page())
    page.get_by_label("Find in the program").fill("hot")
    expect(page.locator("#found")).to_have_text("4 found")


def test_charts_are_printed_in_the_colours_of_the_light_scheme(opened):
    text = profile_page()
    pixels = "document.querySelector('canvas').toDataURL()"
    light, dark = opened(text, color_scheme="light"), opened(text, color_scheme="dark")
    assert dark.evaluate(pixels) != light.evaluate(pixels)
    dark.emulate_media(color_scheme="dark", media="print")
    light.emulate_media(color_scheme="light", media="print")
    for page in (light, dark):  # the page is wider on paper, and charts follow
        page.wait_for_function(
            "document.querySelector('canvas').clientWidth === document.querySelector('.plot').clientWidth"
        )
    dark.wait_for_function(f"wanted => {pixels} === wanted", arg=light.evaluate(pixels))


def test_hostile_names_are_shown_and_not_run(opened):
    hostile = (Drawn(HOSTILE, HOSTILE, HOSTILE, HOSTILE + ".a", (HOSTILE,), HOSTILE, (HOSTILE,), ()), Drawn("b", "b"))
    page = opened(page_of(HOSTILE, hostile, hostile))
    page.locator(".thing").nth(1).click()
    assert page.locator("figure.graph .thing").count() == 4
    assert "<script>alert(1)" in page.locator(".details").first.inner_text()


def test_five_thousand_values_are_shown_folded_within_two_seconds(opened):
    drawing = [Drawn("x", "input")]
    for number in range(5000):
        module = f"stage{number // 500}.block{number // 25}.layer{number // 5}"
        drawing.append(Drawn(f"value_{number}", "aten.add", "f32[1]", module, reads=(number,)))
    text = page_of("large", drawing, drawing)
    assert len(text) < 4e6
    page = opened(text)
    assert 0 < page.locator("figure.graph").first.locator(".thing").count() <= 60


@pytest.mark.parametrize("module", ["", "layers.{}", "{}", "layers.{}.inner"])
def test_many_of_a_kind_are_shown_in_groups(opened, module):
    drawing = [
        Drawn("x", "input"),
        *(Drawn(f"v{i}", "aten.add", "f32[1]", module.format(i // 2), reads=(i,)) for i in range(2000)),
    ]
    page = opened(page_of("wide", drawing, drawing))
    figure = page.locator("figure.graph").first
    things = figure.locator(".thing:not(.frame)")
    assert 0 < things.count() <= 62
    figure.locator(".module").first.click()
    assert things.count() <= 124
    page.get_by_label("Find in the program").fill("v1234")
    expect(page.locator("#found")).to_have_text("1 before the passes, 1 after them")
    assert figure.locator(".match:not(.frame)").count() == 1


def test_a_table_is_sorted_by_numbers_or_by_names(opened):
    rows = [("2.conv", "1,024", "-"), ("10.conv", "9.5", "3"), ("1.conv", "80", "x")]
    page = opened(table_page("net", "", [], ("layer", "ms", "mixed"), rows, []))

    def column(number: int) -> list[str]:
        return page.locator(f"tbody td:nth-child({number})").all_inner_texts()

    page.get_by_role("button", name="layer").click()
    assert column(1) == ["1.conv", "2.conv", "10.conv"]
    assert page.locator("th").first.get_attribute("aria-sort") == "ascending"
    page.get_by_role("button", name="ms").click()
    assert column(2) == ["1,024", "80", "9.5"]
    assert page.locator("th").nth(1).get_attribute("aria-sort") == "descending"
    page.get_by_role("button", name="ms").click()
    assert column(2) == ["9.5", "80", "1,024"]
    page.get_by_label("Find in the table").fill("10.")
    assert page.locator("tbody tr:visible").count() == 1
    assert page.locator("#rows").inner_text() == "1 of 3 rows"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_charts_are_drawn_and_accessible(opened, scheme):
    series = tuple(Series(f"engine {n}", ((1.0, 2.0 + n, "one"), (8.0, 9.0, "eight")), n % 2 == 0) for n in range(10))
    page = opened(table_page("net", "", [Chart("A", "x", "y", series)], ("a",), [("1",)], ["b"]), color_scheme=scheme)
    assert page.get_by_role("img", name="A: y over x").count() == 1
    found = axe.Axe().run(page).response["violations"]
    assert [(item["id"], item["nodes"][0]["html"][:200]) for item in found] == []
    box = page.locator("canvas").bounding_box()
    page.mouse.move(box["x"] + 75, box["y"] + 200)
    page.set_viewport_size({"width": 375, "height": 700})
    expect(page.locator("canvas")).to_be_visible()


def test_on_a_phone_nothing_is_wider_than_the_screen(opened, report):
    page = opened(report.html)
    page.set_viewport_size({"width": 375, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
