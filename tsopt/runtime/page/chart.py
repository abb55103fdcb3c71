"""Charts as data for the script that draws them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tsopt.runtime.untrusted_text import printable


@dataclass(frozen=True, slots=True)
class Series:
    """Some points of a chart, with a name for the legend.

    Attributes:
        points: x, y, and what the point is.
        is_line: whether they are joined.
    """

    name: str
    points: tuple[tuple[float, float, str], ...]
    is_line: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart with two axes, both logarithmic.

    Attributes:
        x, y: what the axes are, with units.
    """

    title: str
    x: str
    y: str
    series: tuple[Series, ...]

    def as_data(self) -> dict[str, Any]:
        """The chart for the script; without points that a logarithmic axis cannot have, and series of such points."""
        kept = {
            item: [(x, y, printable(said)) for x, y, said in item.points if _is_positive(x) and _is_positive(y)]
            for item in self.series
        }
        series = [
            {"name": printable(item.name), "points": points, "line": item.is_line}
            for item, points in kept.items()
            if points
        ]
        return {"title": self.title, "x": self.x, "y": self.y, "series": series}


def charts_as_data(charts: Sequence[Chart]) -> str:
    """The charts as JSON that ends no element of a page, whatever is in it."""
    return json.dumps([chart.as_data() for chart in charts], separators=(",", ":")).replace("<", "\\u003c")


def _is_positive(value: float) -> bool:
    return 0 < value < math.inf
