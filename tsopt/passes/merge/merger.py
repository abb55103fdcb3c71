"""Turns many small calls into a few large ones: isomorphic branches, and linear layers that share an input.

All ROUNDING: a batched product sums in a different order. In small models call overhead dominates the cost of a layer,
and a loop over ensemble members, heads or experts pays it once for each.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.edit import Impossible, reaches_output
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.origin import origin_of, record_rewrite
from tsopt.compiler.graph.program import Numerics, Program, tensor_type
from tsopt.compiler.rewriting.pass_base import Changes, Declined, Done, Limits, Pass
from tsopt.compiler.rewriting.rewrite import OTHER_LAYOUT, Rule
from tsopt.passes.merge import stacked
from tsopt.passes.merge.boundaries import exits, stacks
from tsopt.passes.merge.branches import (
    FEWEST,
    PARTS,
    Group,
    Kinds,
    Uneven,
    columns,
    grow,
    is_shared,
    operands,
)
from tsopt.passes.merge.draft import STACKED, Draft
from tsopt.passes.merge.replacement import Replacement

MEBI = 1 << 20
ROUNDS = 5  # merged values can bring other branches together; each round must merge, so few are needed

FEW = "too few branches for a batched product to pay off"
LARGE = "a layer is too large for call overhead to matter"
NO_GAIN = "merging would not halve the number of calls"
COPIES = "stacking the inputs would cost more than the calls it saves"
NO_MEMORY = "the merged weights would take too much memory"

ISOMORPHIC, PARALLEL = (
    Rule(name, (lambda x, w, b: aten.linear.default(x, w, b),), lambda at, *_: None, Numerics.ROUNDING, doc)
    for name, doc in (
        ("isomorphic_branches", "f(x, v), f(x, w), ... -> f(x, stack([v, w, ...])), for whole branches"),
        ("parallel_linear", "linear(x, v), linear(x, w), ... -> split(linear(x, cat([v, w, ...])))"),
    )
)


@dataclass(frozen=True)
class MergeBranches(Pass):
    """Merges branches that differ only in weights and inputs, and linear layers that share an input.

    Attributes:
        few: the fewest branches that are merged on a CPU; `few_rows` where every product has one row.
        large: multiply-adds of a linear layer from which on it is no longer the call that costs.
        matrix: elements of a weight from which on a batched product of several rows loses more than a call in ONNX
            Runtime, which packs the weights of single products beforehand.
        parallel: multiply-adds up to which parallel linear layers are merged on a CPU; `parallel_elsewhere` on a GPU,
            which one of them does not fill.
        memory: bytes of new weights in all. They are copies: the model keeps its own.
        call_bytes: bytes that are copied in the time of a call.
    """

    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    size_dependent: ClassVar[bool] = True
    name: str = "merge"
    few: int = 8
    few_rows: int = 4
    large: int = 1 << 19
    large_elsewhere: int = 1 << 22
    matrix: int = 1 << 13
    parallel: int = 1 << 17
    parallel_elsewhere: int = 1 << 28
    memory: int = 256 * MEBI
    call_bytes: int = 4096
    rules: tuple[Rule, ...] = field(default=(ISOMORPHIC, PARALLEL), repr=False)

    def run(self, program: Program, limits: Limits) -> Changes:
        return _Merger(self, program, limits).run()


class _Merger:
    def __init__(self, options: MergeBranches, program: Program, limits: Limits) -> None:
        self.options, self.program, self.limits = options, program, limits
        self.done: list[Done] = []
        self.declined: dict[Declined, None] = {}
        stacked_before = [weight for name, weight in program.weights.items() if STACKED in name]
        self.bytes = sum(weight.nbytes for weight in stacked_before)  # the limit is for all runs together
        self.has_fuel = True

    def run(self) -> Changes:
        for _ in range(ROUNDS):
            before = len(self.done)
            self.kinds = Kinds(self.program, stacked.is_known)
            self.replacement = Replacement(self.program, self.kinds.depth)
            if ISOMORPHIC.name not in self.limits.without:
                self.merge_branches()
            if len(self.done) == before and PARALLEL.name not in self.limits.without:
                self.merge_parallel()
            if len(self.done) == before:
                break
            self.replacement.restore_order()
        numerics = Numerics.ROUNDING if self.done else Numerics.EXACT
        return Changes(tuple(self.done), tuple(self.declined), numerics)

    def decline(self, rule: Rule, node: fx.Node, reason: str) -> None:
        self.declined[Declined(rule.name, origin_of(node), reason)] = None

    # ---- branches -------------------------------------------------------------------------------------------

    def merge_branches(self) -> None:
        """Tries the deepest values first: what they are computed from is theirs to merge."""
        taken: set[fx.Node] = set()
        for candidates in self.kinds.candidates():
            todo = [tuple(n for n in candidates if n not in taken and n not in self.replacement.erased)]
            while todo and self.has_fuel and self.kinds.steps > 0:
                top = todo.pop()
                if len(top) < FEWEST or not stacked.fits(top) or not self.may_start(top):
                    continue
                found = grow(top, self.kinds, self.fits, taken, len(candidates))
                if isinstance(found, Uneven):
                    todo += found.parts
                    continue
                reason = self.try_branches(found)
                if reason:
                    self.decline(ISOMORPHIC, top[0], reason)
                # What was looked at in full is done with; a kind with other members may still be tried with these.
                whole = (group for group in found if not reason or len(group) == len(self.kinds.like(group[0])))
                taken.update(node for group in whole for node in group)

    def fits(self, group: Group) -> bool:
        return stacked.fits(group) and not self.is_large(group[0])

    def may_start(self, top: Group) -> bool:
        """Whether there are enough members, small enough, to look at what they are computed from."""
        is_layer = top[0].target is aten.linear.default
        fewest = FEWEST if _is_off_cpu(top[0]) else self.fewest([top]) if is_layer else self.options.few_rows
        reason = LARGE if self.is_large(top[0]) else FEW if len(top) < fewest else None
        if reason and is_layer:
            self.decline(ISOMORPHIC, top[0], reason)
        return reason is None

    def fewest(self, groups: list[Group]) -> int:
        """How many branches pay; see `MergeBranches`."""
        if _is_off_cpu(groups[0][0]):
            return FEWEST
        rows = [_rows(group[0]) for group in groups if group[0].target is aten.linear.default]
        return self.options.few_rows if rows and max(rows) == 1 else self.options.few

    def is_large(self, node: fx.Node) -> bool:
        """Whether a layer is worth a call of its own."""
        if node.target is not aten.linear.default:
            return False
        if _is_off_cpu(node):
            return _products(node) > self.options.large_elsewhere
        rows = _rows(node)
        return _products(node) > self.options.large or (rows > 1 and _products(node) > rows * self.options.matrix)

    def try_branches(self, groups: list[Group]) -> str | None:
        """Merges groups, or says why not."""
        computing = [group for group in groups if not ops.may_alias(group[0])]
        if len(computing) < 2 and not any(_has_own_input(group) for group in computing):
            return None  # only views, or layers that share an input, which are one layer
        if len(groups[0]) < self.fewest(groups):
            return FEW
        draft = Draft(self.program)
        try:
            replaced, gone = exits(draft, stacks(draft, groups))
        except Impossible as refused:
            draft.discard()
            return str(refused)
        what = f"{len(groups[0])} branches of {len(groups)} calls"
        return self.finish(ISOMORPHIC, draft, replaced, gone, groups[-1][0], what)

    # ---- linear layers of one input --------------------------------------------------------------------------

    def merge_parallel(self) -> None:
        """Makes linear layers with constant weights that read one value one layer.

        Whole blocks on 1 and 2 cores, best of eager, TorchScript and ONNX Runtime. Attention: 1.02x to 1.09x where a
        layer has up to 131,072 multiply-adds (64 wide: 1 row 1.09x, 8 rows 1.05x, 32 rows 1.02x; 256 wide: 1 row 1.06x,
        8 rows 1.01x, 32 rows 0.99x). Two layers (gated units): 0.97x to 1.02x. Layers that an activation follows: 0.90x
        to 0.94x, for ONNX Runtime computes it in the layer. Convolutions of one input: 0.95x to 1.04x, so there is no
        rule for them.
        """
        readers: dict[object, list[fx.Node]] = defaultdict(list)
        for node in self.program.calls():
            bound = ops.bind(node)
            if node.target is aten.linear.default and _may_be_joined(node, bound):
                weight = tensor_type(bound["weight"])
                readers[bound["input"], weight.dtype, bound["bias"] is None].append(node)
        for layers in readers.values():
            if len(layers) < FEWEST or not self.has_fuel:
                continue
            is_elsewhere = _is_off_cpu(layers[0])
            most = self.options.parallel_elsewhere if is_elsewhere else self.options.parallel
            large = any(_products(layer) > most for layer in layers)
            reason = LARGE if large else self.try_parallel(tuple(layers))
            if reason:
                self.decline(PARALLEL, layers[0], reason)

    def try_parallel(self, layers: Group) -> str | None:
        draft = Draft(self.program)
        draft.at = layers
        value, weights, *biases = columns(layers)
        made = draft.call(
            aten.linear.default, value[0], *(draft.weights(each, torch.cat) for each in (weights, *biases))
        )
        sizes = [tensor_type(layer).shape[-1] for layer in layers]
        parts = draft.call(aten.split_with_sizes.default, made, sizes, -1)
        replaced = {layer: draft.call(operator.getitem, parts, i) for i, layer in enumerate(layers)}
        return self.finish(PARALLEL, draft, replaced, set(layers), layers[0], f"{len(layers)} layers")

    # ---- both -------------------------------------------------------------------------------------------------

    def finish(
        self,
        rule: Rule,
        draft: Draft,
        replaced: dict[fx.Node, fx.Node],
        gone: set[fx.Node],
        where: fx.Node,
        what: str,
    ) -> str | None:
        """Makes an exchange if it pays and is allowed; else takes it back and says why."""
        self.replacement.place(draft)
        try:
            self.replacement.separate(draft, replaced)
            self.replacement.place(draft)
            fresh = self.replacement.settle(draft, replaced, gone, may_copy=rule is ISOMORPHIC)
        except Impossible as refused:
            draft.discard()
            return str(refused)
        reason = OTHER_LAYOUT if fresh is None else self.objection(rule, draft, gone)
        if reason or fresh is None:
            draft.discard()
            return reason
        added = draft.new_bytes
        for node, group in draft.created.items():
            record_rewrite([node], rule.name, group)
        draft.keep()
        self.has_fuel = self.limits.take()
        if not self.has_fuel:
            draft.discard()
            return None
        self.replacement.commit(replaced, gone, fresh)
        self.bytes += added
        self.done.append(Done(rule.name, f"{origin_of(where)}: {what}, {added:,} bytes of new weights"))
        return None

    def objection(self, rule: Rule, draft: Draft, gone: set[fx.Node]) -> str | None:
        """Why an exchange does not pay."""
        if self.bytes + draft.new_bytes > self.options.memory:
            return NO_MEMORY
        if rule is PARALLEL:
            return None
        parts = {source for node in gone for source in node.all_input_nodes if source.target in PARTS}
        dead = gone | {part for part in parts if all(user in gone for user in part.users)}
        removed, added = _count(dead), _count(draft.created)
        if 2 * added > removed:
            return NO_GAIN
        copied = sum(_bytes(node) for node in draft.created if node.target in (aten.stack.default, aten.clone.default))
        return COPIES if copied > (removed - added) * self.options.call_bytes else None


def _is_off_cpu(node: fx.Node) -> bool:
    return any(tensor.device.type != "cpu" for tensor in ops.tensors_of(node.meta["val"]))


def _rows(layer: fx.Node) -> int:
    return math.prod(tensor_type(layer).shape[:-1])


def _products(layer: fx.Node) -> int:
    """Multiply-adds of a linear layer."""
    return _rows(layer) * math.prod(tensor_type(ops.bind(layer)["weight"]).shape)


def _has_own_input(group: Group) -> bool:
    return group[0].target is aten.linear.default and not is_shared(columns(group)[0])


def _may_be_joined(layer: fx.Node, bound: dict[str, Any]) -> bool:
    """Whether a linear layer has constant weights and is read by more than one activation."""
    values = [bound["weight"], *([] if bound["bias"] is None else [bound["bias"]])]
    if any(value.op != "get_attr" for value in values) or not stacked.is_plain(layer):
        return False
    users = list(layer.users)
    is_activated = len(users) == 1 and stacked.is_pointwise(users[0].target) and len(operands(users[0])) == 1
    return not is_activated and not reaches_output(layer)


def _count(nodes: Iterable[fx.Node]) -> int:
    """Calls that do something."""
    return sum(1 for node in nodes if ops.is_call(node) and ops.is_overload(node.target))


def _bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(value.numel() * value.element_size())
