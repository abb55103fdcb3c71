from __future__ import annotations

import io
import re

from rich.console import Console

import tsopt
from tsopt.runtime.progress import shown


def test_in_a_log_each_stage_is_a_line_with_the_time():
    file = io.StringIO()
    with shown("net", Console(file=file)) as tell:
        for text in ("capture", "pass fold", "pass cse", "compile [bold]x[/bold] (1 of 2)", "compile y (2 of 2)"):
            tell(text)
    lines = file.getvalue().splitlines()
    assert [re.sub(r"\d+\.\d s", "0 s", line) for line in lines] == [
        "net: capture (0 s)",
        "net: passes (0 s)",
        "net: compile (0 s)",
    ]


def test_on_a_terminal_one_line_names_the_step():
    file = io.StringIO()
    with shown("net", Console(file=file, force_terminal=True, width=80)) as tell:
        tell("compile ONNX Runtime (3 of 6)")
    assert file.getvalue().count("\n") == 1  # when it is over, and the line has gone
    assert "net" in file.getvalue()


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
