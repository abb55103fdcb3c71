"""The form of a quantized layer in a Program: what a pass writes, and what engines look for.

It is written with ops of `quantized_decomposed`, which torch can run: the reference for what an engine makes of it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # it registers the ops
from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.control import all_calls
from tsopt.compiler.graph.edit import fresh_name, new_call, new_weight
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.program import Numerics, Program

quantized = torch.ops.quantized_decomposed
HIGHEST = 255
UNSIGNED = (0, HIGHEST, torch.uint8)
SIGNED = (-127, 127, torch.int8)
SYMMETRIC = (-128, 127, torch.int8)
FOUR_BITS = (0, 15, torch.uint8)
GROUPS = (16, 32, 64, 128, 256)  # of weights in 4 bits: what engines have kernels for
GROUP = 128  # elements of a row that share a scale where an engine rounds them itself
SMALLEST = torch.finfo(torch.float32).smallest_normal  # scale: below it, 1 / scale would be infinite
LARGEST_END = torch.finfo(torch.float32).max * 127 / 128  # of a range: one step beyond it is finite too

CONVOLUTIONS = {aten.conv1d.default: 3, aten.conv2d.default: 4, aten.conv3d.default: 5}  # dimensions of a weight
DIMENSIONS = {aten.linear.default: 2, **CONVOLUTIONS}
DEQUANTIZING = (
    *(quantized.dequantize_per_channel.default, quantized.dequantize_per_tensor.default),
    quantized.dequantize_per_tensor.tensor,
)
Known = MutableMapping[str, fx.Node]
Least = torch.Tensor | None  # scales
LARGEST = 127  # of a weight
# Without VNNI instructions, two products of an unsigned and a signed byte are added in 16 bits, which saturate
# silently: 2 * 255 * 64 is below 2^15.
LARGEST_WITHOUT_VNNI = 64


def largest_weight() -> int:
    """The largest magnitude of an int8 weight whose products with uint8 values this processor adds up exactly."""
    return LARGEST if torch.cpu._is_vnni_supported() else LARGEST_WITHOUT_VNNI


@dataclass(frozen=True, slots=True)
class QParams:
    """Affine quantization parameters: float = scale * (integer - zero).

    The integers are uint8 with 0 <= zero <= 255, or int8 with zero = 0 if `is_symmetric`. So 0.0 is exact.
    """

    scale: float
    zero: int
    is_symmetric: bool = False

    @classmethod
    def of_range(cls, low: float, high: float) -> QParams:
        """The parameters that cover a range, which is extended to include 0.0."""
        low, high = max(min(low, 0.0), -LARGEST_END), min(max(high, 0.0), LARGEST_END)
        scale = max((high - low) / HIGHEST, SMALLEST)
        return cls(scale, min(max(round(-low / scale), 0), HIGHEST))

    @classmethod
    def symmetric(cls, largest: float) -> QParams:
        """The parameters that cover all values up to a magnitude."""
        return cls(max(min(largest, LARGEST_END) / SYMMETRIC[1], SMALLEST), 0, is_symmetric=True)

    @property
    def integers(self) -> tuple[int, int, torch.dtype]:
        """The lowest and the highest integer, and their dtype."""
        return SYMMETRIC if self.is_symmetric else UNSIGNED

    @property
    def range(self) -> tuple[float, float]:
        """The lowest and the highest float that an integer stands for."""
        low, high, _ = self.integers
        return (low - self.zero) * self.scale, (high - self.zero) * self.scale


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """A linear layer or a convolution with an integer weight, and one scale and zero point for the input if it has any.

    Attributes:
        node: the call of `aten.linear` or of a convolution.
        x: its input before quantization: float32, [..., in] or [batch, in, *spatial].
        dequantized: the input after quantization and back; `x` itself where the program does not quantize it.
        by: its scale and zero point; None where each call computes them, or there are none.
        weight: name of the weight: int8, [out, in] or [out, in / groups, *kernel]; in 4 bits, uint8, [out, in].
        scales: name of the scales of its outputs, float32, [out]; in 4 bits, of its groups, [out, in / group].
        zeros: name of its zero points, all 0, int64, [out]; in 4 bits, of its groups, int8, [out, in / group].
        bias: float32, [out], or nothing.
        group: how many neighbours in a row share a scale; None in 8 bits.
    """

    node: fx.Node
    x: fx.Node
    dequantized: fx.Node
    by: QParams | None
    weight: str
    scales: str
    zeros: str
    bias: fx.Node | None
    group: int | None = None

    @property
    def has_float_input(self) -> bool:
        return self.dequantized is self.x


def quantize_input(program: Program, layer: fx.Node, x: fx.Node) -> fx.Node:
    """Calls before a layer that quantize a float32 value to uint8, so that 0.0 is exact, and back."""

    def add(target: object, *args: object) -> fx.Node:
        return new_call(program, layer, layer, target, args, {})

    chosen = add(quantized.choose_qparams.tensor, x, *UNSIGNED[:2], SMALLEST, UNSIGNED[2])
    scale, zero = (add(operator.getitem, chosen, position) for position in (0, 1))
    integers = add(quantized.quantize_per_tensor.tensor, x, scale, zero, *UNSIGNED)
    return add(quantized.dequantize_per_tensor.tensor, integers, scale, zero, *UNSIGNED)


def quantize_value(program: Program, value: fx.Node, by: QParams) -> fx.Node:
    """Quantizes a float32 value to 8-bit integers with the given parameters, and dequantizes it."""
    before, kind = value.next, (by.scale, by.zero, *by.integers)
    while before.op == "placeholder":
        before = before.next
    integers = new_call(program, before, value, quantized.quantize_per_tensor.default, (value, *kind), {})
    return new_call(program, before, value, quantized.dequantize_per_tensor.default, (integers, *kind), {})


def quantize_weight(program: Program, layer: fx.Node, largest: int, known: Known, least: Least = None) -> fx.Node:
    """A call before a layer that dequantizes its weight: int8 up to a magnitude, with a scale for each output.

    Args:
        known: such calls by the name of the weight, for layers that share one; a new call is added.
        least: the smallest scales of the outputs.
    """
    weight: Any = ops.bind(layer)["weight"]
    if str(weight.target) in known:
        return known[str(weight.target)]
    integers, scales = quantized_weight(program.weights[str(weight.target)].detach(), largest, least)
    parts = {"int8": integers, "scales": scales, "zeros": torch.zeros(len(scales), dtype=torch.int64, device="cpu")}
    held = [
        new_weight(program, weight.next, fresh_name(f"{weight.target}.{name}", program.weights), value)
        for name, value in parts.items()
    ]
    made = new_call(program, layer, layer, quantized.dequantize_per_channel.default, (*held, 0, *SIGNED), {})
    known[str(weight.target)] = made
    return made


def quantized_weight(weight: torch.Tensor, largest: int, least: Least = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The int8 values, contiguous, and the scale of each output, [out]: SMALLEST, or `least`, where its weights are 0.

    NOTE: contiguous whatever the strides of the weight, because ONNX stores integers without a Transpose (`OnnxModel`).
    """
    scales = (torch.linalg.vector_norm(weight.flatten(1), math.inf, 1) / largest).clamp(min=SMALLEST)
    scales = scales if least is None else torch.maximum(scales, least)
    integers = (weight / _by_output(scales, weight)).round_().clamp_(-largest, largest).to(torch.int8)
    return integers.contiguous(), scales


