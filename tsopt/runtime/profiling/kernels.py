"""What engines say of the time of their kernels, in terms of the program."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import fx
from torch.onnx.ops import symbolic

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.origin import origin_of
from tsopt.compiler.graph.program import Program

SECONDS = 1.0  # of calls, for each engine
FEWEST, MOST = 3, 100  # calls
# What engines fuse other ops into: a kernel is named after the first of these that it computes.
NAMED_AFTER = (
    *("conv", "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum"),
    *("scaled_dot_product", "lstm", "gru", "rnn", "embedding"),
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """What an engine runs at once: one op of the program, or several that it has fused.

    Attributes:
        name: the engine's name of it.
        ms: for a call.
        nodes: the values of the program that it computes; none where that is not known.
    """

    name: str
    ms: float
    nodes: tuple[fx.Node, ...] = ()

    @property
    def node(self) -> fx.Node | None:
        """The value that it is named after: a product, if there is one among those that are fused, or the last one."""
        return min(reversed(self.nodes), key=lambda node: rank(op_of(node)), default=None)


@dataclass(frozen=True, slots=True)
class Timed:
    """The kernels of an engine in a call, and the milliseconds of the whole call, while the engine's profiler is on."""

    kernels: tuple[Kernel, ...]
    ms: float


def called(call: Callable[[], Any], after: Callable[[], None] = lambda: None) -> list[float]:
    """Calls again and again for a while. Returns the milliseconds of each call.

    Args:
        after: called after each call, and not timed; the two calls for warming up are not among these.
    """
    spent: list[float] = []
    call()
    call()
    end = time.perf_counter() + SECONDS
    while len(spent) < FEWEST or (time.perf_counter() < end and len(spent) < MOST):
        start = time.perf_counter()
        call()
        spent.append((time.perf_counter() - start) * 1e3)
        after()
    return spent


def by_median(kernels: Sequence[tuple[str, tuple[fx.Node, ...]]], ms: Sequence[Sequence[float]]) -> tuple[Kernel, ...]:
    """Kernels by name and nodes, each with its median over calls.

    Args:
        ms: of each kernel, for each call.
    """
    return tuple(Kernel(name, median(spent), nodes) for (name, nodes), spent in zip(kernels, ms, strict=True))


def ms_of_values(program: Program, kernels: Iterable[Kernel]) -> dict[str, float]:
    """Milliseconds of kernels by the name of a value in a program.

    A kernel of a value that only the engine's own form of the program has counts for the first value that comes from
    the same place in the model.
    """
    own = {node.name: (node.target, origin_of(node)) for node in program.calls()}
    first: dict[str, str] = {}
    for node in program.calls():
        first.setdefault(origin_of(node), node.name)
    found: dict[str, float] = {}
    for kernel in kernels:
        if kernel.node is None:
            continue
        node = kernel.node
        is_own = own.get(node.name) == (
            node.target,
            origin_of(node),
        )  # the engine's form may reuse a name for another node
        name = node.name if is_own else first.get(origin_of(node))
        if name is not None:
            found[name] = found.get(name, 0.0) + kernel.ms
    return found


def op_of(node: fx.Node) -> str:
    """`conv2d`, `mkldnn._linear_pointwise`; `MatMulNBits` for an operator of ONNX Runtime's."""
    if node.target is symbolic:
        return str(node.args[0]).rpartition("::")[2]
    return ops.name_of(node).removeprefix("aten.")


def rank(op: str) -> int:
    """How little an op says of a kernel, or of a layer, that consists of several: a product says most."""
    name = op.removeprefix("mkldnn.").lstrip("_")
    return next((place for place, start in enumerate(NAMED_AFTER) if name.startswith(start)), len(NAMED_AFTER))
