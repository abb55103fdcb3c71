"""Quantization with odd zero points, in ops that OpenVINO rounds as PyTorch does.

It adds the zero point before it rounds: halves, which are rounded to the even neighbor, then go the other way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tsopt.compiler.graph.control import Control, with_blocks
from tsopt.compiler.graph.edit import new_call
from tsopt.compiler.graph.ops import aten, bind
from tsopt.compiler.graph.program import Numerics, Program
from tsopt.compiler.graph.quantized import quantized

FAKE = (
    aten.fake_quantize_per_tensor_affine.default,
    aten.fake_quantize_per_tensor_affine.tensor_qparams,
    aten.fake_quantize_per_channel_affine.default,
)
REAL = (quantized.quantize_per_tensor.default, quantized.quantize_per_channel.default)


def with_exact_halves(program: Program) -> Program:
    """A copy that rounds as PyTorch does, except for a program that tsopt has quantized.

    In programs that tsopt has quantized, a difference of one step is within what the verdict allows.
    """
    if program.numerics == Numerics.LOSSY:
        return program
    made = program.copy()
    for node in list(made.graph.nodes):
        if isinstance(node.target, Control):
            node.target = with_blocks(node.target, with_exact_halves)
        elif node.target in (*FAKE, *REAL) and _may_be_odd(made, _zero(node)):
            _write_out(made, node)
    return made


def _zero(node: fx.Node) -> Any:
    call = bind(node)
    return call.get("zero_points", call.get("zero_point"))


def _may_be_odd(program: Program, zero: Any) -> bool:
    if isinstance(zero, fx.Node):
        constant = program.weights.get(str(zero.target)) if zero.op == "get_attr" else None
        return constant is None or bool((constant % 2 != 0).any())
    return bool(zero % 2)


def _write_out(program: Program, node: fx.Node) -> None:
    call = bind(node)
    x: Any = next(iter(call.values()))
    dtype = x.meta["val"].dtype
    scale, zero = call.get("scales", call.get("scale")), _zero(node)

    def made(target: Any, *args: Any) -> fx.Node:
        return new_call(program, node, node, target, args, {})

    def spread(value: Any) -> Any:
        """A value for each channel beside the axis of the channels."""
        if not isinstance(value, fx.Node):
            return value
        shape = [1] * x.meta["val"].dim()
        if "axis" in call and shape:
            shape[call["axis"]] = -1
        return made(aten.to.dtype, made(aten.reshape.default, value, shape), dtype)

    scale, zero = spread(scale), spread(zero)
    if isinstance(scale, fx.Node):
        inverse: Any = made(aten.reciprocal.default, scale)
    elif node.target in FAKE:  # its kernel divides in float32
        inverse = float(torch.ones((), device="cpu") / torch.tensor(scale, dtype=torch.float32, device="cpu"))
    else:
        inverse = 1.0 / scale
    steps = made(aten.round.default, made(aten.mul.Tensor, x, inverse))
    moved = made(aten.add.Tensor, steps, zero)
    bounded = made(aten.clamp.default, moved, call["quant_min"], call["quant_max"])
    if node.target in FAKE:
        result = made(aten.mul.Tensor, made(aten.sub.Tensor, bounded, zero), scale)
    else:
        result = made(aten.to.dtype, bounded, call["dtype"])
    node.replace_all_uses_with(result)
    program.graph.erase_node(node)
