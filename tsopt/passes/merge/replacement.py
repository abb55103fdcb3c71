"""Replaces values with others of a different memory layout, and updates everything that reads them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import fx

from tsopt.compiler.calls.types import TensorType
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.edit import erase_unused, reaches_output
from tsopt.compiler.graph.infer import infer
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.program import Program, tensor_type
from tsopt.passes.merge.draft import Draft

Values = dict[fx.Node, Any]


class Replacement:
    """Exchanges values of a program for those made on stages; the graph is in order again after `restore_order`.

    Args:
        depth: of each value of the program, more than that of what it reads.
    """

    def __init__(self, program: Program, depth: Mapping[fx.Node, int]) -> None:
        self.program = program
        # Keys of values: `order` puts sources before what reads them, `places` is where they stand in the graph.
        self.order = {node: (depth[node], i) for i, node in enumerate(depth)}
        self.places = {node: (i, i) for i, node in enumerate(depth)}
        self.erased: set[fx.Node] = set()

    def place(self, draft: Draft) -> None:
        """Gives new calls the places of what they are made for."""
        last: dict[int, tuple[int, int]] = {}  # by identity: a group may stand behind as many calls as it has members
        for node, group in draft.created.items():
            if id(group) not in last:
                last[id(group)] = (
                    max(self.order[member][0] for member in group),
                    max(self.places[member][0] for member in group),
                )
            serial = len(self.order)
            depth, place = last[id(group)]
            self.order[node], self.places[node] = (depth, serial), (place, serial)

    def separate(self, draft: Draft, replaced: dict[fx.Node, fx.Node]) -> None:
        """Copies what would be returned and share memory with an input, a weight or something else that is returned."""
        claimed: set[fx.Node] = set()
        for old, new in replaced.items():
            if not reaches_output(old):
                continue
            roots = _roots(new)
            if any(root not in draft.created or root.op == "get_attr" or root in claimed for root in roots):
                replaced[old] = _copied(draft, old, new)
            claimed |= roots

    def settle(
        self, draft: Draft, replaced: dict[fx.Node, fx.Node], gone: set[fx.Node], *, may_copy: bool
    ) -> Values | None:
        """The new types of what reads replaced values of another layout; with `may_copy` copies in the old one instead.

        None where that does not help.
        """
        fresh = self._settled(replaced, gone)
        if fresh is not None or not may_copy:
            return fresh
        for old, new in replaced.items():
            if not _same_layout(old, new):
                replaced[old] = _copied(draft, old, new)
        self.place(draft)
        return self._settled(replaced, gone)

    def _settled(self, replaced: Mapping[fx.Node, fx.Node], gone: set[fx.Node]) -> Values | None:
        """Fake values by node, as far as layouts change.

        None where an output would change its layout or start to share memory, where a call does not take the other
        layout, or where its result is unknown.
        """
        values = {old: new.meta["val"] for old, new in replaced.items()}
        final = {*replaced.values()}
        fresh: Values = {}
        waiting: list[tuple[tuple[int, int], fx.Node]] = []
        seen: set[fx.Node] = set()
        changed = [old for old, new in replaced.items() if not _same_layout(old, new)]
        while changed or waiting:
            for user in (user for node in changed for user in node.users if user not in gone and user not in seen):
                if user.op == "output":
                    return None
                seen.add(user)
                heapq.heappush(waiting, (self.order[user], user))
            changed = []
            if not waiting:
                break
            node = heapq.heappop(waiting)[1]
            value = self._recomputed(node, values)
            if value is None:
                return None
            if _same_strides(node.meta["val"], value):
                continue
            if node in final:
                return None  # its type has been used already
            fresh[node] = values[node] = value
            changed = [node]
        return fresh

    def _recomputed(self, node: fx.Node, values: Values) -> Any:
        """The fake value of a call that reads other values; None when the call must not be touched."""
        if not ops.is_pure(node) or node.target in ops.BY_STRIDES:
            return None
        args, kwargs = cast(
            Any, fx.node.map_arg((node.args, dict(node.kwargs)), lambda source: values.get(source, source.meta["val"]))
        )
        try:
            value = infer(self.program, node.target, args, kwargs)
        except Exception:  # the op's own checks: a view of what is not contiguous, say
            return None
        memory = ops.memory_of(value)
        shared = {s for s in node.all_input_nodes if memory & ops.memory_of(values.get(s, s.meta["val"]))}
        return None if not shared <= set(ops.may_alias(node)) and reaches_output(node) else value

    def commit(self, replaced: Mapping[fx.Node, fx.Node], gone: Iterable[fx.Node], fresh: Values) -> None:
        """Makes the exchange and erases what is no longer used."""
        for node, value in fresh.items():
            node.meta["val"] = value
            node.meta.pop("shares", None)
        for old, new in replaced.items():
            old.replace_all_uses_with(new)
        erase_unused(self.program, sorted(gone, key=self.order.__getitem__), self.erased)

    def restore_order(self) -> None:
        """Puts calls and weights at their places, or as soon after them as what they read allows."""
        nodes = [node for node in self.program.graph.nodes if node.op not in ("placeholder", "output")]
        waiting: dict[fx.Node, int] = {}
        followers: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
        last: fx.Node | None = None
        for node in nodes:
            sources = {source for source in node.all_input_nodes if source in followers}
            if ops.is_call(node) and not ops.is_pure(node):  # draws and checks keep their order among each other
                sources |= set() if last is None else {last}
                last = node
            waiting[node] = len(sources)
            for source in sources:
                followers[source].append(node)
        ready = [(self.places[node], node) for node in nodes if not waiting[node]]
        heapq.heapify(ready)
        while ready:
            _, node = heapq.heappop(ready)
            self.program.output_node.prepend(node)
            for follower in followers[node]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    heapq.heappush(ready, (self.places[follower], follower))


def _copied(draft: Draft, old: fx.Node, new: fx.Node) -> fx.Node:
    """A copy in the layout of the value that it replaces, if that is a plain one."""
    draft.at = (old,)
    form = torch.contiguous_format if tensor_type(old).contiguous else torch.preserve_format
    return draft.call(aten.clone.default, new, memory_format=form)


def _roots(node: fx.Node) -> set[fx.Node]:
    """The values whose memory a value may live in."""
    roots: set[fx.Node] = set()
    todo = [node]
    while todo:
        value = todo.pop()
        sources = ops.may_alias(value)
        todo += sources
        if not sources:
            roots.add(value)
    return roots


def _same_layout(old: fx.Node, new: fx.Node) -> bool:
    return tensor_type(old).same_layout(tensor_type(new).stride)


def _same_strides(old: object, new: object) -> bool:
    pairs = zip(ops.tensors_of(old), ops.tensors_of(new), strict=True)
    return all(TensorType.of(a).same_layout(TensorType.of(b).stride) for a, b in pairs)
