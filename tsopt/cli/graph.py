"""`tsopt inspect --graph FILE`: the program before and after the passes, as a page or as a picture."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsopt.cli.saved import check_saved
from tsopt.errors import UsageError
from tsopt.runtime.untrusted_text import printable

if TYPE_CHECKING:
    from tsopt.cli.saved import Writers
    from tsopt.compiler.graph.drawing import Drawn

PICTURES = (".svg", ".png")
MOST_DRAWN = 3000  # values in a picture: Graphviz takes minutes for more
# Fills of what the most frequent rules have made, by Brewer's pastels; then the others.
BY_RULE = ("#b3e2cd", "#fdcdac", "#cbd5e8", "#f4cae4", "#e6f5c9", "#fff2ae", "#f1e2cc")
OTHER, GONE_FILL = "#dddddd", "#fbb4ae"
INSTALL = (
    "pip install graphviz, and install the program `dot` from https://graphviz.org; or write a .html file, which needs"
    " neither"
)


@dataclass(frozen=True, slots=True)
class Graphs:
    """A model's program before and after the passes."""

    model: str
    before: tuple[Drawn, ...]
    after: tuple[Drawn, ...]


@dataclass
class _Module:
    """The values in a module, by position, and the modules in it."""

    values: list[int] = field(default_factory=list)
    modules: dict[str, _Module] = field(default_factory=dict)  # by the last part of their path


def check_graph(path: Path | None) -> None:
    """Raises UsageError or BundleError if a graph cannot be written there."""
    check_saved("--graph", path, WRITERS)
    if path is not None and path.suffix != ".html":
        _graphviz()
        if path.suffix in PICTURES and shutil.which("dot") is None:
            raise UsageError(f"a {path.suffix} file needs Graphviz", why="there is no `dot` in PATH", fix=INSTALL)


def _page(graphs: Graphs) -> str:
    from tsopt.runtime.page.graph import page_of

    return page_of(graphs.model, graphs.before, graphs.after)


def _source(graphs: Graphs) -> str:
    return str(_dot(graphs).source)


def _picture(graphs: Graphs, kind: str) -> bytes:
    count = len(graphs.before) + len(graphs.after)
    if count > MOST_DRAWN:
        raise UsageError(
            f"the program has too many values for a picture: {count}",
            fix="write a .html file, folded by module, or .dot",
        )
    graphviz, dot = _graphviz(), _dot(graphs)
    try:
        return bytes(dot.pipe(format=kind))
    except (graphviz.ExecutableNotFound, graphviz.CalledProcessError) as error:
        raise UsageError(f"Graphviz cannot draw the .{kind} file", why=str(error)[:300], fix=INSTALL) from error


WRITERS: Writers = {
    ".html": _page,
    ".dot": _source,
    ".svg": lambda graphs: _picture(graphs, "svg"),
    ".png": lambda graphs: _picture(graphs, "png"),
}


def _graphviz() -> Any:
    try:
        import graphviz
    except ImportError as error:
        raise UsageError("pictures of graphs need Graphviz", why=str(error), fix=INSTALL) from error
    return graphviz


def _dot(graphs: Graphs) -> Any:
    """Both programs in one graph, each in a box, with a box for each module."""
    from tsopt.compiler.graph.drawing import states_of

    whole = _graphviz().Digraph(graphs.model)
    whole.attr("graph", fontname="sans-serif", labeljust="l")
    whole.attr("node", shape="box", style="rounded,filled", fillcolor="white", fontname="monospace", fontsize="10")
    parts = (("before the passes", graphs.before), ("after the passes", graphs.after))
    fills = _fills([*graphs.before, *graphs.after])
    for number, ((title, drawing), states) in enumerate(
        zip(parts, states_of(graphs.before, graphs.after), strict=True)
    ):
        with whole.subgraph(name=f"cluster_{number}") as part:
            part.attr(label=title)
            _fill(part, _tree(drawing), drawing, states, fills, name=f"{number}", cluster=f"cluster_{number}")
            for place, item in enumerate(drawing):
                for source in item.reads:
                    part.edge(f"{number}.{source}", f"{number}.{place}")
    return whole


def _fills(values: Sequence[Drawn]) -> dict[str, str]:
    """A colour for each rule."""
    rules = [rule for rule, _ in Counter(item.rule for item in values if item.rule).most_common()]
    return {rule: BY_RULE[number] if number < len(BY_RULE) else OTHER for number, rule in enumerate(rules)}


def _tree(drawing: Sequence[Drawn]) -> _Module:
    root = _Module()
    for place, item in enumerate(drawing):
        module = root
        for part in item.module.split(".") if item.module else ():
            module = module.modules.setdefault(part, _Module())
        module.values.append(place)
    return root


def _fill(
    box: Any,
    module: _Module,
    drawing: Sequence[Drawn],
    states: Sequence[str],
    fills: dict[str, str],
    *,
    name: str,
    cluster: str,
) -> None:
    """Puts the values of a module into a box, and those of the modules in it into boxes of their own.

    Args:
        name: that of the drawing, with which those of its values begin.
        cluster: what the box is called in the file.
    """
    from tsopt.compiler.graph.drawing import GONE

    escape = _graphviz().escape
    for place in module.values:
        item = drawing[place]
        lines = [item.name, " ".join(filter(None, (item.op, item.type))), f"by {item.rule}" if item.rule else ""]
        fill = fills[item.rule] if item.rule else GONE_FILL if states[place] == GONE else "white"
        text, origins = ("\n".join(map(printable, filter(None, found))) for found in (lines, item.origins))
        box.node(f"{name}.{place}", label=escape(text), tooltip=escape(origins or text), fillcolor=fill)
    for number, (path, inner) in enumerate(module.modules.items()):
        own_cluster = f"{cluster}_{number}"
        if len(inner.values) + len(inner.modules) == 1:  # a box around a single thing says nothing
            _fill(box, inner, drawing, states, fills, name=name, cluster=own_cluster)
            continue
        with box.subgraph(name=own_cluster) as own:
            own.attr(label=escape(printable(path)), color="gray", tooltip=escape(printable(path)))
            _fill(own, inner, drawing, states, fills, name=name, cluster=own_cluster)
