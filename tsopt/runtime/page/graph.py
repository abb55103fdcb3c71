"""Drawings of a program for a browser: as data for the script that draws them, and as a page of their own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tsopt.compiler.graph.drawing import KEPT, Drawn, states_of
from tsopt.runtime.page.document import render
from tsopt.runtime.untrusted_text import printable

SCRIPTS = ("dagre.min.js", "graph.js")  # dagre places the nodes
TEMPLATE = "program.html.jinja"
HOT = (0.3, 0.1, 0.03, 0.01)  # shares of a call, from which on a value has another colour


def page_of(model: str, before: Sequence[Drawn], after: Sequence[Drawn]) -> str:
    """A page with the program of a model before and after the passes."""
    return render(TEMPLATE, SCRIPTS, model=model, **compared(before, after))


def compared(before: Sequence[Drawn], after: Sequence[Drawn]) -> dict[str, Any]:
    """What the template of graphs needs for a program before and after the passes."""
    drawings = zip((before, after), states_of(before, after), strict=True)
    return {
        "graphs": _as_data([[_values(*item) for item in zip(*pair, strict=True)] for pair in drawings], 0.0),
        "figures": ("Before the passes", "After the passes"),
        "legend": (("kept", "as captured"), ("gone", "gone afterwards"), ("module", "module")),
    }


def with_times(drawing: Sequence[Drawn], call: float, engine: str) -> dict[str, Any]:
    """What the template of graphs needs for a program with the time of each value.

    Args:
        call: milliseconds of a whole one.
    """
    heat = [(f"heat-{len(HOT) - place}", f"{100 * share:.0f} % of the call or more") for place, share in enumerate(HOT)]
    return {
        "graphs": _as_data([[_values(item, KEPT) for item in drawing]], call),
        "figures": (f"With the times of {engine}",),
        "legend": (*heat, ("module", "module")),
    }


def _as_data(drawings: list[list[list[Any]]], call: float) -> str:
    """Drawings as JSON that ends no element of a page, whatever is in it."""
    data = {"call": call, "hot": HOT, "drawings": drawings}
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _values(item: Drawn, state: str) -> list[Any]:
    texts = [printable(text) for text in (item.name, item.op, item.type, item.module)]
    origins, weights = ([printable(text) for text in found] for found in (item.origins, item.weights))
    return [*texts, origins, printable(item.rule), weights, list(item.reads), state, float(f"{item.ms:.4g}")]
