from __future__ import annotations

import io
import re
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

import tsopt
from tsopt.runtime.progress import ROWS, shown


def test_in_a_log_each_stage_is_a_line_with_the_time():
    file = io.StringIO()
    with shown("net", Console(file=file)) as tell:
        for text in (
            "capture",
            "pass fold",
            "pass cse",
            "compile [bold]x[/bold] (1 of 2)",
            "check x",
            "compile y (2 of 2)",
        ):
            tell(text)
    lines = file.getvalue().splitlines()
    assert [re.sub(r"\d+\.\d s", "0 s", line) for line in lines] == [
        "net: capture (0 s)",
        "net: passes (0 s)",
        "net: compile (0 s)",
        "net: check (0 s)",
    ]


def test_in_a_log_a_step_of_a_stage_that_takes_long_is_a_line_too(monkeypatch):
    clock, file = SimpleNamespace(now=0.0), io.StringIO()
    monkeypatch.setattr("tsopt.runtime.progress.time", SimpleNamespace(perf_counter=lambda: clock.now))
    with shown("net", Console(file=file)) as tell:
        for clock.now, text in (
            (0.0, "part 1 of 3"),
            (6.0, "part 1 of 3: compile ONNX Runtime (1 of 6)"),
            (14.0, "part 2 of 3: capture"),
            (23.0, "part 2 of 3: check ONNX Runtime (1 of 6)"),
            (25.0, "check partitioned"),
            (34.0, "part 3 of 3: capture"),
            (36.0, "part 3 of 3: compile ONNX Runtime (1 of 6)"),
        ):
            tell(text)
    assert file.getvalue().splitlines() == [
        "net: parts (0.0 s)",
        "net: part 2 of 3: capture (14.0 s)",
        "net: check (25.0 s)",
        "net: part 3 of 3: compile ONNX Runtime (1 of 6) (36.0 s)",
    ]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def _no_ci(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def on_screen(written: str) -> list[str]:
    """The last table that was drawn, without escape codes."""
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written)
    return [line.strip() for line in re.split(r"[\r\n]+", plain) if line.strip()]


def test_on_a_terminal_a_table_shows_what_is_over_and_what_is_being_done():
    file = Terminal()
    with shown("net", Console(file=file, width=80)) as tell:
        for text in ("capture", "pass fold", "compile x (2 of 6)", "check x", "compile ONNX Runtime (3 of 6)"):
            tell(text)
    *_, title, capture, passes, now, check = on_screen(file.getvalue())
    assert re.fullmatch(r"net +0 s", title)
    assert re.fullmatch(r"capture +0\.\d s", capture)
    assert re.fullmatch(r"passes +0\.\d s", passes)
    assert re.fullmatch(r"\S compile +0\.\d s ONNX Runtime \(3 of 6\)", now)
    assert re.fullmatch(r"check +0\.\d s", check)


def test_a_table_is_one_line_for_each_stage_however_narrow_the_terminal_is():
    file = Terminal()
    with shown("net", Console(file=file, width=30)) as tell:
        tell("capture")
        tell("time: round 9, ONNX Runtime ahead of 2 others, at most 4 s left")
    assert all(len(line) <= 30 for line in on_screen(file.getvalue()))


def test_of_a_long_sweep_the_last_stages_are_shown():
    file = Terminal()
    with shown("net", Console(file=file, width=80)) as tell:
        for number in range(40):
            tell(f"batch {number}: capture")
    title, first, *_, now = on_screen(file.getvalue())[-ROWS - 1 :]
    assert title.startswith("net")
    assert first.startswith("batch 28: capture")
    assert "batch 39: capture" in now


def test_markup_and_control_characters_of_a_model_are_shown_as_text():
    file = io.StringIO()
    with shown("[red]\x1b[31mnet", Console(file=file)) as tell:
        tell("capture")
    assert "[red]" in file.getvalue()
    assert "\x1b" not in file.getvalue()


def test_optimize_shows_its_stages_if_it_is_told_to(mlp, mlp_input, capsys):
    tsopt.optimize(mlp, mlp_input, backends=("eager",), seconds=0.02, progress=True)
    said = capsys.readouterr()
    assert said.out == ""
    stages = [line.split(": ")[1].split(" (")[0] for line in said.err.splitlines()]
    assert (
        stages == ["capture", "passes", "eager", "compile", "first calls", "check", "timing", "verify"][: len(stages)]
    )
    assert len(stages) >= 7
    tsopt.optimize(mlp, mlp_input, backends=("eager",), seconds=0.02)
    assert capsys.readouterr() == ("", "")


def told(console: Console) -> list[str]:
    """What two stages write."""
    with shown("net", console) as tell:
        tell("capture")
        tell("compile x (1 of 2)")
    return [re.sub(r"\d+\.\d s", "0 s", line) for line in console.file.getvalue().splitlines()]


LINES = ["net: capture (0 s)", "net: compile (0 s)"]


@pytest.mark.parametrize(
    ("file", "variables"),
    [
        (Terminal, {"TERM": "dumb"}),
        (Terminal, {"TERM": "dumb", "TTY_INTERACTIVE": "1"}),
        (Terminal, {"TTY_INTERACTIVE": "0"}),
        (io.StringIO, {"FORCE_COLOR": "1"}),
        (io.StringIO, {"TTY_COMPATIBLE": "1"}),
    ],
)
def test_where_no_table_can_be_redrawn_there_are_lines(file, variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert told(Console(file=file(), width=80, highlight=False)) == LINES


def test_in_a_notebook_without_widgets_there_are_lines(monkeypatch, recwarn):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert told(Console(file=io.StringIO(), force_jupyter=True)) == LINES
    assert not recwarn.list


def test_a_terminal_of_other_characters_gets_ascii():
    class Latin(Terminal):
        encoding = "latin-1"

    file = Latin()
    with shown("net", Console(file=file, width=80)) as tell:
        tell("compile x (1 of 2)")
        assert re.search(r"[-\\|/] compile", file.getvalue())
        tell("compile " + "x" * 200)
    assert file.getvalue().isascii()
