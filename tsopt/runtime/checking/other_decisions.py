"""What values are where rounding decides otherwise before them: another branch, the next step, a place among equals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tsopt.compiler.analysis.jumps import COMPARISONS, is_decision
from tsopt.compiler.analysis.ranged_call import base_name
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.values import Unknown, Values
from tsopt.runtime.checking.compare import TOLERANCES
from tsopt.runtime.checking.margins import UNROUNDED, Known, Margins, breaks_ties, is_float, sources_of, upstream

ALONE = 3  # decisions that are changed one by one, too, and not only all at once: each is another run in float64
Decided = Mapping[fx.Node, torch.Tensor]


class OtherDecisions:
    """The values of a program, by the decisions that it makes in its own dtypes and by other ones.

    Args:
        numbers: the values before which decisions are looked for.
        values: those of the program, of which the inputs are taken.

    Attributes:
        differ: whether float64 makes other decisions than the program.
    """

    def __init__(self, numbers: Sequence[fx.Node], values: Values) -> None:
        self._program = values.program
        self._inputs = {node: values[node] for node in self._program.graph.nodes if node.op == "placeholder"}
        self._made: dict[fx.Node, torch.Tensor] = {}
        self.differ = False
        nodes = decisions_before(numbers)
        if not nodes:
            return
        asked = list(dict.fromkeys(item for node in nodes for item in (node, *_call_of(node).all_input_nodes)))
        own, wide = self._values(asked, {}, wide=False), self._values(asked, {})
        for node in nodes:
            if all(_are_alike(own[item], wide[item]) for item in (node, *_call_of(node).all_input_nodes)):
                self._made[node] = _as_made(node, wide, own)
        self.differ = any(not torch.equal(value, wide[node]) for node, value in self._made.items())
        self._margins = Margins(self._values(asked, self._made) if self.differ else wide, own)

    def as_made(self, wanted: Sequence[fx.Node]) -> dict[fx.Node, Any]:
        """Values in float64, by the decisions of the program."""
        return self._values(wanted, self._made)

    def otherwise(self, wanted: Sequence[fx.Node]) -> Iterator[Margins]:
        """By other decisions wherever they are within rounding: by all of them; where they are few, by each as well."""
        for changes in self._changes():
            later = _after(changes)  # which may be decided otherwise because of these
            decided = {**{node: made for node, made in self._made.items() if node not in later}, **changes}
            wide, own = (self._values(wanted, decided, wide=wide) for wide in (True, False))
            if all(_are_alike(wide[item], own[item]) for item in wanted):
                yield Margins(wide, own)

    def are_combined(self, number: fx.Node) -> bool:
        """Whether several decisions may be behind one element of a number, as they are behind one of a sum."""
        later = _after(self._made)
        between = [node for node in upstream(number) if node in later and node not in self._made]
        return any(
            torch.Tag.pointwise not in getattr(node.target, "tags", ()) and base_name(node) not in UNROUNDED
            for node in between
        )

    def _changes(self) -> Iterator[Decided]:
        up, down = ({node: other for node in self._made for other in self._others(node, side)} for side in (1, -1))
        yield from filter(None, (up, {} if _are_equal(up, down) else down))
        changed = dict.fromkeys((*up, *down))
        for node in changed if 1 < len(changed) <= ALONE else ():
            both = [{node: side[node]} for side in (up, down) if node in side]
            yield from both[:1] if len(both) > 1 and _are_equal(*both) else both

    def _others(self, node: fx.Node, side: int) -> list[torch.Tensor]:
        """A decision where rounding goes one way or the other; nothing if it stays the same."""
        made, operands = self._made[node], _call_of(node).all_input_nodes
        if not all(_are_alike(self._margins.own[operand], self._margins.wide[operand]) for operand in operands):
            return []
        if base_name(node) in COMPARISONS:
            margin = self._margins.of(node)
            other: Any = made if margin is None else made ^ margin.is_within
        else:
            other = self._moved(node, side)
        if isinstance(other, Unknown) or other.shape != made.shape:
            return []
        other = _unless_close(made, other, self._margins.own[node].dtype)
        return [] if torch.equal(other, made) else [other]

    def _moved(self, node: fx.Node, side: int) -> Any:
        """What a call makes of numbers that are off by as much as rounding may move them, to one side."""
        call, wide = _call_of(node), self._margins.wide
        floats = _floats_of(call, wide)
        if not floats:
            return wide[node]
        reach = self._margins.reach(floats[0])
        if breaks_ties(call):
            reach = reach * _alternating(call, wide[floats[0]])
        known = {source: wide[source] for source in call.all_input_nodes}
        known[floats[0]] = wide[floats[0]] + side * reach
        return Values(self._program, known, wide=True)[node]

    def _values(self, wanted: Sequence[fx.Node], decided: Decided, *, wide: bool = True) -> dict[fx.Node, Any]:
        known = {node: value if wide else value.to(node.meta["val"].dtype) for node, value in decided.items()}
        found = Values(self._program, {**self._inputs, **known}, wide=wide).compute(wanted)
        return dict(zip(wanted, found, strict=True))


def decisions_before(numbers: Sequence[fx.Node]) -> list[fx.Node]:
    """The decisions that values depend on, of numbers that have been rounded."""
    behind, rounded = set(upstream(*numbers)), set[fx.Node]()
    found: list[fx.Node] = []
    for node in numbers[0].graph.nodes if numbers else ():
        if node not in behind:
            continue
        is_of_rounded = not rounded.isdisjoint(node.all_input_nodes)
        is_of_floats = any(map(is_float, ops.tensors_of(node.meta.get("val"))))
        if is_of_floats and (is_of_rounded or base_name(node) not in UNROUNDED):
            rounded.add(node)
        if is_of_rounded and _decides(node):
            found.append(node)
    return found


def _after(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """What is computed of values."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        later = [user for user in pending.pop().users if user not in found]
        found.update(later)
        pending += later
    return found


