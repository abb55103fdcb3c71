"""Which layers can be quantized, and which values are quantized with them."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from tsopt.compiler.analysis.integer_sums import sums_fit
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.origin import origin_of
from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.quantized import CONVOLUTIONS, DIMENSIONS, users_rounding
from tsopt.errors import NoGain

NO_LAYER = "the program has no float32 linear layer or convolution with a constant weight to run in int8"
# Engines fuse these into the convolution, so its quantized output is the output of the activation.
BOUNDING = (aten.relu.default, aten.relu6.default, aten.hardtanh.default, aten.clamp.default)
# Ops that only move values. Their outputs keep the input's parameters, so that no requantization is needed.
MOVING = (
    *(aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default),
    *(aten.reshape.default, aten.view.default, aten._unsafe_view.default),
    *(aten.flatten.using_ints, aten.permute.default, aten.transpose.int, aten.slice.Tensor, aten.select.int),
    *(aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default, aten.contiguous.default, aten.clone.default),
    *(aten.pixel_shuffle.default, aten.upsample_nearest2d.default, aten.upsample_nearest2d.vec),
)

PADDING = (aten.pad.default, aten.constant_pad_nd.default)


def quantized_already(program: Program) -> NoGain | None:
    """Why a program has no lossy variant, where the user's own model is quantized."""
    rounding = users_rounding(program)
    if rounding is None:
        return None
    return NoGain(
        "the model is quantized already",
        where=origin_of(rounding),
        why="what it rounds is part of its answer, and would not be kept in a lower precision",
        fix="leave out the precision; engines compute the model as it says",
    )


def layers_of(program: Program) -> list[fx.Node]:
    """The layers that can be quantized, in graph order."""
    return [node for node in program.graph.nodes if is_layer(program, node)]


def is_layer(program: Program, node: fx.Node) -> bool:
    """Whether a call is a linear layer or a convolution on the CPU, for a batch, with a finite constant weight.

    What it is applied to is no constant: OpenVINO refuses a product of two, and such a product takes no time in a call
    unless it is returned. Its bias, if any, has an element for each output and no other axis, as in `quantized_layer`.
    """
    if node.target not in DIMENSIONS:
        return False
    call = ops.bind(node)
    weight = program.weights.get(str(call["weight"].target)) if call["weight"].op == "get_attr" else None
    if weight is None or weight.dtype != torch.float32 or weight.device.type != "cpu":
        return False
    if call["input"].op == "get_attr":
        return False
    dimensions, value = DIMENSIONS[node.target], call["input"].meta["val"]
    batched = value.dim() == dimensions if node.target in CONVOLUTIONS else value.dim() > 1
    filled = value.numel() and node.meta["val"].numel() and weight.numel()
    if not (batched and weight.dim() == dimensions and filled and _takes_bias(weight, call["bias"])):
        return False
    return bool(weight.isfinite().all())


def fits_in_sums(program: Program, layer: fx.Node, largest: int) -> bool:
    """Whether an engine that adds up the integers of a layer in 32 bits can hold all of its results.

    Args:
        largest: the largest magnitude of a weight.
    """
    return sums_fit(program.weights[str(ops.bind(layer)["weight"].target)].detach(), largest)


def _takes_bias(weight: torch.Tensor, bias: fx.Node | None) -> bool:
    if bias is None:
        return True
    value = bias.meta["val"]
    return (value.dtype, value.shape) == (torch.float32, weight.shape[:1])


def multiplications(program: Program, layer: fx.Node) -> int:
    """How many a call of a layer takes: each weight is used once for each result of its output channel."""
    weight = program.weights[str(ops.bind(layer)["weight"].target)]
    return weight.numel() * int(layer.meta["val"].numel()) // len(weight)


def readers_of_integers(layers: Collection[fx.Node], kept: Collection[fx.Node] = ()) -> dict[fx.Node, list[fx.Node]]:
    """The values that are quantized along with these layers, each with the calls that read the quantized form.

    These are the inputs of the layers; the outputs of convolutions, because ONNX Runtime runs a convolution in int8
    only if its output is quantized too; and both operands of a residual sum of such an output.

    Args:
        kept: layers that read floats, whatever else reads the same value.
    """
    found: dict[fx.Node, list[fx.Node]] = {}

    def reads(user: fx.Node, value: fx.Node) -> None:
        if user.op != "output" and user not in found.setdefault(value, []):
            found[value].append(user)

    for layer in layers:
        reads(layer, ops.bind(layer)["input"])
        if layer.target in CONVOLUTIONS:
            end = end_of(layer)
            for user in end.users:
                if not _moves_to(user, kept):
                    reads(user, end)
                for operand in _operands_of_sum(user):
                    reads(user, operand)
    return found


def _moves_to(user: fx.Node, kept: Collection[fx.Node]) -> bool:
    """Whether one of these layers reads the value that this user reads, be it moved."""
    return user in kept or (is_moved(user) and any(_moves_to(next_user, kept) for next_user in user.users))


def end_of(layer: fx.Node) -> fx.Node:
    """The bounding activation that follows a layer if it is the only user; otherwise the layer itself."""
    users = list(layer.users)
    return users[0] if len(users) == 1 and users[0].target in BOUNDING and _is_bounded(users[0]) else layer


def is_moved(node: fx.Node) -> bool:
    """Whether a call returns values of its first argument, or zeros."""
    if node.target in PADDING:
        return not ops.bind(node)["value"] and ops.bind(node).get("mode", "constant") == "constant"
    return node.target in MOVING


def _is_bounded(node: fx.Node) -> bool:
    """Whether the bounds are numbers, not values of the program."""
    return len(node.all_input_nodes) == 1


def _operands_of_sum(node: fx.Node) -> list[fx.Node]:
    """Both operands of a sum of two values of the same size."""
    if node.target is not aten.add.Tensor or ops.bind(node)["alpha"] != 1 or len(node.all_input_nodes) != 2:
        return []
    values = [operand.meta["val"] for operand in node.all_input_nodes]
    alike = values[0].shape == values[1].shape and all(value.dtype == torch.float32 for value in values)
    return list(node.all_input_nodes) if alike else []
