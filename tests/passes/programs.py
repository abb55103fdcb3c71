"""Programs made call by call: for graphs too large, or too odd, to come from a model."""

from __future__ import annotations

import cProfile
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from tsopt.compiler.program import Program
from tsopt.compiler.signature import Input, Output, Signature
from tsopt.compiler.structure import flatten
from tsopt.compiler.types import TensorType


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


def work(function: Callable[[], object]) -> int:
    """How many calls of functions it takes: a measure of time that a busy machine does not change."""
    profile = cProfile.Profile()
    profile.runcall(function)
    return sum(entry.callcount for entry in profile.getstats())
