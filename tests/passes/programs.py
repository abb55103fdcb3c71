"""Programs made call by call: for graphs too large, or too odd, to come from a model."""

from __future__ import annotations

import cProfile
import operator
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from tsopt.compiler.calls.signature import Input, Output, Signature
from tsopt.compiler.calls.structure import flatten
from tsopt.compiler.calls.types import TensorType
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.ops import aten, tensors_of
from tsopt.compiler.graph.program import Program


class Builder:
    """Adds a typed node with each call; `program(*outputs)` ends it."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()
        self.weights: dict[str, torch.Tensor] = {}
        self.inputs: list[fx.Node] = []

    def input(self, value: torch.Tensor) -> fx.Node:
        node = self.graph.placeholder(f"x{len(self.inputs)}")
        node.meta = {"val": self.mode.from_tensor(value, static_shapes=True)}
        self.inputs.append(node)
        return node

    def weight(self, value: torch.Tensor) -> fx.Node:
        name = f"w{len(self.weights)}"
        self.weights[name] = value
        node = self.graph.create_node("get_attr", name)
        node.meta = {"val": self.mode.from_tensor(value, static_shapes=True)}
        return node

    def call(self, target: OpOverload | Any, *args: Any, **kwargs: Any) -> fx.Node:
        values, named = fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
        node = self.graph.call_function(target, args, kwargs)
        with torch.no_grad(), self.mode:
            value = target(*values, **named)
        node.meta = {"val": value, "module": "net", "source": f"net.py:{len(self.graph.nodes)}"}
        return node

    def program(self, *outputs: fx.Node) -> Program:
        self.graph.output(tuple(outputs))
        types = [TensorType.of(node.meta["val"]) for node in (*self.inputs, *outputs)]
        count = len(self.inputs)
        inputs = tuple(Input(node.name, type_) for node, type_ in zip(self.inputs, types[:count], strict=True))
        returned = tuple(Output(f"[{i}]", type_) for i, type_ in enumerate(types[count:]))
        outer, result = (flatten(value)[1] for value in ((self._like(self.inputs), {}), self._like(outputs)))
        return Program(self.graph, self.weights, Signature(inputs, returned, outer, result), name="Built")

    def _like(self, nodes: Any) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty(node.meta["val"].shape) for node in nodes)


UNARY = (aten.sin.default, aten.relu.default, aten.t.default, aten.clone.default, aten.neg.default)


def random_program(seed: int, calls: int) -> Program:
    """Views, binary ops, splits, reductions, and outputs from anywhere."""
    rng = random.Random(seed)
    b = Builder()
    values = [b.input(torch.randn(4, 4)), b.weight(torch.randn(4, 4))]
    for _ in range(calls):
        kind, value = rng.randrange(6), rng.choice(values[-6:])
        if kind < 2:
            made = b.call(rng.choice(UNARY), value)
        elif kind == 2:
            made = b.call(aten.add.Tensor, value, rng.choice(values))
        elif kind == 3:
            wide = b.call(aten.cat.default, [value] * rng.randint(2, 9))
            made = b.call(aten.slice.Tensor, wide, 0, 0, 4)
        elif kind == 4:
            parts = b.call(aten.split.Tensor, value, 2)
            made = b.call(aten.cat.default, [b.call(operator.getitem, parts, i) for i in (1, 0)])
        else:
            pair = b.call(aten.max.dim, value, 1, True)
            made = b.call(aten.mul.Tensor, value, b.call(operator.getitem, pair, 0))
        values.append(made)
    return b.program(*rng.sample(values[2:], min(3, calls)))


def measured(program: Program, *inputs: torch.Tensor) -> int:
    """Runs a program, drops each value after its last use, and sums the memory that is alive after each call."""
    given, values = iter(inputs), {}
    last_use = {source: node for node in program.graph.nodes for source in node.all_input_nodes}
    not_ours: set[int] = set()
    alive: dict[int, tuple[StorageWeakRef, int]] = {}
    peak = 0
    for node in program.graph.nodes:
        if node.op == "output":
            break
        if node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            with torch.no_grad():
                values[node] = node.target(*args, **kwargs)
            del args, kwargs
        else:
            values[node] = next(given) if node.op == "placeholder" else program.weights[node.target]
        memory = {s._cdata: s for s in (t.untyped_storage() for t in tensors_of(values[node]))}
        if node.op != "call_function":
            not_ours |= set(memory)
            continue
        alive = {place: held for place, held in alive.items() if not held[0].expired()}
        alive |= {p: (StorageWeakRef(s), s.nbytes()) for p, s in memory.items() if p not in not_ours}
        del memory
        peak = max(peak, sum(size for _, size in alive.values()))
        for source in (node, *node.all_input_nodes):
            if last_use.get(source, node) is node and ops.is_call(source):
                del values[source]
    return peak


def work(function: Callable[[], object]) -> int:
    """How many calls of functions it takes: a measure of time that a busy machine does not change."""
    profile = cProfile.Profile()
    profile.runcall(function)
    return sum(entry.callcount for entry in profile.getstats())
