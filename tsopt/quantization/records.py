"""What the report says of each layer that could be quantized."""

from __future__ import annotations

import math

from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.origin import module_of, origin_of
from tsopt.compiler.graph.program import Program
from tsopt.passes.quantize.sensitivity import Loss
from tsopt.runtime.layer_table import ATTENTION, LayerRecord


def record_of(
    program: Program, layer: fx.Node, loss: Loss | None, kept: str, *, group: int | None = None, wider: str = ""
) -> LayerRecord:
    """Of a linear layer or a convolution.

    Args:
        kept: why it stays in float32; empty where it is quantized.
        group: how many weights in 4 bits share a scale; None in 8 bits.
        wider: why it has 8 bits where others have 4; otherwise empty.
    """
    weight = program.weights[str(ops.bind(layer)["weight"].target)]
    return LayerRecord(
        name=module_of(layer),
        where=origin_of(layer),
        op=ops.name_of(layer).removeprefix("aten."),
        sqnr=None if loss is None or math.isinf(loss.sqnr) else loss.sqnr,
        bytes_float=weight.nbytes,
        bytes_int8=weight.numel() + 4 * len(weight) if group is None else _bytes_of_groups(weight.numel(), group),
        kept=kept,
        output_sqnr=None if loss is None or not loss.effect else -10 * math.log10(loss.effect),
        bits=8 if group is None else 4,
        wider=wider,
    )


def _bytes_of_groups(count: int, group: int) -> int:
    """Of so many weights in 4 bits, with a scale in float32 and a zero point in 4 bits for each group."""
    return count // 2 + 9 * (count // group) // 2


def record_of_scores(attention: fx.Node, kept: str) -> LayerRecord:
    """Of the products of queries and keys in a call of attention."""
    where = origin_of(attention)
    return LayerRecord(module_of(attention), where, ATTENTION, sqnr=None, bytes_float=0, bytes_int8=0, kept=kept)
