"""Passes on a program with dynamic sizes: they run at a few sizes, and the results are merged into one program.

Passes see sizes as numbers. Their results at several sizes are compared call by call: a number that differs must be the
size of an available tensor, or one that the model itself computes from sizes. If anything else differs, the passes
depend on the sizes, and the program is not optimized for all of them. `samples.py` chooses the sizes that are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.labels import LABEL
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.origin import origin_of, provenance
from tsopt.compiler.graph.program import Program
from tsopt.compiler.sizes.samples import held_out, sample_sizes
from tsopt.compiler.sizes.specialize import Instance, Sizes, evaluate, instance, retyped, traced_sizes
from tsopt.compiler.sizes.survey import Survey, is_visible
from tsopt.compiler.tensor_bytes import same_bytes
from tsopt.errors import PassError

RESHAPES = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})
Numbers = tuple[int, ...]  # one for each sample
DIFFERENT = "the passes produce different graphs at different sizes"
WRONG = "the graph that the passes produce is right only at some sizes"


class NotGeneral(PassError):
    """The passes produce different graphs at different sizes."""


def through(program: Program, change: Callable[[Program], Program]) -> Program:
    """Applies a change to a program; if its sizes are dynamic, for all sizes at once.

    Raises:
        NotGeneral: the change produces different graphs at different sizes.
    """
    if not program.signature.dims:
        return change(program)
    survey = Survey(program)
    try:
        return _through(program, change, sample_sizes(program, survey=survey), survey)
    except NotGeneral:
        # What pays is decided by sizes as well: then as it is decided near the sizes that were traced.
        return _through(program, change, sample_sizes(program, near=True, survey=survey), survey)


def _through(
    program: Program, change: Callable[[Program], Program], samples: Sequence[Sizes], survey: Survey
) -> Program:
    try:
        instances = [instance(program, sizes, survey.values(sizes)) for sizes in samples]
    except Exception as error:  # whatever an op says about sizes that do not fit
        raise NotGeneral("the program fails at some of the sizes in its ranges", why=str(error)[:200]) from error
    merged = _Merged(program, instances, [_typed(change(item.program)) for item in instances])
    made = merged.program()
    for sizes in held_out(program, samples, survey):
        merged.check(made, sizes, survey)
    return retyped(made, traced_sizes(program.signature))


def _typed(program: Program) -> Program:
    """The program, its own where a change has left calls without a type."""
    if all("val" in node.meta for node in program.graph.nodes if node.op != "output"):
        return program
    return retyped(program, {})


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a number is to be had: the size of an axis, or the node itself."""

    node: fx.Node
    axis: int | None


