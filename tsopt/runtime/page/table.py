"""A page with charts and a table that can be sorted and searched: of a sweep, and of a profile."""

from __future__ import annotations

from collections.abc import Sequence

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
) -> str:
    """The page.

    Args:
        said: the outcome in one sentence.
        header, rows: the table, as text.
        remarks: what is said below it.
    """
    charts = [chart for chart in charts if chart.as_data()["series"]]
    data = charts_as_data(charts)
    return render(
        TEMPLATE, SCRIPTS, title=title, said=said, charts=charts, data=data, header=header, rows=rows, remarks=remarks
    )
