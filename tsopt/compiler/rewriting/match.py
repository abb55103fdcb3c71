"""Traces a pattern function into a Pattern, and matches a pattern at a node.

A pattern is a plain function over ATen overloads. Its parameters are holes; the same hole twice must be
the same value. Arguments compare by schema name with defaults filled in, literals by type and bits.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from tsopt.compiler.graph import ops


@dataclass(frozen=True, slots=True)
class Pattern:
    """A traced pattern: its root, and the names of its holes in the order of the parameters."""

    root: fx.Node
    holes: tuple[str, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Match:
    """What the holes stand for, and the nodes that the pattern covers, root first."""

    holes: dict[str, Any]
    nodes: tuple[fx.Node, ...]


def pattern(function: Callable[..., Any]) -> Pattern:
    """Traces a pattern function: calls it with a proxy for each hole, as fx.Tracer does.

    fx.Tracer would patch torch.nn.Module and `math` for each trace, which pattern functions do not need: 250 ms in all.
    """
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    parameters = inspect.signature(function).parameters
    if any(item.kind not in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD) for item in parameters.values()):
        raise TypeError("a pattern takes positional parameters only")
    holes = tuple(parameters)
    result = function(*(fx.Proxy(graph.placeholder(hole), tracer) for hole in holes))
    root = result.node if isinstance(result, fx.Proxy) else None
    if root is None or not ops.is_call(root):
        raise TypeError("a pattern must return the result of a call")
    return Pattern(root, holes, sum(1 for node in graph.nodes if ops.is_call(node)))


def match(wanted: Pattern, node: fx.Node) -> Match | None:
    """The match of a pattern with its root at a node, or None. Who else uses the nodes inside is not asked here."""
    bound: dict[fx.Node, Any] = {}
    covered: dict[fx.Node, fx.Node] = {}
    todo: list[tuple[Any, Any]] = [(wanted.root, node)]
    while todo:
        want, found = todo.pop()
        if isinstance(want, fx.Node) and want.op == "placeholder":
            if want in bound and not same(bound[want], found):
                return None
            bound[want] = found
        elif isinstance(want, fx.Node):
            if not isinstance(found, fx.Node) or found.target != want.target or not ops.is_call(found):
                return None
            if covered.setdefault(want, found) is not found:
                return None
            mine, theirs = ops.bind(want), ops.bind(found)
            if mine.keys() != theirs.keys():
                return None
            todo += [(mine[name], theirs[name]) for name in mine]
        elif isinstance(want, (list, tuple)) and _has_node(want):
            if not isinstance(found, (list, tuple)) or len(want) != len(found):
                return None
            todo += zip(want, found, strict=True)
        elif not same(want, found):
            return None
    by_name = {str(hole.target): value for hole, value in bound.items()}
    return Match({name: by_name.get(name) for name in wanted.holes}, tuple(covered.values()))


def _has_node(value: Any) -> bool:
    return any(isinstance(item, fx.Node) or (isinstance(item, (list, tuple)) and _has_node(item)) for item in value)


def same(a: Any, b: Any) -> bool:
    """Equal as arguments: `1`, `1.0` and `True` differ, `0.0` and `-0.0` differ, NaN is NaN; list and tuple do not."""
    if isinstance(a, fx.Node) or isinstance(b, fx.Node):
        return a is b
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return bool(a == b)
