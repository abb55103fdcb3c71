"""Traces a pattern function into a Pattern, and matches a pattern at a node.

A pattern is a plain function over ATen overloads. Its parameters are holes; the same hole twice must be
the same value. Arguments compare by schema name with defaults filled in, literals by type and bits.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from tsopt.compiler.graph import ops
from tsopt.errors import RuleError

EXAMPLE = "lambda x: aten.relu.default(x)"


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

    Raises:
        RuleError: the function is not a valid pattern, or could never match.
    """
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    parameters = inspect.signature(function).parameters
    if any(item.kind not in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD) for item in parameters.values()):
        raise _refused(function, "a pattern takes positional parameters only", fix="name each hole: lambda x, y: ...")
    holes = tuple(parameters)
    proxies = [fx.Proxy(graph.placeholder(hole), tracer) for hole in holes]
    try:
        result = function(*proxies)
    except Exception as error:  # a mistake in the pattern
        said = f"{type(error).__name__}: {error}"
        raise _refused(function, "a pattern raises an error", why=said[:300], fix=f"write calls, {EXAMPLE}") from error
    root = result.node if isinstance(result, fx.Proxy) else None
    if root is None or root.op == "placeholder":
        raise _refused(function, "a pattern must return the result of a call", fix=f"for example {EXAMPLE}")
    for node in graph.nodes:
        _check_call(function, node)
    return Pattern(root, holes, sum(1 for node in graph.nodes if ops.is_call(node)))


def _check_call(function: Callable[..., Any], node: fx.Node) -> None:
    """Raises RuleError for a call that no program can hold: the pattern would match nothing, and nobody would know."""
    if node.op == "placeholder" or node.target is operator.getitem:
        return
    if not ops.is_overload(node.target):
        known = _overloads_of(node.target)
        raise _refused(
            function,
            f"a pattern calls {_spelled(node.target)}, which is not an overload of an op",
            why="programs hold calls of overloads, so it would never match",
            fix=f"write {'one of: ' if len(known) > 1 else ''}{', '.join(known)}" if known else f"write {EXAMPLE}",
        )
    names = {name: has_default for name, has_default, _ in ops.parameters(cast(OpOverload, node.target))}
    given = [*list(names)[: len(node.args)], *node.kwargs]
    lacking = [name for name, has_default in names.items() if not has_default and name not in given]
    if lacking or len(node.args) > len(names) or not names.keys() >= set(given) or len(given) != len(set(given)):
        raise _refused(
            function,
            f"a pattern calls {node.target} with other arguments than it has",
            why=f"no argument {', '.join(lacking)}" if lacking else None,
            fix=f"match its parameters: {', '.join(names)}",
        )


def _refused(function: Callable[..., Any], what: str, *, fix: str, why: str | None = None) -> RuleError:
    code = getattr(function, "__code__", None)
    where = None if code is None else f"{code.co_filename}:{code.co_firstlineno}"
    return RuleError(what, where=where, why=why, fix=fix)


def _spelled(target: Any) -> str:
    """A packet as `aten.relu`, a method as `relu`, a function as `torch.relu`."""
    if isinstance(target, (str, OpOverloadPacket)):
        return str(target)
    place = getattr(target, "__module__", None) or "torch"
    return f"{place}.{getattr(target, '__name__', target)}"


def _overloads_of(target: Any) -> list[str]:
    """The overloads that somebody may have meant who wrote a packet, a function of torch, a method or an operator."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    packet = target if isinstance(target, OpOverloadPacket) else getattr(ops.aten, name.strip("_") or "_", None)
    if not isinstance(packet, OpOverloadPacket):
        return []
    return [f"{packet}.{item}" for item in packet.overloads() if not ops.writes(getattr(packet, item))]


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
