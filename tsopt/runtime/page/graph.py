"""Drawings of a program for a browser: as data for the script that draws them, and as a page of their own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tsopt.compiler.graph.drawing import Drawn, states_of
from tsopt.runtime.page.document import render
from tsopt.runtime.untrusted_text import printable

SCRIPTS = ("dagre.min.js", "graph.js")  # dagre places the nodes
TEMPLATE = "program.html.jinja"


def page_of(model: str, before: Sequence[Drawn], after: Sequence[Drawn]) -> str:
    """A page with the program of a model before and after the passes."""
    return render(TEMPLATE, SCRIPTS, model=model, graphs=as_data(before, after))


def as_data(before: Sequence[Drawn], after: Sequence[Drawn]) -> str:
    """Both drawings as JSON that ends no element of a page, whatever is in it."""
    drawings = [
        [_values(item, state) for item, state in zip(drawing, states, strict=True)]
        for drawing, states in zip((before, after), states_of(before, after), strict=True)
    ]
    return json.dumps(drawings, separators=(",", ":")).replace("<", "\\u003c")


def _values(item: Drawn, state: str) -> list[Any]:
    texts = [printable(text) for text in (item.name, item.op, item.type, item.module)]
    origins, weights = ([printable(text) for text in found] for found in (item.origins, item.weights))
    return [*texts, origins, printable(item.rule), weights, list(item.reads), state]
