"""Composites for which ONNX Runtime has its own operators, outside the ONNX standard.

The exporter turns them into five to ten standard nodes, which the runtime's optimizer does not fuse again.
The operators are documented in ONNX Runtime's "Contrib Operators".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.onnx.ops import symbolic

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.origin import provenance
from tsopt.compiler.graph.program import Program

SWAP = [0, 2, 1, 3]  # (batch, head, position, width) <-> (batch, position, head, width)


def with_own_operators(program: Program) -> Program:
    """A copy whose composites are ONNX Runtime's operators. For the exporter alone: new values have no type."""
    made = program.copy()
    for node in list(made.graph.nodes):
        lower = OPERATORS.get(node.target)
        if lower is None or node.meta["val"].dtype != torch.float32 or not node.meta["val"].numel():
            continue
        result = lower(made, node)
        if result is not None:
            result.meta = dict(node.meta)
            node.replace_all_uses_with(result)
            made.graph.erase_node(node)
    for node in reversed(made.graph.nodes):  # the moves between layouts that nobody needs now
        if ops.is_pure(node) and not node.users:
            made.graph.erase_node(node)
    return made


def operator_call(
    program: Program, node: fx.Node, name: str, inputs: list[Any], shape: list[int], **attributes: Any
) -> fx.Node:
    """A call of one of the runtime's operators before a node: float32 of a shape."""
    device = node.meta["val"].device
    with program.graph.inserting_before(node):
        made = program.graph.call_function(
            symbolic,
            (name, inputs),
            {"attrs": attributes, "dtype": torch.float32, "shape": shape, "version": 1},
        )
        made.meta = provenance(node.meta)
        if device.type != "cpu":  # what stands for the operator while it is exported answers on the CPU
            made = program.graph.call_function(aten.to.device, (made, device, torch.float32))
        return made


def _call(program: Program, node: fx.Node, target: Any, *args: Any) -> fx.Node:
    with program.graph.inserting_before(node):
        made = program.graph.call_function(target, args)
    made.meta = provenance(node.meta)
    return made


def _weight(program: Program, node: fx.Node, value: torch.Tensor, hint: str) -> fx.Node:
    name, number = hint, 1
    while name in program.weights:
        number += 1
        name = f"{hint}.{number}"
    program.weights[name] = value.to(node.meta["val"].device)
    with program.graph.inserting_before(node):
        return program.graph.create_node("get_attr", name)


# ---- attention ----------------------------------------------------------------------------------------------


def _attention(program: Program, node: fx.Node) -> fx.Node | None:
    call = ops.bind(node)
    parts = [call[key] for key in ("query", "key", "value")]
    shapes = [list(part.meta["val"].shape) for part in parts]
    if any(len(shape) != 4 for shape in shapes) or call["dropout_p"] or len({tuple(s[:2]) for s in shapes}) > 1:
        return None
    (batch, heads, length, width), (_, _, keys, _), (_, _, _, wide) = shapes
    if call["is_causal"] and length != keys:
        return None  # where the two lengths differ, the two disagree on which corner the triangle starts in
    bias, attends = None, None
    if call["attn_mask"] is not None:
        found = _bias(program, node, call["attn_mask"], [batch, heads, length, keys])
        if found is None:
            return None
        bias, attends = found
    flat = [_flat(program, node, part) for part in parts]
    masks = [None, None, bias] if bias is not None else []
    scale = 1 / math.sqrt(width) if call["scale"] is None else float(call["scale"])
    made = operator_call(
        *(program, node, "com.microsoft::MultiHeadAttention", [*flat, *masks], [batch, length, heads * wide]),
        num_heads=heads,
        scale=scale,
        unidirectional=int(call["is_causal"]),
    )
    split = _call(program, node, aten.reshape.default, made, [batch, length, heads, wide])
    result = _call(program, node, aten.permute.default, split, SWAP)
    if attends is None:
        return result
    return _call(program, node, aten.where.ScalarOther, attends, result, 0.0)


