"""Whether sums of products of 8-bit integers fit in the 32 bits in which engines add them up, which wrap silently."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from tsopt.compiler.analysis.range_rules import SAME_VALUES
from tsopt.compiler.analysis.ranged_call import base_name
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.program import Program
from tsopt.compiler.graph.quantized import HIGHEST, SYMMETRIC, quantized_weight

LARGEST_SUM = 2**31 - 1
ROOM_FOR_BIAS = 2**24  # which ONNX Runtime adds to the sums of a convolution
# The largest sum of the magnitudes of the integers that unsigned ones are multiplied by.
MOST = (LARGEST_SUM - ROOM_FOR_BIAS) // HIGHEST

MOVING = SAME_VALUES | {"mT", "mH", "T", "numpy_T", "adjoint"}
LAYERS = ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
OPERANDS = {  # of products, by op
    **dict.fromkeys(LAYERS, ("input", "weight")),
    "matmul": ("self", "other"),
    **dict.fromkeys(("mm", "bmm"), ("self", "mat2")),
    "addmm": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
    "scaled_dot_product_attention": ("query", "key"),
}


def sums_fit(weight: torch.Tensor, largest: int) -> bool:
    """Whether the sums fit for a weight and any unsigned input, and so does what is added to them for its zero point.

    Args:
        largest: the largest magnitude of the integers of the weight.
    """
    return weight[0].numel() * largest <= MOST or _rows_fit(quantized_weight(weight, largest)[0])


def least_scales(bias: torch.Tensor, scale: float) -> torch.Tensor:
    """The smallest scales of the outputs of a weight with which a bias fits, in steps of these times that of the input.

    What smaller ones could tell apart is lost beside the bias in float32 as well.
    """
    return bias.abs() / ROOM_FOR_BIAS / scale


def scores_fit(size: int) -> bool:
    """Whether the products of queries and keys of this size fit. oneDNN makes the integers of one of them unsigned."""
    return size * -SYMMETRIC[0] <= MOST


def length_of_unsafe_sum(program: Program, node: fx.Node) -> int:
    """Of how many products of 8-bit integers a sum may be that does not fit; 0 where a call has none such.

    It has if both operands are rounded, by tsopt or by the model: engines then multiply the integers.
    """
    if (named := OPERANDS.get(base_name(node))) is None:
        return 0
    call = ops.bind(node)
    first, second = (call[name] for name in named)
    if not (_is_rounded(first) and _is_rounded(second)):
        return 0
    size = _length(base_name(node), first.meta["val"].shape, second.meta["val"].shape)
    if size * HIGHEST <= MOST:
        return 0
    weight = _constant_of(program, second) if base_name(node) in LAYERS[:4] else None
    return 0 if weight is not None and _rows_fit(weight) else size


def _rows_fit(integers: torch.Tensor) -> bool:
    return int(integers.flatten(1).int().abs().sum(1, dtype=torch.int64).max()) <= MOST


def _length(name: str, first: torch.Size, second: torch.Size) -> int:
    """How many products are added up."""
    if name not in LAYERS:
        return first[-1]
    return math.prod(second) // max(second[1 if "transpose" in name else 0], 1)


def _is_rounded(value: Any) -> bool:
    while base_name(value) in MOVING and value.all_input_nodes:
        value = value.all_input_nodes[0]
    return base_name(value).startswith(("dequantize_", "fake_quantize_"))


def _constant_of(program: Program, dequantized: fx.Node) -> torch.Tensor | None:
    """The integers of a constant weight without zero points; None for any other value."""
    held = [program.weights.get(str(item.target)) for item in dequantized.all_input_nodes]
    if base_name(dequantized) != "dequantize_per_channel" or len(held) != 3 or any(item is None for item in held):
        return None
    integers, _, zeros = held
    return None if zeros is None or bool(zeros.any()) else integers
