"""oneDNN's kernels for layers that the Program computes on 8-bit integers.

A layer that they would not make faster, or whose sums they could not hold, gets its weight back in float32.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.edit import fresh_name
from tsopt.compiler.graph.program import Program, tensor_type
from tsopt.compiler.graph.quantized import (
    HIGHEST,
    SMALLEST,
    QuantizedLayer,
    dequantized_weight,
    erase_dead,
    largest_weight,
    quantized_layer,
    restore,
)
from tsopt.runtime.backends.layer_sites import NOTHING, Attribute, each, sample, site_of

# Of an activation: the kernel scales a sum before it scales it back by the weight's, which could overflow in between.
LARGEST_SCALE = 1e28
# Range of an activation over its mean magnitude: there, rounding to steps of the range (an error of a step over the
# root of 12) leaves 20 dB, below which a layer is kept in float. One outlier among ordinary values does that.
WIDEST = 255 * math.sqrt(12) / 10
SAMPLE = 4096  # values
ROUNDS = 5


# The activations that the kernels can apply: as oneDNN knows them -> as torch does.
ACTIVATED: dict[str, Callable[[torch.Tensor, Sequence[float], str], torch.Tensor]] = {
    "none": lambda y, scalars, algorithm: y,
    "relu": lambda y, scalars, algorithm: F.relu(y),
    "hardtanh": lambda y, scalars, algorithm: y.clamp(scalars[0], scalars[1]),
    "tanh": lambda y, scalars, algorithm: torch.tanh(y),
    "swish": lambda y, scalars, algorithm: F.silu(y),
    "hardswish": lambda y, scalars, algorithm: F.hardswish(y),
    "gelu": lambda y, scalars, algorithm: F.gelu(y, approximate=algorithm),
    "leaky_relu": lambda y, scalars, algorithm: F.leaky_relu(y, scalars[0]),
}
LAYERS = {2: F.linear, 3: F.conv1d, 4: F.conv2d, 5: F.conv3d}  # by the dimensions of the weight
BY_CONVOLUTIONS = ("none", "relu", "hardtanh", "swish", "hardswish")
Geometry = tuple[Any, ...]  # stride, padding, dilation, groups of a convolution; nothing for a linear layer


@dataclass(frozen=True, slots=True)
class Int8Site:
    """A quantized layer, and the activation after it that the kernel applies."""

    layer: QuantizedLayer
    end: fx.Node
    geometry: Geometry
    activation: Attribute


def _site(layer: QuantizedLayer) -> Int8Site:
    call = ops.bind(layer.node)
    dims = layer.node.meta["val"].dim() - 2
    spatial = [tuple(each(call[key], dims)) for key in ("stride", "padding", "dilation") if key in call]
    geometry = (*spatial, call["groups"]) if spatial else ()
    site = site_of(layer.node)
    if site.other is not None or site.activation[0] not in (BY_CONVOLUTIONS if geometry else ACTIVATED):
        return Int8Site(layer, layer.node, geometry, NOTHING)
    return Int8Site(layer, site.end, geometry, site.activation)


def lower_int8(program: Program, faster: MutableMapping[str, bool]) -> list[bool]:
    """Puts oneDNN's integer kernel for each quantized layer where it is right and faster on this machine.

    Args:
        faster: what has been measured before, by kind of layer; what is measured is added.

    Returns:
        Whether each layer that the program computes on integers runs so, in graph order.
    """
    values: dict[fx.Node, list[fx.Node]] = {}
    found = []
    for node in list(program.calls()):
        layer = quantized_layer(program, node)
        if layer is None or layer.by is not None:
            continue
        if layer.has_float_input:  # the program rounds nothing there, and the kernel has to
            restore(program, layer)
            continue
        site = _site(layer)
        packed = _packed(program, site, faster)
        if packed is None:
            restore(program, layer)
        else:
            _replace(program, site, packed, values)
        found.append(packed is not None)
    erase_dead(program)
    return found


def _packed(program: Program, site: Int8Site, faster: MutableMapping[str, bool]) -> torch.Tensor | None:
    """The weight as the kernel reads it, where the kernel is right and faster."""
    layer = site.layer
    # The kernels read a weight in the order of its memory, whatever its strides say.
    weight, scales = (program.weights[name].detach().contiguous() for name in (layer.weight, layer.scales))
    shape = tensor_type(layer.x).shape
    kind = str(("int8", tuple(shape), tuple(weight.shape), site.geometry, site.activation, layer.bias is None))
    if faster.get(kind) is False or int(weight.abs().max()) > largest_weight():
        return None
    try:
        packed = _pack(weight, scales, shape, site.geometry)
        if kind not in faster:
            faster[kind] = _is_faster(site, shape, weight, scales, packed)
    except (RuntimeError, AttributeError):  # this build of torch has no such kernel
        faster[kind] = False
    return packed if faster[kind] else None


def _pack(weight: torch.Tensor, scales: torch.Tensor, shape: tuple[int, ...], geometry: Geometry) -> torch.Tensor:
    if not geometry:
        return torch.ops.onednn.qlinear_prepack(weight, [math.prod(shape[:-1]), shape[-1]])  # type: ignore[no-any-return]
    # The scale and the zero point of the input are those of each call; with these, any will do.
    return torch.ops.onednn.qconv_prepack(weight, scales, 1.0, 1, *geometry, list(shape))  # type: ignore[no-any-return]


def _replace(program: Program, site: Int8Site, packed: torch.Tensor, values: dict[fx.Node, list[fx.Node]]) -> None:
    graph, layer = program.graph, site.layer
    name = fresh_name(f"{layer.weight}.packed", program.weights)
    program.weights[name] = packed
    if layer.x not in values:
        with graph.inserting_before(layer.dequantized):
            made = graph.call_function(quantize, (layer.x,))
            values[layer.x] = [graph.call_function(operator.getitem, (made, position)) for position in range(3)]
    with graph.inserting_before(site.end):
        held = [graph.create_node("get_attr", item) for item in (name, layer.weight, layer.scales, layer.zeros)]
        fused = graph.call_function(run_layer, (*values[layer.x], *held, layer.bias, site.geometry, site.activation))
    fused.meta = dict(site.end.meta)
    site.end.replace_all_uses_with(fused)
    for dead in dict.fromkeys((site.end, layer.node)):
        graph.erase_node(dead)


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, float, int]:
    """A value as unsigned 8-bit integers, with its scale and its zero point.

    One that is empty, or holds NaN, infinities, values near the end of float32, or outliers that leave the others too
    few steps, is returned as it is, with scale 0.
    """
    if not x.numel():
        return x, 0.0, 0
    # NOTE: of channels-last values, reductions would make a copy first.
    nhwc = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    flat = x.permute(0, 2, 3, 1) if nhwc else x
    low, high = (float(end) for end in torch.aminmax(flat))
    low, high = min(low, 0.0), max(high, 0.0)
    scale = max((high - low) / HIGHEST, SMALLEST)
    # A sample tells how large an ordinary value is; an odd step goes through the channels.
    step = x.numel() // SAMPLE | 1
    magnitude = float((flat.reshape(-1)[::step] if step > 1 else flat).abs().mean())
    if not scale <= LARGEST_SCALE or high - low > WIDEST * magnitude:
        return x, 0.0, 0
    zero = min(max(round(-low / scale), 0), HIGHEST)
    # Rounded by adding a half; by way of int16, for which torch has vectorized conversions.
    shifted = torch.add(torch.scalar_tensor(zero + 0.5, device="cpu"), x, alpha=1 / scale)
    return shifted.to(torch.int16).clamp_(0, HIGHEST).to(torch.uint8), scale, zero


def run_layer(
    x: torch.Tensor,
    scale: float,
    zero: int,
    packed: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bias: torch.Tensor | None,
    geometry: Geometry,
    activation: Attribute,
) -> torch.Tensor:
    """The layer on what `quantize` returned, and its activation."""
    if not scale:
        return _in_float(x, dequantized_weight(weight, scales), bias, geometry, activation)
    kernels = torch.ops.onednn
    kernel: Any = kernels.qconv_pointwise.default if geometry else kernels.qlinear_pointwise.default
    found = kernel(x, scale, zero, packed, scales, zeros, bias, *geometry, 1.0, 0, torch.float32, *activation)
    return found  # type: ignore[no-any-return]


def is_integer_convolution(node: fx.Node) -> bool:
    """Whether a call of a lowered program is a convolution of `run_layer`."""
    return node.target is run_layer and bool(node.args[-2])  # its geometry


def _in_float(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry, activation: Attribute
) -> torch.Tensor:
    """The layer by torch."""
    layer: Any = LAYERS[weight.dim()]
    found = layer(x, weight, bias, *geometry)
    name, scalars, algorithm = activation
    return ACTIVATED[name](found, scalars, algorithm)


def _is_faster(
    site: Int8Site, shape: tuple[int, ...], weight: torch.Tensor, scales: torch.Tensor, packed: torch.Tensor
) -> bool:
    """Times the layer each way on random values; a kernel that adds up something else is out."""
    draw = torch.Generator().manual_seed(0)
    x = sample(shape, torch.float32, draw)
    bias = None if site.layer.bias is None else torch.randn(len(weight), generator=draw, device="cpu")
    held: Any = (
        packed,
        weight,
        scales,
        torch.zeros(len(weight), dtype=torch.int64, device="cpu"),
        bias,
        site.geometry,
        site.activation,
    )
    with torch.no_grad():
        for example in (x, x.relu()):  # with a zero point, and without
            values, scale, zero = quantize(example)
            found = run_layer(values, scale, zero, *held).double()
            full, rows = scale * (values.double() - zero), dequantized_weight(weight, scales.double())
            wanted = _in_float(full, rows, None if bias is None else bias.double(), site.geometry, site.activation)
            if not torch.allclose(found, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max())):
                return False
        ways = (
            lambda: run_layer(*quantize(x), *held),
            *_ways_in_float(site, x, dequantized_weight(weight, scales), bias),
        )
        integers, *others = _best(ways)
        return integers < min(others)


def _ways_in_float(
    site: Int8Site, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> list[Callable[[], torch.Tensor]]:
    """The layer in float32 by torch, and by oneDNN where that has a kernel."""
    ways: list[Callable[[], torch.Tensor]] = [lambda: _in_float(x, weight, bias, site.geometry, site.activation)]
    kernels = torch.ops.mkldnn
    try:
        if site.geometry:
            stride, padding, dilation, groups = site.geometry
            packed = kernels._reorder_convolution_weight(weight, padding, stride, dilation, groups, list(x.shape))
            places = (padding, stride, dilation, groups)
            ways.append(lambda: kernels._convolution_pointwise.default(x, packed, bias, *places, *site.activation))
        else:
            packed = kernels._reorder_linear_weight(weight, math.prod(x.shape[:-1]))
            ways.append(lambda: kernels._linear_pointwise.default(x, packed, bias, *site.activation))
        ways[-1]()
    except RuntimeError:
        del ways[1:]
    return ways


def _best(ways: Sequence[Callable[[], torch.Tensor]]) -> list[float]:
    """Seconds of the fastest call each way; the ways take turns."""
    best = [math.inf] * len(ways)
    for _ in range(ROUNDS):
        for position, run in enumerate(ways):
            run()
            start = time.perf_counter()
            run()
            best[position] = min(best[position], time.perf_counter() - start)
    return best
