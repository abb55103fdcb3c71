"""Random typed programs: single calls, formulas as people write them, and the patterns of the rules themselves.

The patterns are taken from the rule tables, so a rule is attacked as soon as it is in a table.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import fx

from tests.passes.program_builder import SHAPES, Builder, Drawn, numbers
from tests.passes.random_calls import (
    ARITHMETIC,
    CASTS,
    DATA_MOVEMENT,
    DTYPES,
    ELEMENTWISE,
    LAYERS,
    LITERALS,
    REDUCTIONS,
    arguments,
    make,
    rank,
)
from tests.passes.random_formulas import FORMULAS
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.rewriting.match import Pattern
from tsopt.compiler.rewriting.rewrite import Rule, RulePass
from tsopt.passes import STANDARD

# ---- single calls -----------------------------------------------------------------------------------------


def single(table: Sequence[Any]) -> Callable[[Builder], Any]:
    return lambda b: make(b, b.pick(table))


def split(b: Builder) -> None:
    """`split` and some of its parts."""
    parts = make(b, aten.split.Tensor)
    for i in range(b.integer(1, 2)):
        if parts is not None and i < len(parts.meta["val"]):
            b.call(operator.getitem, parts, i)


def matmul(b: Builder) -> None:
    x = b.wanted(rank(2, 4))
    y = x and b.value(lambda t: t.dtype == b.fake(x).dtype and t.dim() >= 2)
    if y is not None and b.fake(y).shape[-2] != b.fake(x).shape[-1]:
        y = b.call(aten.transpose.int, y, -2, -1)
    if y is not None:
        b.call(aten.matmul.default, x, y)


def lookup(b: Builder) -> None:
    """An embedding with indices that exist."""
    x = b.wanted(lambda t: t.dtype == torch.int64)
    index = b.call(aten.remainder.Scalar, x, 7)
    if index is not None:
        make(b, aten.embedding.default, {"indices": index})


def constant(b: Builder) -> None:
    """A weight, or a tensor made by a factory, that what follows may compute with."""
    shape, kind = list(b.pick(SHAPES)), b.integer(0, 3)
    if kind == 0:
        b.values.append(b.random(shape, b.pick(DTYPES)))
    elif kind == 1:
        b.call(aten.full.default, shape, b.pick(LITERALS), dtype=b.pick(CASTS))
    elif kind == 2:
        b.call(aten.arange.default, b.integer(0, 4))
    else:
        b.call(aten.ones.default, shape, dtype=b.pick((None, torch.bool)))


def again(b: Builder) -> None:
    """A call that has been made before, on the same values."""
    old = [n for n in b.program.graph.nodes if ops.is_call(n) and n.target is not operator.getitem]
    if old:
        node = b.pick(old)
        b.call(node.target, *node.args, **node.kwargs)


# ---- the patterns of the rules ----------------------------------------------------------------------------


def rules_of(passes: Sequence[Any]) -> list[Rule]:
    """Every rule of a pipeline."""
    found: list[Rule] = []
    for item in passes:
        if isinstance(item, RulePass):
            found += item.rules
        elif hasattr(item, "passes"):
            found += rules_of(item.passes)
    return list({rule.name: rule for rule in found}.values())


RULES = rules_of(STANDARD)


def instance(b: Builder) -> None:
    """The pattern of some rule, with values and literals in place of its holes."""
    rule = b.pick(RULES)
    instantiate(b, b.pick(rule.patterns))


def instantiate(b: Builder, pattern: Pattern) -> fx.Node | None:
    made: dict[fx.Node, Any] = {}
    last = None
    for node in pattern.root.graph.nodes:
        if not ops.is_call(node):
            continue
        if node.target is operator.getitem:
            parts = made[node.args[0]] if node.args[0] in made else make(b, aten.split.Tensor)
            last = None if parts is None else b.call(operator.getitem, parts, node.args[1])
        else:
            last = _fill_pattern(b, node, made)
        if last is None:
            return None
        made[node] = last
    return last


def _fill_pattern(b: Builder, node: fx.Node, made: dict[fx.Node, Any]) -> fx.Node | None:
    """One call of a pattern. A hole that is met for the first time takes what the op needs there."""
    bound = ops.bind(node)
    holes = {n: v for n, v in bound.items() if isinstance(v, fx.Node) and v not in made}
    lists = [value for value in bound.values() if isinstance(value, (list, tuple))]
    for hole in (hole for value in lists for hole in value if isinstance(hole, fx.Node)):
        made.setdefault(hole, b.value())
    known = {n: fx.node.map_arg(v, made.__getitem__) for n, v in bound.items() if n not in holes}
    target: Any = node.target
    found = arguments(b, target, known)
    if found is None:
        return None
    made |= {hole: found[name] for name, hole in holes.items()}
    return make(b, target, found)


# ---- programs ---------------------------------------------------------------------------------------------

STEPS: tuple[Callable[[Builder], Any], ...] = (
    single(ELEMENTWISE), single(ARITHMETIC), single(DATA_MOVEMENT), single(REDUCTIONS), single(LAYERS), split, matmul,
    lookup, again, constant, constant, *[instance] * 8, *FORMULAS,
)  # fmt: skip


def build(draw: Callable[[Any], Any], steps: Sequence[Callable[[Builder], Any]] = STEPS, most: int = 8) -> Drawn:
    """One or two inputs, some steps, and as outputs what nobody uses, and now and then another value."""
    b = Builder(draw)
    for i in range(b.integer(1, 2)):
        b.input(numbers(b.pick(SHAPES), b.pick(DTYPES), 100 + i))
    for _ in range(b.integer(1, most)):
        b.pick(steps)(b)
    return close(b)


def close(b: Builder) -> Drawn:
    ends = [node for node in b.values if not node.users] or b.values[-1:]
    if b.often():  # an output that is no view lets go of what must not be shared
        ends = [b.call(aten.neg.default, node) or node for node in ends]
    outputs = [*ends, *([] if b.often(3) else [b.pick(b.values[::-1])])]
    return b.finish(list(dict.fromkeys(outputs)))


@st.composite
def programs(draw: Any, steps: Sequence[Callable[[Builder], Any]] = STEPS, most: int = 8) -> Drawn:
    return build(draw, steps, most)


@st.composite
def around(draw: Any, rule: Rule) -> Drawn:
    """Programs with a pattern of one rule in their middle."""
    b = Builder(draw)
    b.input(numbers(b.pick(SHAPES), b.pick(DTYPES), 100))
    for _ in range(b.integer(0, 2)):
        b.pick(STEPS)(b)
    if not b.often(3):
        b.pick(FORMULAS)(b)  # a rule whose pattern is one product finds the rest by itself
    for _ in range(4):
        if instantiate(b, b.pick(rule.patterns)) is not None:
            break
    for _ in range(b.integer(0, 2)):
        b.pick(STEPS)(b)
    return close(b)
