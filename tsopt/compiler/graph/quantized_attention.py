"""The form of attention with rounded scores in a Program: its queries and keys are quantized, and dequantized."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.quantized import calibrated_input, erase_dead, may_be_ours

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
    """The program with attention that reads queries and keys as they are, for engines without integer kernels for it.

    A copy if there is any that does not. Those that are rounded for a layer, or by the user's own model, stay so.
    """
    operands = (operand for node in attentions_of(program) for operand in operands_of(node))
    if not may_be_ours(program) or not any(map(_rounded, operands)):
        return program
    made = program.copy()
    for node in attentions_of(made):
        read_operands(node, [_rounded(operand) or operand for operand in operands_of(node)])
    erase_dead(made)
    return made


def _rounded(operand: fx.Node) -> fx.Node | None:
    """The value that an operand of attention was rounded from, if it was rounded for attention."""
    found = calibrated_input(operand)
    return found[0] if found is not None and found[1].is_symmetric else None
