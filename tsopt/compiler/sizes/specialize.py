"""Specializes a dynamic program to given sizes: size expressions become numbers. Never changes a program.

A dynamic program reads sizes with `aten.sym_size.int` and computes with them by Python operators; the types that it
records are those of one choice of sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.signature import Input, Output, Signature, dim_of
from tsopt.compiler.calls.types import TensorType, contiguous_strides
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.infer import fake_call, fakes
from tsopt.compiler.graph.program import Program
from tsopt.compiler.tensor_life import letting_go
from tsopt.errors import CaptureError, summary_of

Sizes = Mapping[str, int]


def traced_sizes(signature: Signature) -> dict[str, int]:
    """The sizes that a signature's types record."""
    return {
        dim: size - more
        for item in signature.inputs
        for name, size in zip(item.axes, item.type.shape, strict=False)
        if name is not None
        for dim, more in [dim_of(name)]
    }


def type_at(item: Input, sizes: Sizes) -> TensorType:
    """The type of an input at given sizes: as recorded, or contiguous."""
    if not item.axes:
        return item.type
    pairs = zip(item.type.shape, item.axes, strict=True)
    shape = tuple(size if name is None else _size(name, sizes) for size, name in pairs)
    return replace(item.type, shape=shape, stride=contiguous_strides(shape))


def _size(name: str, sizes: Sizes) -> int:
    dim, more = dim_of(name)
    return sizes[dim] + more


def evaluate(program: Program, sizes: Sizes) -> dict[fx.Node, Any]:
    """Fake values and numbers of all nodes at given sizes.

    Raises:
        Exception: whatever an op raises for sizes that do not fit.
    """
    mode = FakeTensorMode()
    inputs = iter(program.signature.inputs)
    values: dict[fx.Node, Any] = {}
    with letting_go(mode), fakes(mode):
        for node in program.graph.nodes:
            if node.op == "placeholder":
                kind = type_at(next(inputs), sizes)
                dtype = getattr(torch, kind.dtype)
                values[node] = torch.empty_strided(kind.shape, kind.stride, dtype=dtype, device=kind.device)
            elif node.op == "get_attr":
                values[node] = mode.from_tensor(program.weights[str(node.target)], static_shapes=True)
            elif node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
                values[node] = fake_call(node.target, args, kwargs)
    return values


def work_at(program: Program, sizes: Sizes) -> float:
    """How many numbers a call computes at these sizes; none where it does not run."""
    try:
        values = evaluate(program, sizes)
    except Exception:  # whatever an op says about sizes that do not fit
        return 0.0
    return sum(
        tensor.numel() for node, value in values.items() if ops.is_call(node) for tensor in ops.tensors_of(value)
    )


def retyped(program: Program, sizes: Sizes) -> Program:
    """The same program, its types recorded at other sizes."""
    made = program.copy()
    values = evaluate(made, sizes)
    for node, value in values.items():
        node.meta["val"] = value
    outputs = tuple(
        replace(item, type=TensorType.of(values[node]))
        for item, node in zip(made.signature.outputs, made.outputs, strict=True)
    )
    inputs = tuple(replace(item, type=type_at(item, sizes)) for item in made.signature.inputs)
    made.signature = replace(made.signature, inputs=inputs, outputs=outputs)
    return made


@dataclass(frozen=True, slots=True)
class Instance:
    """A program at given sizes.

    Attributes:
        program: static. What depends only on sizes comes in as further inputs, so that no pass takes it for constant.
        sizes: which.
        values: of the original's nodes, see `evaluate`.
        given: the nodes of the original behind the further inputs, in order.
    """

    program: Program
    sizes: Sizes
    values: dict[fx.Node, Any]
    given: tuple[fx.Node, ...]


def sizes_in(signature: Signature, example: Example) -> dict[str, int]:
    """The sizes of a call."""
    leaves, _ = signature.flattened(example.args, example.kwargs)
    return {name: next(iter(sizes)) for name, sizes in signature.sizes_of(leaves).items() if sizes}


def specialize(program: Program, sizes: Sizes) -> Program:
    """The static program of one choice of sizes.

    Raises:
        CaptureError: an op cannot be computed there, or torch cannot tell the shape of its result.
    """
    try:
        values = evaluate(program, sizes)
    except Exception as error:  # whatever an op raises for sizes that do not fit
        named = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise CaptureError(f"the program does not run at {named}", why=summary_of(error)) from error
    return _instance(program, sizes, frozenset(), values).program


def instance(program: Program, sizes: Sizes, values: dict[fx.Node, Any] | None = None) -> Instance:
    """The static program of one choice of sizes, for passes; `values` as `evaluate` has found them."""
    return _instance(program, sizes, by_size_alone(program), values)


def by_size_alone(program: Program) -> frozenset[fx.Node]:
    """Tensors that depend on sizes and on weights, but on no value of an input: positions, masks, first states."""
    by_value: dict[fx.Node, bool] = {}
    by_size: dict[fx.Node, bool] = {}
    for node in program.graph.nodes:
        sources = node.all_input_nodes
        number = ops.is_number(node)
        by_value[node] = node.op == "placeholder" or (
            not number and (ops.is_random(node) or any(by_value[source] for source in sources))
        )
        by_size[node] = node.target is ops.SIZE or any(by_size[source] for source in sources)
    return frozenset(
        node for node in program.calls() if not ops.is_number(node) and by_size[node] and not by_value[node]
    )


def _instance(
    program: Program, sizes: Sizes, sized: frozenset[fx.Node], values: dict[fx.Node, Any] | None = None
) -> Instance:
    values = evaluate(program, sizes) if values is None else values
    given = tuple(
        node for node in program.graph.nodes if node in sized and any(user not in sized for user in node.users)
    )
    graph = fx.Graph()
    mapping: dict[fx.Node, Any] = {}

    def placeholder(node: fx.Node) -> None:
        mapping[node] = graph.placeholder(node.name)
        mapping[node].meta = {"val": values[node]}

    for node in program.graph.nodes:
        if node.op == "placeholder":
            placeholder(node)
    for node in given:
        placeholder(node)
    for node in program.graph.nodes:
        if node in mapping or node in sized:
            continue
        if ops.is_number(node):
            mapping[node] = values[node]
        elif node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], mapping.__getitem__))
        else:
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), mapping.__getitem__)
            mapping[node] = graph.create_node(node.op, node.target, args, kwargs)
            mapping[node].meta = {**node.meta, "val": values[node]}
            mapping[node].meta.pop("type", None)
    old = program.signature
    inputs = [replace(item, type=type_at(item, sizes), axes=()) for item in old.inputs]
    inputs += [Input(f"given_{i}", TensorType.of(values[node])) for i, node in enumerate(given)]
    outputs = tuple(
        _output_at(item, TensorType.of(values[node]), sizes)
        for item, node in zip(old.outputs, program.outputs, strict=True)
    )
    signature = replace(old, inputs=tuple(inputs), outputs=outputs, dims=(), conditions=())
    made = replace(program, graph=graph, weights=dict(program.weights), signature=signature)
    return Instance(made, dict(sizes), values, given)


def _output_at(item: Output, found: TensorType, sizes: Sizes) -> Output:
    view = None if item.view is None else item.view.at(sizes, found.shape)
    return replace(item, type=found, axes=(), view=view)