def dequantized_weight(integers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The float32 values that they stand for."""
    return integers * _by_output(scales, integers)


def dequantized_groups(integers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """The float32 values that integers in 4 bits stand for, with a scale and a zero point for each group of a row."""
    groups = integers.unflatten(1, (scales.shape[1], -1))
    return groups.float().sub_(zeros[..., None]).mul_(scales[..., None]).flatten(1)


def _by_output(scales: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return scales.view(-1, *[1] * (weight.dim() - 1))


def may_be_ours(program: Program) -> bool:
    """Whether tsopt may have quantized what a program has in integers. Else the user has, and wants just that."""
    return program.numerics == Numerics.LOSSY


def users_rounding(program: Program) -> fx.Node | None:
    """The first call by which a user's own model is quantized; None if it is not.

    Such a program has no lossy variants: what the user rounds could not be told from what tsopt does.
    """
    named = (node for node in all_calls(program) if ops.name_of(node).startswith("quantized_decomposed."))
    return None if may_be_ours(program) else next(named, None)


def quantized_layer(program: Program, node: fx.Node) -> QuantizedLayer | None:
    """The layer that a call is, if it has exactly this form. A stored program may have any other."""
    if node.target not in DIMENSIONS or not may_be_ours(program):
        return None
    call = ops.bind(node)
    dequantized, weight, bias = call["input"], call["weight"], call["bias"]
    x, by = calibrated_input(dequantized) or (_quantized_input(dequantized) or _float_input(dequantized), None)
    held = _held_weight(program, weight)
    if x is None or held is None or (by and by.is_symmetric):
        return None
    names, rows, group = held
    fits = (
        (x is not dequantized or node.target is aten.linear.default)
        and program.weights[names[0]].dim() == DIMENSIONS[node.target]
        and (group is None or x is dequantized)
        and (bias is None or _type(bias) == (torch.float32, rows))
        and _type(x)[0] == torch.float32
    )
    return QuantizedLayer(node, x, dequantized, by, *names, bias, group) if fits else None


def _held_weight(program: Program, weight: Any) -> tuple[tuple[str, str, str], torch.Size, int | None] | None:
    """The names of integers, scales and zero points of a weight, its number of rows, and the size of a group if any."""
    is_grouped = _calls(weight, quantized.dequantize_per_channel_group.default)
    if not (is_grouped or _calls(weight, quantized.dequantize_per_channel.default)) or weight.kwargs:
        return None
    held, kind = weight.args[:3], weight.args[3:]
    if any(not isinstance(item, fx.Node) or item.op != "get_attr" for item in held):
        return None
    first, second, third = (str(item.target) for item in held)
    integers, scales, zeros = (program.weights[name] for name in (first, second, third))
    rows, group = integers.shape[:1], None
    if is_grouped:
        *bits, group, dtype = kind
        known = (*bits, dtype) == (*FOUR_BITS, torch.float32) and group in GROUPS
        if not known or integers.dim() != 2 or integers.shape[1] % group or integers.dtype != torch.uint8:
            return None
        shape = torch.Size((*rows, integers.shape[1] // group))
        wanted = zeros.dtype == torch.int8 and bool(((zeros >= 0) & (zeros <= FOUR_BITS[1])).all())
        wanted = wanted and bool(integers.numel()) and int(integers.max()) <= FOUR_BITS[1]
    else:
        shape = rows
        wanted = kind == (0, *SIGNED) and integers.dtype == torch.int8 and zeros.dtype == torch.int64
        wanted = wanted and not bool(zeros.any())
    fits = wanted and scales.dtype == torch.float32 and scales.shape == zeros.shape == shape
    return ((first, second, third), rows, group) if fits and integers.device.type == "cpu" else None


def float_weight(program: Program, layer: QuantizedLayer) -> torch.Tensor:
    """The float32 values that the integers of a layer's weight stand for."""
    integers, scales, zeros = (program.weights[name].detach() for name in (layer.weight, layer.scales, layer.zeros))
    if layer.group is None:
        return dequantized_weight(integers, scales)
    return dequantized_groups(integers, scales, zeros)


def restore(program: Program, layer: QuantizedLayer) -> None:
    """The layer in float32, with the weight that its integers stand for. What it read before may be unused then."""
    name = fresh_name(f"{layer.weight}.float", program.weights)
    held = new_weight(program, layer.node, name, float_weight(program, layer))
    rewire(layer.node, layer.x, held)


def rewire(layer: fx.Node, x: fx.Node, weight: fx.Node) -> None:
    """Another input and another weight for a layer."""
    layer.args = (x, weight, *list(ops.bind(layer).values())[2:])
    layer.kwargs = {}


def quantized_layers(program: Program) -> Iterator[QuantizedLayer]:
    """All quantized layers, in graph order."""
    return (layer for node in list(program.calls()) if (layer := quantized_layer(program, node)) is not None)


def largest_magnitude(program: Program) -> int:
    """The largest magnitude of integer weights on the CPU, also of the model's own; 0 unless values are rounded too."""
    if group_of(program) is None and not any(_rounds(node) for node in program.calls()):
        return 0
    read = {item for node in program.calls() if node.target in DEQUANTIZING for item in node.all_input_nodes}
    weights = [program.weights[str(item.target)] for item in read if item.op == "get_attr"]
    on_cpu = [w for w in weights if w.dtype == torch.int8 and w.numel() and w.device.type == "cpu"]
    in_four_bits = any(layer.group is not None for layer in quantized_layers(program))
    return max((int(w.int().abs().max()) for w in on_cpu), default=FOUR_BITS[1] * in_four_bits)


def group_of(program: Program) -> int | None:
    """How many neighbours an engine may round together, of the inputs of such layers; None if it rounds none."""
    groups = [layer.group or GROUP for layer in quantized_layers(program) if layer.has_float_input]
    return min(groups, default=None)


def in_float(program: Program) -> Program:
    """A copy with every quantized layer in float32; the program itself if there is none."""
    if next(quantized_layers(program), None) is None:
        return program
    made = program.copy()
    for layer in quantized_layers(made):
        restore(made, layer)
    erase_dead(made)
    return made


def without_rounded_values(program: Program) -> Program:
    """A copy in which only weights are quantized, which shares these; the program itself if tsopt rounds nothing."""
    if not rounded_values(program):
        return program
    made = program.copy()
    for layer in quantized_layers(made):
        layer.node.replace_input_with(layer.dequantized, layer.x)
    for node in list(made.calls()):
        if found := calibrated_input(node):
            node.replace_all_uses_with(found[0])
    erase_dead(made)
    return made


def rounded_values(program: Program) -> list[fx.Node]:
    """The float32 values that tsopt rounds, in the program or in the engine."""
    if not may_be_ours(program):
        return []
    by_layers = [layer.x for layer in quantized_layers(program)]
    others = [found[0] for node in program.calls() if (found := calibrated_input(node))]
    return list(dict.fromkeys(by_layers + others))


def erase_dead(program: Program) -> None:
    """Erases pure calls and weights that nothing reads any more."""
    for node in reversed(list(program.graph.nodes)):
        if not node.users and (ops.is_pure(node) or node.op == "get_attr"):
            program.graph.erase_node(node)


def calibrated_input(dequantized: Any) -> tuple[fx.Node, QParams] | None:
    """The value that was quantized and read back, if `quantize_value` could have written it."""
    if not _calls(dequantized, quantized.dequantize_per_tensor.default):
        return None
    integers, *kind = dequantized.args
    if not _calls(integers, quantized.quantize_per_tensor.default) or dequantized.kwargs or integers.kwargs:
        return None
    x, *same = integers.args
    if same != kind or len(kind) != 5 or tuple(kind[2:]) not in (UNSIGNED, SYMMETRIC) or not isinstance(x, fx.Node):
        return None
    scale, zero = kind[:2]
    is_symmetric = tuple(kind[2:]) == SYMMETRIC
    sound = isinstance(scale, float) and SMALLEST <= scale < math.inf and type(zero) is int
    sound = sound and (zero == 0 if is_symmetric else 0 <= zero <= HIGHEST)
    return (x, QParams(scale, zero, is_symmetric)) if sound else None


def _quantized_input(dequantized: Any) -> fx.Node | None:
    """The value that was quantized and read back, if `quantize_input` could have written it."""
    if not _calls(dequantized, quantized.dequantize_per_tensor.tensor):
        return None
    integers, scale, zero, *kind = dequantized.args
    if not _calls(integers, quantized.quantize_per_tensor.tensor) or tuple(kind) != UNSIGNED or dequantized.kwargs:
        return None
    x, *rest = integers.args
    parts = [item.args for item in (scale, zero) if _calls(item, operator.getitem)]
    if rest != [scale, zero, *UNSIGNED] or len(parts) != 2 or [part[1] for part in parts] != [0, 1]:
        return None
    chosen = parts[0][0]
    wanted = (x, *UNSIGNED[:2], SMALLEST, UNSIGNED[2])
    written = _calls(chosen, quantized.choose_qparams.tensor) and chosen.args == wanted
    return x if written and parts[1][0] is chosen and isinstance(x, fx.Node) else None


def _float_input(x: Any) -> fx.Node | None:
    """The input, if it is not quantized in another form."""
    others = (quantized.dequantize_per_tensor.default, quantized.dequantize_per_tensor.tensor)
    return x if isinstance(x, fx.Node) and x.target not in others else None


def _rounds(node: fx.Node) -> bool:
    return ops.name_of(node).startswith(("quantized_decomposed.quantize_", "aten.fake_quantize_"))


def _calls(value: Any, target: Any) -> bool:
    return isinstance(value, fx.Node) and value.op == "call_function" and value.target is target


def _type(node: fx.Node) -> tuple[torch.dtype, torch.Size]:
    value = node.meta["val"]
    return value.dtype, value.shape
