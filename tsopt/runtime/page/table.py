"""A page with charts and a table that can be sorted and searched: of a sweep, and of a profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tsopt.runtime.page import graph
from tsopt.runtime.page.chart import Chart, charts_as_data
from tsopt.runtime.page.document import render

TEMPLATE = "table.html.jinja"
SCRIPTS = ("uPlot.iife.min.js", "charts.js", "table.js")


def page_of(
    title: str,
    said: str,
    charts: Sequence[Chart],
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    remarks: Sequence[str],
    program: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """The page.

    Args:
        said: the outcome in one sentence.
        header, rows: the table, as text.
        remarks: what is said below it.
        program: what the template of graphs needs, if there is one on the page.
    """
    charts = [chart for chart in charts if chart.as_data()["series"]]
    return render(
        TEMPLATE,
        (*SCRIPTS, *graph.SCRIPTS) if program else SCRIPTS,
        title=title,
        said=said,
        charts=charts,
        data=charts_as_data(charts),
        header=header,
        rows=rows,
        remarks=remarks,
        **({"graphs": ""} | dict(program)),
    )
