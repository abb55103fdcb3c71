"""Data-dependent branches and loops of TorchScript, as PyTorch's control flow ops.

Their bodies take all tensors that they use as operands: the trace of one cannot see the tensors of another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tsopt.compiler.calls.structure import Structure, flatten, unflatten
from tsopt.compiler.graph.control import apart, higher_order
from tsopt.errors import GraphBreakError

Values = dict[str, Any]  # debug name -> value
Run = Callable[[Any, Values], list[Any]]  # runs a block on values
NUMBERS = ("IntType", "FloatType", "BoolType")
READINGS = ("prim::GetAttr", "prim::Constant")  # what is read, and not computed
ENDLESS = sys.maxsize  # steps at most, of a `while`
DTYPES = {int: torch.int64, bool: torch.bool}


def branch(node: Any, predicate: torch.Tensor, values: Values, run: Run, where: str | None) -> list[Any]:
    """`prim::If` on a tensor.

    Raises:
        GraphBreakError: the branches return values of different kinds.
    """
    used = _Used(node, values, where)
    structures: dict[int, Structure] = {}

    def part(place: int, block: Any) -> Callable[..., tuple[torch.Tensor, ...]]:
        def traced(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
            found = used.run(run, block, operands)
            # Which flag it is depends on the branch.
            flags = [_number(value, predicate) if isinstance(value, bool) else value for value in found]
            leaves, structures[place] = flatten(flags, share=False)
            return _own(leaves, operands)

        return traced

    parts = [part(place, block) for place, block in enumerate(node.blocks())]
    try:
        leaves = higher_order.cond(predicate, *parts, apart(used.tensors))
    except GraphBreakError:
        raise
    except Exception as error:  # PyTorch's own words about branches that do not fit
        if len(set(structures.values())) > 1:
            raise _other_kinds(structures, where) from error
        raise
    if len(set(structures.values())) > 1:
        raise _other_kinds(structures, where)
    return list(unflatten(structures[0], list(leaves)))


def loop(node: Any, state: Sequence[Any], values: Values, run: Run, where: str | None) -> list[Any]:
    """`prim::Loop` on a tensor, from wherever it has come to.

    Args:
        state: the number of the step, the number of steps at most, whether it goes on, and what is carried.

    Raises:
        GraphBreakError: what is carried changes its kind from step to step.
    """
    step, most, going, *carried = state
    (body,) = node.blocks()
    inputs = [item.debugName() for item in body.inputs()]
    used = _Used(node, values, where, without=inputs)
    like = next(leaf for leaf in (going, *flatten(carried, share=False)[0]) if isinstance(leaf, torch.Tensor))
    leaves, before = flatten([_number(value, like) for value in (step, going, *carried)], share=False)

    def goes_on(*operands: torch.Tensor) -> torch.Tensor:
        return operands[1].clone() if most == ENDLESS else operands[1] & (operands[0] < most)

    def once(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        step, _, *carried = unflatten(before, operands[: len(leaves)])
        own = dict(zip(inputs, [step, *carried], strict=True))
        going, *found = used.run(run, body, operands[len(leaves) :], own)
        made, after = flatten([_number(value, operands[0]) for value in (step + 1, going, *found)], share=False)
        if after != before:
            raise _refused(f"the loop carries {before}, but after an iteration {after}", where)
        return _own(made, operands)

    operands = apart([*leaves, *used.tensors])
    found = higher_order.while_loop(goes_on, once, operands[: len(leaves)], operands[len(leaves) :])
    _, _, *carried = unflatten(before, list(found))
    return carried


def check_numbers(kind: Any, value: Any, where: str | None = None) -> None:
    """Raises GraphBreakError for a tensor that the script returns as a Python number."""
    name = kind.kind()
    if name in NUMBERS and isinstance(value, torch.Tensor):
        raise GraphBreakError(
            "the TorchScript code returns a Python number that depends on the input",
            where=where,
            why="a program returns only tensors; the number would be baked in",
            fix="return a tensor",
        )
    if name == "TupleType":
        for inner, item in zip(kind.elements(), value, strict=True):
            check_numbers(inner, item, where)
    elif name == "ListType":
        for item in value:
            check_numbers(kind.getElementType(), item, where)


def flag_of(value: torch.Tensor) -> torch.Tensor:
    """What `bool(tensor)` is, as a tensor."""
    value = value if value.dim() == 0 else value.reshape(())
    return value if value.dtype == torch.bool else value != 0


class _Used:
    """What the blocks of a node read from outside: tensors, and lists and dicts of tensors.

    Attributes:
        tensors: all of them, flat.
    """

    def __init__(self, node: Any, values: Values, where: str | None, without: Sequence[str] = ()) -> None:
        self.values, self.where = values, where
        self.names = [name for name in _names_read(node) if name not in without and _holds(values.get(name))]
        self.tensors, self._structure = flatten([values[name] for name in self.names], share=False)

    def run(self, run: Run, block: Any, operands: Sequence[torch.Tensor], own: Values | None = None) -> list[Any]:
        """Runs a block on operands in place of the tensors.

        Raises:
            GraphBreakError: it changes a list or a dict of the outside, which no operator can do.
        """
        given = unflatten(self._structure, list(operands))
        before = _contents(given)
        found = run(block, self.values | dict(zip(self.names, given, strict=True)) | (own or {}))
        if _contents(given) != before:
            raise _refused("a branch or loop body modifies a list or a dict defined outside it", self.where)
        return found


def _holds(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, list, dict, tuple))


def _contents(value: Any) -> Any:
    """What is held, by identity."""
    if isinstance(value, (list, tuple)):
        return [_contents(item) for item in value]
    if isinstance(value, dict):
        return {key: _contents(item) for key, item in value.items()}
    return id(value)


def _names_read(node: Any) -> list[str]:
    """The values that blocks of a node name."""
    used = dict.fromkeys(item.debugName() for inner in _nodes(node) for item in inner.inputs())
    used |= dict.fromkeys(item.debugName() for block in _blocks(node) for item in block.outputs())
    # Weights and constants are read inside by nodes of their own, which have been run before.
    used |= dict.fromkeys(item.debugName() for inner in _nodes(node) for item in inner.outputs())
    return list(used)


def _blocks(node: Any) -> Iterator[Any]:
    for block in node.blocks():
        yield block
        for inner in block.nodes():
            yield from _blocks(inner)


def _nodes(node: Any) -> Iterator[Any]:
    """The nodes inside a node, however deep."""
    return (inner for block in _blocks(node) for inner in block.nodes())


def readings(node: Any) -> Iterator[Any]:
    """The nodes inside that read attributes and constants, in their order."""
    return (inner for inner in _nodes(node) if inner.kind() in READINGS)


def _number(value: Any, like: torch.Tensor) -> Any:
    """A whole number or a flag as a tensor, on the device of another."""
    dtype = DTYPES.get(type(value))
    return value if dtype is None else torch.full((), value, dtype=dtype, device=like.device)


def _own(leaves: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Tensors with memory of their own, which control flow has to return."""
    taken = {operand.untyped_storage()._cdata for operand in operands}
    found: list[torch.Tensor] = []
    for leaf in leaves:
        place = leaf.untyped_storage()._cdata
        found.append(leaf.clone() if place in taken else leaf)
        taken.add(place)
    return tuple(found)


def _other_kinds(structures: dict[int, Structure], where: str | None) -> GraphBreakError:
    return _refused(f"one branch returns {structures[0]}, the other {structures[1]}", where)


def _refused(why: str, where: str | None) -> GraphBreakError:
    return GraphBreakError(
        "the TorchScript code has data-dependent control flow",
        where=where,
        why=f"it cannot be captured: {why}",
        fix="return the same kinds of values from both branches, and carry only tensors through loops",
    )