def _flat(program: Program, node: fx.Node, part: fx.Node) -> fx.Node:
    """(batch, head, position, width) as (batch, position, head * width): what it was made of, where it was made so."""
    batch, heads, length, width = part.meta["val"].shape
    flat = [batch, length, heads * width]
    if _swaps_heads(part):
        source: Any = part.args[0]
        if source.target in (aten.reshape.default, aten.view.default, aten.unflatten.int):
            whole: Any = source.args[0]
            if list(whole.meta["val"].shape) == flat:
                return whole  # type: ignore[no-any-return]
    return _call(program, node, aten.reshape.default, _call(program, node, aten.permute.default, part, SWAP), flat)


def _swaps_heads(part: fx.Node) -> bool:
    if part.target is aten.permute.default:
        axes: Any = part.args[1]
        return [axis % 4 for axis in axes] == SWAP
    return part.target is aten.transpose.int and {int(str(axis)) % 4 for axis in part.args[1:3]} == {1, 2}


def _bias(program: Program, node: fx.Node, mask: fx.Node, full: list[int]) -> tuple[fx.Node, fx.Node | None] | None:
    """The mask as something to add to the scores, and which rows attend to anything at all (None: all of them).

    PyTorch answers 0 for a row that attends to nothing, ONNX Runtime NaN or a mean.
    """
    value = mask.meta["val"]
    shape = [1] * (4 - value.dim()) + list(value.shape)
    wanted = [*shape[:2], *full[2:]]
    if value.dtype not in (torch.bool, torch.float32):
        return None
    lowest = torch.finfo(torch.float32).min
    constant = program.weights.get(str(mask.target)) if mask.op == "get_attr" else None
    if constant is not None:
        allowed = constant if constant.dtype == torch.bool else constant > -math.inf
        if constant.dtype == torch.bool:
            constant = torch.zeros(constant.shape, device=constant.device).masked_fill(~constant, lowest)
        bias = _weight(program, node, constant.reshape(shape).expand(wanted).contiguous(), f"{mask.target}.bias")
        some = allowed.reshape(shape).any(-1, keepdim=True)
        return bias, None if bool(some.all()) else _weight(program, node, some, f"{mask.target}.attends")
    if value.dtype == torch.bool:
        allows, added = mask, _call(program, node, aten.where.Scalar, mask, 0.0, lowest)
    else:
        allows, added = _call(program, node, aten.gt.Scalar, mask, -math.inf), mask
    bias_node = _call(
        program, node, aten.expand.default, _call(program, node, aten.reshape.default, added, shape), wanted
    )
    attends = _call(program, node, aten.any.dim, _call(program, node, aten.reshape.default, allows, shape), -1, True)
    return bias_node, attends


# ---- activations and norms ----------------------------------------------------------------------------------


def _silu(program: Program, node: fx.Node) -> fx.Node | None:
    return operator_call(
        program, node, "com.microsoft::QuickGelu", [node.args[0]], list(node.meta["val"].shape), alpha=1.0
    )


def _rms_norm(program: Program, node: fx.Node) -> fx.Node | None:
    call = ops.bind(node)
    if len(call["normalized_shape"]) != 1:
        return None
    weight = call["weight"]
    if weight is None:
        weight = _weight(program, node, torch.ones(call["normalized_shape"], device="cpu"), "rms_norm.ones")
    epsilon = torch.finfo(torch.float32).eps if call["eps"] is None else float(call["eps"])
    return operator_call(
        *(program, node, "::SimplifiedLayerNormalization", [call["input"], weight], list(node.meta["val"].shape)),
        axis=-1,
        epsilon=epsilon,
        stash_type=1,
    )


OPERATORS: dict[Any, Callable[[Program, fx.Node], fx.Node | None]] = {
    aten.scaled_dot_product_attention.default: _attention,
    aten.silu.default: _silu,
    aten.rms_norm.default: _rms_norm,
}