def _decides(node: fx.Node) -> bool:
    """Whether a value jumps with what it depends on. The largest of several numbers does not, but its place does."""
    value, call = node.meta.get("val"), _call_of(node)
    if not isinstance(value, torch.Tensor):
        return False
    return is_decision(node) or (breaks_ties(call) and bool(base_name(call)) and not is_float(value))


def _call_of(node: fx.Node) -> fx.Node:
    """The call that makes a value, also where that is one of several results."""
    return node.args[0] if base_name(node) == "getitem" and isinstance(node.args[0], fx.Node) else node


def _floats_of(call: fx.Node, values: Known) -> list[fx.Node]:
    return [item for item in sources_of(call) if isinstance(values[item], torch.Tensor) and is_float(values[item])]


def _as_made(node: fx.Node, wide: Known, own: Known) -> torch.Tensor:
    """What a program decides. A number is the one of float64 where it differs by no more than what it is made of."""
    value, mine = wide[node], own[node]
    made = _unless_close(value, mine, mine.dtype)
    for source in _floats_of(_call_of(node), wide)[:1] if is_float(value) else ():
        if wide[source].shape == value.shape:
            is_carried = (mine - value).abs() <= (own[source] - wide[source]).abs()
            made = torch.where(is_carried, value, made)
    return made


def _alternating(call: fx.Node, value: torch.Tensor) -> torch.Tensor:
    """1 and -1 in turn, by size: two neighbours in an order change places if they are moved one way, or the other."""
    dim = ops.bind(call).get("dim", -1)
    flat = value if isinstance(dim, int) else value.reshape(-1)
    dim = dim if isinstance(dim, int) else -1
    return (1 - 2 * (flat.argsort(dim).argsort(dim) % 2)).reshape(value.shape)


def _unless_close(value: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Another value, and the first one where they differ by no more than rounding."""
    if not is_float(value):
        return other
    rtol, atol, _ = TOLERANCES[dtype if dtype in TOLERANCES else torch.bfloat16]
    other = other.to(value.dtype)
    return torch.where(torch.isclose(other, value, rtol=rtol, atol=atol, equal_nan=True), value, other)


def _are_alike(value: Any, other: Any) -> bool:
    """Whether two values are known, and of one shape: values may decide how many others there are."""
    shapes = [[tensor.shape for tensor in ops.tensors_of(item)] for item in (value, other)]
    return not isinstance(value, Unknown) and not isinstance(other, Unknown) and shapes[0] == shapes[1]


def _are_equal(some: Decided, others: Decided) -> bool:
    return some.keys() == others.keys() and all(torch.equal(value, others[node]) for node, value in some.items())
