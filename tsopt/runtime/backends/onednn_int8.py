"""oneDNN's kernels for linear layers that the Program computes on 8-bit integers.

A layer that they would not make faster, or whose sums they could not hold, gets its weight back in float32.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, MutableMapping

import torch
import torch.nn.functional as F
from torch import fx

from tsopt.compiler.graph.edit import fresh_name
from tsopt.compiler.graph.program import Program, tensor_type
from tsopt.compiler.graph.quantized import (
    SMALLEST,
    UNSIGNED,
    QuantizedLinear,
    erase_dead,
    largest_weight,
    quantized_linear,
    restore,
)

HIGHEST = UNSIGNED[1]
# Of an activation: the kernel scales a sum before it scales it back by the weight's, which could overflow in between.
LARGEST_SCALE = 1e28
ROUNDS = 5


def lower_int8(program: Program, faster: MutableMapping[str, bool]) -> tuple[int, int]:
    """Puts oneDNN's integer kernel for each quantized layer where it is right and faster on this machine.

    Args:
        faster: what has been measured before, by kind of layer; what is measured is added.

    Returns:
        How many layers run on integers, and how many were quantized.
    """
    values: dict[fx.Node, list[fx.Node]] = {}
    layers = [layer for node in program.calls() if (layer := quantized_linear(program, node)) is not None]
    count = 0
    for layer in layers:
        packed = _packed(program, layer, faster)
        if packed is None:
            restore(program, layer)
        else:
            _replace(program, layer, packed, values)
            count += 1
    erase_dead(program)
    return count, len(layers)


def _packed(program: Program, layer: QuantizedLinear, faster: MutableMapping[str, bool]) -> torch.Tensor | None:
    """The weight as the kernel reads it, where the kernel is right and faster."""
    weight, scales = (program.weights[name].detach() for name in (layer.weight, layer.scales))
    shape = tensor_type(layer.x).shape
    kind = str(("int8", tuple(shape), tuple(weight.shape), layer.bias is None))
    if faster.get(kind) is False or int(weight.abs().max()) > largest_weight():
        return None
    try:
        packed = torch.ops.onednn.qlinear_prepack(weight, [math.prod(shape[:-1]), shape[-1]])
        if kind not in faster:
            faster[kind] = _is_faster(shape, weight, scales, packed, layer.bias is not None)
    except (RuntimeError, AttributeError):  # this build of torch has no such kernel
        faster[kind] = False
    return packed if faster[kind] else None


def _replace(
    program: Program, layer: QuantizedLinear, packed: torch.Tensor, values: dict[fx.Node, list[fx.Node]]
) -> None:
    graph = program.graph
    name = fresh_name(f"{layer.weight}.packed", program.weights)
    program.weights[name] = packed
    if layer.x not in values:
        with graph.inserting_before(layer.dequantized):
            made = graph.call_function(quantize, (layer.x,))
            values[layer.x] = [graph.call_function(operator.getitem, (made, position)) for position in range(3)]
    with graph.inserting_before(layer.node):
        held = [graph.create_node("get_attr", item) for item in (name, layer.weight, layer.scales, layer.zeros)]
        fused = graph.call_function(linear, (*values[layer.x], *held, layer.bias))
    fused.meta = dict(layer.node.meta)
    layer.node.replace_all_uses_with(fused)
    graph.erase_node(layer.node)


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, float, int]:
    """A value as unsigned 8-bit integers, with its scale and its zero point.

    One that holds NaN, infinities or values near the end of float32 is returned as it is, with scale 0.
    """
    # NOTE: of channels-last values, aminmax would make a copy first.
    nhwc = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    low, high = (float(end) for end in torch.aminmax(x.permute(0, 2, 3, 1) if nhwc else x))
    low, high = min(low, 0.0), max(high, 0.0)
    scale = max((high - low) / HIGHEST, SMALLEST)
    if not scale <= LARGEST_SCALE:
        return x, 0.0, 0
    zero = min(max(round(-low / scale), 0), HIGHEST)
    # Rounded by adding a half; by way of int16, for which torch has vectorized conversions.
    shifted = torch.add(torch.scalar_tensor(zero + 0.5), x, alpha=1 / scale)
    return shifted.to(torch.int16).clamp_(0, HIGHEST).to(torch.uint8), scale, zero


def linear(
    x: torch.Tensor,
    scale: float,
    zero: int,
    packed: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """The layer on what `quantize` returned, [..., in] -> [..., out]."""
    if not scale:
        return F.linear(x, weight * scales[:, None], bias)
    kernel = torch.ops.onednn.qlinear_pointwise.default
    found = kernel(x, scale, zero, packed, scales, zeros, bias, 1.0, 0, torch.float32, "none", [], "")
    return found  # type: ignore[no-any-return]


def _is_faster(
    shape: tuple[int, ...], weight: torch.Tensor, scales: torch.Tensor, packed: torch.Tensor, has_bias: bool
) -> bool:
    """Times the layer each way on random values; a kernel that adds up something else is out."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=draw)
    bias = torch.randn(len(weight), generator=draw) if has_bias else None
    zeros = torch.zeros(len(weight), dtype=torch.int64)

    def on_integers() -> torch.Tensor:
        return linear(*quantize(x), packed, weight, scales, zeros, bias)

    with torch.no_grad():
        values, scale, zero = quantize(x)
        sums = (values.long() - zero).double() @ weight.double().T  # exact
        wanted = sums * (scales.double() * scale) + (0 if bias is None else bias.double())
        if not torch.allclose(on_integers().double(), wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max())):
            return False
        integers, *floats = _best((on_integers, *_in_float(x, weight * scales[:, None], bias)))
        return integers < min(floats)


def _in_float(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> list[Callable[[], torch.Tensor]]:
    """The layer in float32 by torch, and by oneDNN where that has a kernel."""
    ways: list[Callable[[], torch.Tensor]] = [lambda: F.linear(x, weight, bias)]
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, math.prod(x.shape[:-1]))
        ways.append(lambda: torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], ""))
        ways[-1]()
    except RuntimeError:
        del ways[1:]
    return ways


def _best(ways: tuple[Callable[[], torch.Tensor], ...]) -> list[float]:
    """Seconds of the fastest call each way; the ways take turns."""
    best = [math.inf] * len(ways)
    for _ in range(ROUNDS):
        for position, run in enumerate(ways):
            run()
            start = time.perf_counter()
            run()
            best[position] = min(best[position], time.perf_counter() - start)
    return best
