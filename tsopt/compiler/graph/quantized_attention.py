"""The form of attention with rounded scores in a Program: its queries and keys are quantized, and dequantized."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.quantized import calibrated_input, erase_dead

OPERANDS = ("query", "key")


def attentions_of(program: Program) -> list[fx.Node]:
    """The calls of attention on float32 queries and keys on the CPU, in graph order."""
    found = []
    for node in program.graph.nodes:
        if node.target is aten.scaled_dot_product_attention.default:
            values = [operand.meta["val"] for operand in operands_of(node)]
            if all(x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() for x in values):
                found.append(node)
    return found


def operands_of(attention: fx.Node) -> list[fx.Node]:
    """Its queries and its keys."""
    call = ops.bind(attention)
    return [call[name] for name in OPERANDS]


def read_operands(attention: fx.Node, operands: Iterable[fx.Node]) -> None:
    """Gives a call other queries and keys. Its values may be the same node as one of these, and stay as they are."""
    args, kwargs = list(attention.args), dict(attention.kwargs)
    for position, (name, operand) in enumerate(zip(OPERANDS, operands, strict=True)):
        if name in kwargs:
            kwargs[name] = operand
        else:
            args[position] = operand
    attention.args, attention.kwargs = tuple(args), kwargs


def with_float_scores(program: Program) -> Program:
    """A copy in which attention reads queries and keys as they are, for an engine without integer kernels for them."""
    made = program.copy()
    for node in attentions_of(made):
        operands = operands_of(node)
        found = [calibrated_input(operand) for operand in operands]
        read_operands(node, [x if known is None else known[0] for x, known in zip(operands, found, strict=True)])
    erase_dead(made)
    return made
