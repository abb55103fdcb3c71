"""New calls for merged branches, kept outside the graph until it is decided whether to use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tsopt.compiler.calls.types import TensorType
from tsopt.compiler.graph.edit import fresh_name, new_call
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.program import Program, tensor_type
from tsopt.passes.merge.branches import Group, is_shared

STACKED = ".stacked"  # in the names of the weights that are made here


@dataclass(frozen=True, slots=True)
class Operand:
    """What the branches read at one place.

    each: the value of each branch. whole: all of them stacked, or the one they share; None for weights, which are
    stacked in the shape that the op asks for.
    """

    each: Group
    whole: fx.Node | None

    @property
    def shared(self) -> bool:
        return is_shared(self.each)

    @property
    def type(self) -> TensorType:
        return tensor_type(self.each[0])


class Draft:
    """Makes calls that are not used yet: nothing of the program changes until `keep`, and `discard` takes all back.

    New calls stand at the end of the graph; `at` says whose place they will take.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.at: Group = ()
        self.created: dict[fx.Node, Group] = {}
        self.pending: dict[fx.Node, Callable[[], torch.Tensor]] = {}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new typed call."""
        node = new_call(self.program, self.program.output_node, self.at[0], target, args, kwargs)
        self.created[node] = self.at
        return node

    def weights(self, each: Group, join: Callable[[list[torch.Tensor]], torch.Tensor]) -> fx.Node:
        """A new weight made of others; computed in `keep`, for it may be large."""
        with torch.no_grad(), self.program.fake_mode:
            value = join([weight.meta["val"] for weight in each])
        taken = {*self.program.weights, *(str(node.target) for node in self.pending)}
        name = fresh_name(f"{each[0].target}{STACKED}", taken)
        with self.program.graph.inserting_before(self.program.output_node):
            node = self.program.graph.create_node("get_attr", name)
        node.meta = {"val": value}
        self.created[node] = self.at
        sources = [self.program.weights[str(weight.target)] for weight in each]
        self.pending[node] = lambda: join(sources)
        return node

    def reshape(self, value: fx.Node, shape: Sequence[int]) -> fx.Node:
        return (
            value if tensor_type(value).shape == tuple(shape) else self.call(aten.reshape.default, value, list(shape))
        )

    def permute(self, value: fx.Node, axes: Sequence[int]) -> fx.Node:
        """The axes in another order; a reshape where only axes of size 1 move."""
        shape = tensor_type(value).shape
        large = [axis for axis in axes if shape[axis] != 1]
        if large == sorted(large):
            return self.reshape(value, [shape[axis] for axis in axes])
        return self.call(aten.permute.default, value, list(axes))

    def aligned(self, operand: Operand, rank: int) -> fx.Node:
        """An operand that broadcasts against a stack of values with `rank` axes."""
        if operand.shared:
            return operand.each[0]
        shape = operand.type.shape
        full = (len(operand.each), *[1] * (rank - len(shape)), *shape)
        if operand.whole is None:
            return self.weights(operand.each, lambda values: torch.stack(values).reshape(full))
        return self.reshape(operand.whole, full)

    def stack(self, operand: Operand) -> fx.Node:
        """An operand with the axis of the branches, also where they share it."""
        value = self.aligned(operand, len(operand.type.shape))
        shape = [len(operand.each), *operand.type.shape]
        return self.call(aten.expand.default, value, shape) if operand.shared else value

    @property
    def new_bytes(self) -> int:
        """Bytes of the new weights."""
        return sum(node.meta["val"].numel() * node.meta["val"].element_size() for node in self.pending)

    def keep(self) -> None:
        for node, make in self.pending.items():
            with torch.no_grad():
                self.program.weights[str(node.target)] = make().contiguous()
        self.pending.clear()

    def discard(self) -> None:
        for node in reversed(self.created):
            if node.op == "get_attr":
                self.program.weights.pop(str(node.target), None)
            self.program.graph.erase_node(node)
        self.created.clear()
        self.pending.clear()
