"""Control flow inside a program: calls whose targets contain programs, the branches of an `if` or a `while`'s blocks.

Such a nested program takes and returns tensors and has no weights: everything it needs is an operand of the call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from tsopt.compiler.calls.signature import Input, Output, Signature
from tsopt.compiler.calls.structure import flatten
from tsopt.compiler.calls.types import TensorType
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.origin import origin_in, origin_of_meta
from tsopt.compiler.graph.program import Program
from tsopt.errors import GraphBreakError

higher_order = torch.ops.higher_order


@dataclass(frozen=True, eq=False, repr=False)
class Control(ABC):
    """What a call of control flow is a call of.

    Attributes:
        blocks: the programs within, in the order of `titles`.
    """

    blocks: tuple[Program, ...]
    titles: ClassVar[tuple[str, ...]] = ()
    __name__ = "control"

    def __repr__(self) -> str:
        return self.__name__

    @cached_property
    def modules(self) -> tuple[fx.GraphModule, ...]:
        return tuple(block.module() for block in self.blocks)

    def __call__(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Runs, or is traced as the operator of PyTorch that it is."""
        traced = get_proxy_mode() is not None
        if not traced and any(isinstance(value, FakeTensor) for value in operands):
            return self._typed(operands)
        if traced or not all(map(ops.is_plain, operands)):
            return self._traced(operands)
        return self._run(operands)

    @abstractmethod
    def _run(self, operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What it does, now."""

    @abstractmethod
    def _traced(self, operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The call of PyTorch's own operator."""

    @abstractmethod
    def _typed(self, operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Fake values of the types that are recorded within, where the operands are of the recorded types."""


class Cond(Control):
    """`cond(predicate, *operands)`: one of two branches."""

    titles = ("if", "else")
    __name__ = "cond"

    def _run(self, operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        predicate, *rest = operands
        yes, no = self.modules
        return tuple((yes if bool(predicate) else no)(*rest))

    def _traced(self, operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        predicate, *rest = operands
        return tuple(higher_order.cond(predicate, *self.modules, apart(rest)))

    def _typed(self, operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        predicate, *rest = operands
        if predicate.dtype != torch.bool or predicate.numel() != 1:
            raise ValueError("the condition must be a single boolean")
        for block in self.blocks:
            _check_operands(block, rest)
        yes, no = (_results(block) for block in self.blocks)
        if [(t.dtype, t.shape) for t in yes] != [(t.dtype, t.shape) for t in no]:
            raise ValueError("the branches return different types")
        return _made(yes)


class While(Control):
    """`while_loop(*values)`: as many of the values as the body returns are carried on, the others stay."""

    titles = ("while", "do")
    __name__ = "while_loop"

    def _run(self, operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        going, body = self.modules
        carried, others = self._split(operands)
        first = carried
        while bool(going(*carried, *others)[0]):
            carried = tuple(body(*carried, *others))
        # As PyTorch has it: what a loop returns is never what it was given.
        return tuple(value.clone() for value in carried) if carried is first else carried

    def _traced(self, operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        going, body = self.modules
        given = self._split(apart(operands))
        return tuple(higher_order.while_loop(lambda *values: going(*values)[0], body, *given))

    def _split(self, operands: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        count = len(self.blocks[1].signature.outputs)
        return tuple(operands[:count]), tuple(operands[count:])

    def _typed(self, operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        for block in self.blocks:
            _check_operands(block, operands)
        going, carried = (_results(block) for block in self.blocks)
        if len(going) != 1 or going[0].dtype != torch.bool or going[0].numel() != 1:
            raise ValueError("the condition must be a single boolean")
        if [(t.dtype, t.shape) for t in carried] != [(t.dtype, t.shape) for t in operands[: len(carried)]]:
            raise ValueError("the loop body returns different types than it takes")
        return _made(carried)


KINDS: dict[str, type[Control]] = {"cond": Cond, "while_loop": While}


def apart(operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Operands that are no two names of one tensor, which PyTorch refuses."""
    seen: set[int] = set()
    found = []
    for value in operands:
        found.append(value.clone() if id(value) in seen else value)
        seen.add(id(value))
    return tuple(found)


def is_higher_order(target: object) -> bool:
    """Whether a target of torch.export is control flow that a program can hold."""
    return target is higher_order.cond or target is higher_order.while_loop


def from_higher_order(node: fx.Node, root: fx.GraphModule) -> tuple[Control, list[fx.Node], list[torch.Tensor]]:
    """PyTorch's call of control flow as one of a program.

    Args:
        root: the module whose graph the node is of.

    Returns:
        The target, its operands in the graph of the node, and constants, which are operands behind these.

    Raises:
        GraphBreakError: it carries Python numbers, or returns something else than tensors.
    """
    kind, names, operands = _parts(node)
    constants: dict[int, torch.Tensor] = {}
    modules = [getattr(root, name) for name in names]
    for module in modules:
        _collect(module, constants)
    mode = operands[0].meta["val"].fake_mode
    blocks = tuple(_block(title, module, constants, mode) for title, module in zip(kind.titles, modules, strict=True))
    return kind(blocks), operands, list(constants.values())


def _parts(node: fx.Node) -> tuple[type[Control], list[str], list[fx.Node]]:
    args: Any = node.args
    is_cond = node.target is higher_order.cond
    given = args[1:3] if is_cond else args[:2]
    operands = [args[0], *args[3]] if is_cond else [*args[2], *args[3]]
    if not all(isinstance(value, fx.Node) for value in operands):
        raise _refused("Python numbers are passed to it", origin_of_meta(node.meta))
    return (Cond if is_cond else While), [str(value.target) for value in given], operands


def _refused(why: str, where: str = "") -> GraphBreakError:
    return GraphBreakError(
        "unsupported control flow",
        where=where or None,
        why=why,
        fix="use tensors: torch.tensor(0) instead of 0",
    )


def _collect(module: fx.GraphModule, constants: dict[int, torch.Tensor]) -> None:
    """The tensors that branches hold, however deep."""
    for node in module.graph.nodes:
        if node.op == "get_attr":
            held = getattr(module, str(node.target))
            if isinstance(held, fx.GraphModule):
                _collect(held, constants)
            else:
                constants.setdefault(id(held), held)


def _block(title: str, module: fx.GraphModule, constants: dict[int, torch.Tensor], mode: FakeTensorMode) -> Program:
    module = _functional(module)
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    for number, node in enumerate(inputs):
        mapping[node] = _copied(graph.placeholder(f"in_{number}"), node)
    held: dict[int, fx.Node] = {}
    for number, (key, tensor) in enumerate(constants.items()):
        held[key] = graph.placeholder(f"in_{len(inputs) + number}")
        held[key].meta = {"val": mode.from_tensor(tensor, static_shapes=True)}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = getattr(module, str(node.target))
            if not isinstance(value, fx.GraphModule):
                mapping[node] = held[id(value)]
        elif is_higher_order(node.target):
            target, operands, needed = from_higher_order(node, module)
            given = [*(mapping[value] for value in operands), *(held[id(tensor)] for tensor in needed)]
            mapping[node] = _copied(graph.call_function(target, tuple(given)), node)
        elif node.op == "call_function":
            mapping[node] = _copied(graph.node_copy(node, mapping.__getitem__), node)
    (returned,) = next(iter(reversed(module.graph.nodes))).args
    values = list(returned) if isinstance(returned, (list, tuple)) else [returned]
    if not all(isinstance(value, fx.Node) for value in values):
        raise _refused("a branch returns something other than tensors")
    return _program(title, graph, [mapping[value] for value in values])


def _functional(module: fx.GraphModule) -> fx.GraphModule:
    """The same without writes to what it has made itself."""
    if not any(ops.writes(node.target) for node in module.graph.nodes if ops.is_call(node)):
        return module
    inputs = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    with inputs[0].fake_mode:
        return make_fx(torch.func.functionalize(module, remove="mutations"))(*inputs)


def _copied(made: fx.Node, node: fx.Node) -> fx.Node:
    made.meta = {"val": node.meta["val"], **(origin_in(node.meta) if ops.is_call(node) else {})}
    return made


def _program(title: str, graph: fx.Graph, values: list[fx.Node]) -> Program:
    """A graph as a program. What it returns is memory of its own, once each."""
    seen: set[Any] = set()
    roots = ops.storage_roots(graph.nodes)
    returned = []
    for value in values:
        if roots[value] & seen or any(source.op == "placeholder" for source, _ in roots[value]):
            copy = graph.call_function(aten.clone.default, (value,))
            with value.meta["val"].fake_mode:
                copy.meta = {"val": aten.clone.default(value.meta["val"])}
            value = copy
        else:
            seen |= roots[value]
        returned.append(value)
    graph.output(tuple(returned))
    inputs = [Input(node.name, TensorType.of(node.meta["val"])) for node in graph.nodes if node.op == "placeholder"]
    outputs = [Output(f"output.{i}", TensorType.of(value.meta["val"])) for i, value in enumerate(returned)]
    _, outer = flatten((tuple(torch.empty(0, device="cpu") for _ in inputs), {}))
    _, result = flatten(tuple(torch.empty(0, device="cpu") for _ in outputs))
    return Program(graph, {}, Signature(tuple(inputs), tuple(outputs), outer, result), name=title)


def with_blocks(target: Control, change: Callable[[Program], Program]) -> Control:
    """The same control flow with other programs within."""
    return type(target)(tuple(map(change, target.blocks)))


def _results(block: Program) -> list[torch.Tensor]:
    return [value.meta["val"] for value in block.outputs]


def _made(recorded: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    # The mode is that of the caller: fakes of one are strangers in another.
    return tuple(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in recorded)


def _check_operands(block: Program, operands: Sequence[torch.Tensor]) -> None:
    wanted = [item.type for item in block.signature.inputs]
    # Strides too: a view within was checked for them.
    if len(wanted) != len(operands) or not all(map(TensorType.matches, map(TensorType.of, operands), wanted)):
        raise ValueError("the operand types do not match the inputs of the nested programs")


def all_calls(program: Program) -> Iterator[fx.Node]:
    """The calls of a program, and of the programs within, however deep."""
    for node in program.calls():
        yield node
        for block in getattr(node.target, "blocks", ()):
            yield from all_calls(block)