class _Merged:
    """One graph of several that differ in numbers."""

    def __init__(self, original: Program, instances: Sequence[Instance], made: Sequence[Program]) -> None:
        self.original, self.instances, self.made = original, instances, made
        self.graph = fx.Graph()
        self.weights: dict[str, torch.Tensor] = {}
        self.numbers: dict[Numbers, fx.Node] = {}  # that the graph computes already
        self.sources: dict[Numbers, _Source] = {}  # sizes of the tensors that it has
        # What the original computes from sizes, by its values; the first of those that have the same. Passes have seen
        # what calls are given, and could only guess at the rest.
        self.expressions: dict[tuple[type, Numbers], fx.Node] = {}
        self.read: dict[_Source, fx.Node] = {}  # sizes that the graph reads already
        self.computed: dict[fx.Node, fx.Node] = {}  # of the original -> of this one
        numbers = [node for node in original.graph.nodes if ops.is_number(node) and node.target is not ops.SIZE]
        for node in sorted(numbers, key=is_visible, reverse=True):
            values = self._values(node)
            self.expressions.setdefault((type(values[0]), values), node)
        self.origins: dict[Numbers, _Source] = {}  # sizes and numbers of the original
        for node in instances[0].values:
            self._note(node)
        self.nodes: dict[fx.Node, fx.Node] = {}  # of the first graph -> of this one
        self.given: dict[fx.Node, fx.Node] = {}  # of the original -> of this one

    def program(self) -> Program:
        lists = [list(made.graph.nodes) for made in self.made]
        if len({len(nodes) for nodes in lists}) > 1:
            raise NotGeneral(DIFFERENT, why="the number of calls differs")
        self.places = [{node: i for i, node in enumerate(nodes)} for nodes in lists]
        originals = iter([n for n in self.original.graph.nodes if n.op == "placeholder"])
        given = iter(self.instances[0].given)
        for same in zip(*lists, strict=True):
            first = same[0]
            if first.op == "placeholder":
                source = next(originals, None)
                if source is None:
                    self.nodes[first] = self._given(next(given))
                    continue
                self.nodes[first] = self.given[source] = self.graph.placeholder(source.name)
                self._offer(self.nodes[first], same)
            elif first.op == "output":
                self.graph.output(self._merge(same, [node.args[0] for node in same]))
            else:
                self.nodes[first] = self._node(same)
                self._offer(self.nodes[first], same)
        return self._finished()

    def _finished(self) -> Program:
        for node in reversed(self.graph.nodes):
            if node.op not in ("call_function", "get_attr") or node.users:
                continue
            if not ops.has_effect(node) and not ops.draws(node):
                self.graph.erase_node(node)
        held = {str(node.target) for node in self.graph.nodes if node.op == "get_attr"}
        weights = {name: tensor for name, tensor in self.weights.items() if name in held}
        numerics = max(made.numerics for made in self.made)
        return replace(self.original, graph=self.graph, weights=weights, numerics=numerics)

    def check(self, made: Program, sizes: Sizes, survey: Survey) -> None:
        """Checks, at sizes that were not tried, the sizes of results and the numbers that replace the original's.

        Raises:
            NotGeneral: they have not.
        """
        given = survey.values(sizes)
        assert given is not None
        where = ", ".join(f"{name} {size}" for name, size in sizes.items())
        try:
            values = evaluate(made, sizes)
        except Exception as error:  # whatever an op says about sizes that do not fit
            raise NotGeneral(WRONG, why=f"at {where}: {str(error)[:200]}") from error
        for old, new in zip(self.original.outputs, made.outputs, strict=True):
            if given[old].shape != values[new].shape:
                raise NotGeneral(
                    WRONG, why=f"at {where}: a result is {list(values[new].shape)} instead of {list(given[old].shape)}"
                )
        for wanted, node in self.numbers.items():
            source = self.origins.get(wanted)
            if source is None or node not in values:
                continue
            of_axis = source.axis is not None
            expected = given[source.node].shape[source.axis] if of_axis else given[source.node]
            if expected != values[node]:
                raise NotGeneral(WRONG, why=f"at {where}: a number is {values[node]} instead of {expected}")

    def _node(self, same: Sequence[fx.Node]) -> fx.Node:
        first = same[0]
        if any((node.op, node.target) != (first.op, first.target) for node in same):
            raise self._differ(same, "the called op differs")
        if first.op == "get_attr":
            return self._weight(same)
        shorter = self._shape(same)
        if shorter is not None:
            return shorter
        args = self._merge(same, [node.args for node in same])
        if any(node.kwargs.keys() != first.kwargs.keys() for node in same):
            raise self._differ(same, "the named arguments differ")
        kwargs = {key: self._merge(same, [node.kwargs[key] for node in same]) for key in first.kwargs}
        return self._made(first, self.graph.create_node("call_function", first.target, args, kwargs))

    def _made(self, like: fx.Node, node: fx.Node) -> fx.Node:
        node.meta = provenance(like.meta) | {key: like.meta[key] for key in (LABEL,) if key in like.meta}
        return node

    def _weight(self, same: Sequence[fx.Node]) -> fx.Node:
        tensors = [made.weights[str(node.target)] for made, node in zip(self.made, same, strict=True)]
        first = tensors[0]
        if not all(other is first or _equal(other, first) for other in tensors):
            raise self._differ(same, f"the constant {same[0].target} differs")
        return self._made(same[0], self._held(str(same[0].target), first))

    def _held(self, name: str, tensor: torch.Tensor) -> fx.Node:
        free, number = name, 1
        while self.weights.setdefault(free, tensor) is not tensor:
            number += 1
            free = f"{name}_{number}"
        return self.graph.create_node("get_attr", free)

    def _shape(self, same: Sequence[fx.Node]) -> fx.Node | None:
        """A reshape said without a size that differs: `-1`, or axes that are put together or taken apart."""
        first = same[0]
        if first.target not in RESHAPES:
            return None
        sources: list[Any] = [node.args[0] for node in same]
        before = [tuple(source.meta["val"].shape) for source in sources]
        after = [tuple(node.meta["val"].shape) for node in same]
        if {len(shape) for shape in (*before, *after)} - {len(before[0]), len(after[0])}:
            return None
        olds, news = list(zip(*before, strict=True)), list(zip(*after, strict=True))
        lead = _common(olds, news)
        tail = _common(olds[lead:][::-1], news[lead:][::-1])
        old, new = olds[lead : len(olds) - tail], news[lead : len(news) - tail]
        x = self.nodes[sources[0]]
        if len(old) == 1 and len(new) > 1:
            loose = [i for i, sizes in enumerate(new) if len(set(sizes)) > 1]
            if len(loose) <= 1:
                sizes = [-1 if i in loose else new[i][0] for i in range(len(new))]
                return self._made(first, self.graph.call_function(aten.unflatten.int, (x, lead, sizes)))
        if len(new) == 1 and len(old) > 1:
            ends = (lead, lead + len(old) - 1)
            return self._made(first, self.graph.call_function(aten.flatten.using_ints, (x, *ends)))
        loose = [i for i, sizes in enumerate(news) if len(set(sizes)) > 1]
        if len(loose) == 1 and all(sizes[0] for sizes in news):
            shape = [-1 if i in loose else sizes[0] for i, sizes in enumerate(news)]
            return self._made(first, self.graph.call_function(aten.reshape.default, (x, shape)))
        return None

    def _merge(self, same: Sequence[fx.Node], values: Sequence[Any]) -> Any:
        """One argument of several; numbers that differ are computed."""
        first = values[0]
        kind = type(first)
        if any(type(value) is not kind for value in values):
            raise self._differ(same, "the argument types differ")
        if isinstance(first, fx.Node):
            if len({places[value] for places, value in zip(self.places, values, strict=True)}) > 1:
                raise self._differ(same, "the arguments differ")
            return self.nodes[first]
        if isinstance(first, (list, tuple)):
            if len({len(value) for value in values}) > 1:
                raise self._differ(same, "the list lengths differ")
            return kind(self._merge(same, items) for items in zip(*values, strict=True))
        if all(repr(value) == repr(first) for value in values):
            return first
        if kind is int:
            return self._number(tuple(values), same)
        if (kind, tuple(values)) in self.expressions:
            return self._computed(self.expressions[kind, tuple(values)])
        raise self._differ(same, f"an argument has the values {', '.join(map(repr, values))}")

    def _differ(self, same: Sequence[fx.Node], what: str) -> NotGeneral:
        return NotGeneral(
            DIFFERENT,
            where=origin_of(same[0]) or None,
            why=f"in {ops.name_of(same[0]) if ops.is_call(same[0]) else same[0].op}, {what}",
        )

    # ---- numbers ----------------------------------------------------------------------------------------

    def _offer(self, node: fx.Node, same: Sequence[fx.Node]) -> None:
        self._offer_sizes(node, [item.meta.get("val") for item in same])

    def _offer_sizes(self, node: fx.Node, values: Sequence[Any]) -> None:
        shapes = [tuple(value.shape) for value in values if isinstance(value, torch.Tensor)]
        if len(shapes) == len(values) and len({len(shape) for shape in shapes}) == 1:
            for axis, sizes in enumerate(zip(*shapes, strict=True)):
                if len(set(sizes)) > 1:
                    self.sources.setdefault(sizes, _Source(node, axis))

    def _note(self, node: fx.Node) -> None:
        values = self._values(node)
        if ops.is_number(node):
            if not is_visible(node):
                return
            self.origins.setdefault(values, _Source(node, None))
        elif all(isinstance(value, torch.Tensor) for value in values):
            for axis, sizes in enumerate(zip(*(value.shape for value in values), strict=False)):
                self.origins.setdefault(sizes, _Source(node, axis))

    def _number(self, wanted: Numbers, same: Sequence[fx.Node]) -> fx.Node:
        if wanted not in self.numbers:
            expression, source = self.expressions.get((int, wanted)), self.sources.get(wanted)
            if source is not None and (expression is None or not is_visible(expression)):
                self.numbers[wanted] = self._read(source)
            elif expression is not None:
                self.numbers[wanted] = self._computed(expression)
            else:
                numbers = ", ".join(map(str, wanted))
                raise self._differ(same, f"the number {numbers} is not one that the model computes")
        return self.numbers[wanted]

    def _computed(self, node: fx.Node) -> fx.Node:
        """A number of the original, computed in the merged graph in the same way."""
        if node not in self.computed:
            if node.target is ops.SIZE:
                self.computed[node] = self._size(node)
            else:
                args = fx.node.map_arg(node.args, self._computed)
                self.computed[node] = self.graph.call_function(node.target, args)  # type: ignore[arg-type]
        return self.computed[node]

    def _read(self, source: _Source) -> fx.Node:
        if source not in self.read:
            self.read[source] = self.graph.call_function(ops.SIZE, (source.node, source.axis))
        return self.read[source]

    def _size(self, node: fx.Node) -> fx.Node:
        """A size that the original reads: from the same input, or from a tensor of the same size."""
        source, axis = cast("tuple[fx.Node, int]", node.args)
        if source in self.given:
            return self._read(_Source(self.given[source], axis))
        return self._number(self._values(node), [node])

    def _values(self, node: fx.Node) -> tuple[Any, ...]:
        """What a node of the original is in each sample."""
        return tuple(item.values[node] for item in self.instances)

    # ---- values that depend only on sizes -----------------------------------------------------------------

    def _given(self, node: fx.Node) -> fx.Node:
        """The original's calls behind a further input, once more here."""
        todo = [node]
        while todo:
            last = todo[-1]
            missing = [n for n in last.all_input_nodes if not ops.is_number(n) and n not in self.given]
            if last not in self.given and missing:
                todo += missing
                continue
            todo.pop()
            if last in self.given:
                continue
            if last.op == "get_attr":
                self.given[last] = self._held(str(last.target), self.original.weights[str(last.target)])
                continue
            args, kwargs = fx.node.map_arg((last.args, dict(last.kwargs)), self._of_original)
            self.given[last] = self._made(last, self.graph.create_node(last.op, last.target, args, kwargs))
            self._offer_sizes(self.given[last], self._values(last))
        return self.given[node]

    def _of_original(self, node: fx.Node) -> Any:
        if not ops.is_number(node):
            return self.given[node]
        return self._computed(node)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device) and same_bytes(a, b)


def _common(old: Sequence[Numbers], new: Sequence[Numbers]) -> int:
    """How many axes are the same from the start."""
    return next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
