from __future__ import annotations

import re
import shutil
import sys

import pytest

from tsopt.cli import graph
from tsopt.compiler.graph.drawing import Drawn

pytestmark = pytest.mark.usefixtures("quick")


def test_a_page_is_written_beside_the_text(tsopt, write, tmp_path):
    write()
    found = tsopt("inspect", "m.py", "--diff", "--graph", "new/g.html")
    assert found.code == 0, found.err
    assert found.out.splitlines()[-1] == "saved: new/g.html"
    assert 'id="graphs"' in (tmp_path / "new" / "g.html").read_text()


def test_dot_has_a_box_for_each_program_and_what_a_rule_made_in_a_colour(tsopt, write, tmp_path):
    pytest.importorskip("graphviz")
    write()
    assert tsopt("inspect", "m.py", "--graph", "g.dot").code == 0
    text = (tmp_path / "g.dot").read_text()
    assert "before the passes" in text
    assert "after the passes" in text
    assert "aten.linear" in text
    assert text.count("subgraph cluster_") >= 2


def test_a_picture_is_drawn_by_dot(tsopt, write, tmp_path, monkeypatch):
    graphviz = pytest.importorskip("graphviz")
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(graphviz.Digraph, "pipe", lambda self, format: f"<{format}>".encode())
    write()
    assert tsopt("inspect", "m.py", "--graph", "g.png").code == 0
    assert (tmp_path / "g.png").read_bytes() == b"<png>"


def test_without_dot_it_says_what_to_install(tsopt, write, tmp_path, monkeypatch):
    pytest.importorskip("graphviz")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    write()
    found = tsopt("inspect", "m.py", "--graph", "g.svg")
    assert found.code == 2
    assert "a .svg file needs Graphviz" in found.err
    assert ".html file" in found.err
    assert not (tmp_path / "g.svg").exists()


def test_what_dot_says_of_a_failure_is_told(tsopt, write, tmp_path, monkeypatch):
    graphviz = pytest.importorskip("graphviz")
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setenv("PATH", "")
    write()
    found = tsopt("inspect", "m.py", "--graph", "new/g.svg")
    assert found.code == 2
    assert "Graphviz cannot draw the .svg file" in found.err
    assert not (tmp_path / "new").exists()
    assert graphviz


def test_a_program_that_is_too_large_for_a_picture_is_refused(tsopt, write, monkeypatch):
    pytest.importorskip("graphviz")
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(graph, "MOST_DRAWN", 3)
    write()
    found = tsopt("inspect", "m.py", "--graph", "g.svg")
    assert found.code == 2
    assert "too many values for a picture" in found.err


def test_a_wrong_name_leaves_no_file(tsopt, write, tmp_path):
    write()
    assert tsopt("inspect", "m.py", "--graph", "g.html", "--why", "nonsense").code == 2
    assert not (tmp_path / "g.html").exists()


def test_modules_are_nested_and_rules_have_colours():
    pytest.importorskip("graphviz")
    drawing = (
        Drawn("x", "input"),
        Drawn("a.b.one", "relu", module="a.b", reads=(0,), rule="some_rule"),
        Drawn("a.b.two", "relu", module="a.b", reads=(1,)),
        Drawn("a.three", 'say "\\n"', module="a", reads=(2,), rule="other_rule"),
    )
    text = graph.WRITERS[".dot"](graph.Graphs("net", drawing[:1], drawing))
    assert text.index("cluster_1_0") < text.index("cluster_1_0_0")
    assert "by some_rule" in text
    assert len(set(re.findall(r"by \w+_rule.*fillcolor=\"(#\w+)\"", text))) == 2


def test_without_the_package_it_says_so_before_the_work(tsopt, write, monkeypatch):
    monkeypatch.setitem(sys.modules, "graphviz", None)
    write()
    found = tsopt("inspect", "m.py", "--graph", "g.dot")
    assert found.code == 2
    assert "pictures of graphs need Graphviz" in found.err


def test_an_unknown_suffix_is_refused(tsopt, write):
    write()
    found = tsopt("inspect", "m.py", "--graph", "g.jpg")
    assert found.code == 2
    assert ".html, .dot, .svg, .png" in found.err
