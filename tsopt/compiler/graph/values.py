"""Computes the values of a program's nodes on real inputs. Never changes a program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.types import TensorType
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.program import Program
from tsopt.compiler.random_state import seed_torch

SEED = "seed"  # in the meta of a random call; copies of the node keep it
NO_SEED = "a random call created by a pass"


@dataclass(frozen=True, slots=True)
class Unknown:
    """In the place of a value that cannot be had; `fails` when a call raises."""

    reason: str
    fails: bool = False


class Values:
    """The value of each node, computed when it is first asked for, from an explicit stack: depth is no limit.

    Args:
        known: the values to start from; those of the inputs at least.
        wide: compute in float64 and complex128 what the program computes in less.
    """

    def __init__(self, program: Program, known: dict[fx.Node, Any], *, wide: bool = False) -> None:
        self.program, self.wide = program, wide
        self._known = {node: _widened(value) for node, value in known.items()} if wide else known

    @classmethod
    def on(cls, program: Program, inputs: Sequence[torch.Tensor]) -> Values:
        """The values on flat inputs in signature order, state included."""
        return cls(program, dict(zip(_placeholders(program), inputs, strict=True)))

    def __getitem__(self, node: fx.Node) -> Any:
        todo = [node]
        while todo:
            last = todo[-1]
            missing = [source for source in last.all_input_nodes if source not in self._known]
            if last not in self._known and missing:
                todo += missing
                continue
            todo.pop()
            if last not in self._known:
                self._known[last] = self._compute(last)
        return self._known[node]

    def compute(self, wanted: Sequence[fx.Node]) -> list[Any]:
        """The values of some nodes; all others that they need are given back after their last use."""
        needed, todo = set[fx.Node](), list(wanted)
        while todo:
            if (node := todo.pop()) not in needed:
                needed.add(node)
                todo += node.all_input_nodes
        uses = {node: len(needed.intersection(node.users)) for node in needed}
        for node in self.program.graph.nodes:
            if node not in needed:
                continue
            self[node]
            for source in node.all_input_nodes:
                uses[source] -= 1
                if not uses[source] and source not in wanted:
                    del self._known[source]
        return [self[node] for node in wanted]

    def in_float64(self, frontier: Iterable[fx.Node]) -> Values:
        """The values in float64, computed from what the nodes of a frontier are here."""
        known = {node: self[node] for node in (*_placeholders(self.program), *frontier)}
        return Values(self.program, known, wide=True)

    def forget_users(self, node: fx.Node) -> None:
        """Drops whatever was computed from a value that is about to be replaced."""
        todo = [node]
        while todo:
            for user in todo.pop().users:
                if user in self._known:
                    del self._known[user]
                    todo.append(user)

    def _compute(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            weight = self.program.weights[str(node.target)]
            return _widened(weight) if self.wide else weight
        for source in node.all_input_nodes:
            if isinstance(self._known[source], Unknown):
                return self._known[source]
        if ops.is_random(node) and SEED not in node.meta:
            return Unknown(NO_SEED)
        args, kwargs = cast(Any, fx.node.map_arg((node.args, dict(node.kwargs)), cast(Any, self._known.__getitem__)))
        if self.wide:
            args, kwargs = _widened(args), _widened(kwargs)
        try:
            with torch.no_grad():
                return _called(node, args, kwargs)
        except Exception as error:  # whatever the op raises on these values
            reason = (str(error).splitlines() or [""])[0][:120]
            return Unknown(f"{ops.name_of(node)} raises {type(error).__name__}: {reason}", fails=True)


def _called(node: fx.Node, args: Any, kwargs: Any) -> Any:
    target: Any = node.target
    if ops.is_random(node):
        seed_torch(node.meta[SEED])
    value = target(*args, **kwargs)
    if ops.is_uninitialized(node):
        return value.zero_()  # what was in memory is no value to compare
    return value


def with_seeds(program: Program) -> Program:
    """A copy in which each random call has a seed of its own, so that it draws the same wherever passes put it."""
    copy = program.copy()
    for number, node in enumerate(filter(ops.is_random, copy.calls())):
        node.meta[SEED] = number
    return copy


def without_seeds(program: Program) -> Program:
    """A copy as `with_seeds` was given it."""
    copy = program.copy()
    for node in copy.calls():
        node.meta.pop(SEED, None)
    return copy


def laid_out(program: Program, leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The user's tensors with the strides of the capture, then the state."""
    state = [program.state[item.name] for item in program.signature.state_inputs]
    pairs = zip((*leaves, *state), program.signature.inputs, strict=True)
    return tuple(_with_strides(tensor.detach(), item.type) for tensor, item in pairs)


def flat_inputs(program: Program, call: Example) -> tuple[torch.Tensor, ...]:
    """The inputs of a call in graph order, state included, as the program's views expect them in memory."""
    leaves = program.signature.bind(call.args, call.kwargs)
    if program.signature.dims:
        return (*leaves, *(program.state[item.name] for item in program.signature.state_inputs))
    return laid_out(program, leaves)


def _with_strides(tensor: torch.Tensor, wanted: TensorType) -> torch.Tensor:
    # NOTE: the program's views were checked for the captured strides; others would fail or read wrong places.
    if wanted.same_layout(tensor.stride()):
        return tensor
    return torch.empty_strided(wanted.shape, wanted.stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _placeholders(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.op == "placeholder"]


def _widened(value: Any) -> Any:
    """Tensors and dtypes in float64 or complex128, however nested."""
    if isinstance(value, torch.Tensor):
        return value.to(_widened(value.dtype))
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else torch.complex128 if value.is_complex else value
    if isinstance(value, (list, tuple)):
        return [_widened(item) for item in value]
    return {key: _widened(item) for key, item in value.items()} if isinstance(value, dict) else value
